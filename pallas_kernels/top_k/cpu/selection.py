"""The instructions of finding the largest of a row, as LLVM IR: one kernel for each number that is wanted.

Numbers are compared as keys, whole numbers of the same order. A row goes through four steps:

1. The largest key of each of up to `MOST_PEAKS` pieces. A piece is one lane of some neighbouring registers.
2. The C-th largest of these peaks, bit by bit: at least C numbers of the row reach it, and seldom many more.
3. Whatever reaches this bound is kept, from left to right. When there is no more room, the C largest of what was kept
   stay, and from then on only what exceeds the least of them is let in.
4. The C largest of what was kept are put in order: each goes to the place that tells how many are before it.
"""

import dataclasses
from collections.abc import Callable

from llvmlite import ir

from pallas_kernels.llvm.builder import I32, I64, Builder, splat, whole
from pallas_kernels.llvm.functions import spread
from pallas_kernels.llvm.machine import Machine
from pallas_kernels.llvm.xla_ffi import Frame, kernel_module

MOST_PEAKS = 4096
"""16 KiB of a thread's stack."""
LEAST_KEY = -(2**31)
"""Below all keys of a row. What fills up registers has it."""
LINE_BYTES = 64


def kernel(count: int, machine: Machine) -> ir.Module:
    def num_chunks(b: Builder, frame: Frame) -> ir.Value:
        return frame.extent(0, 0)

    def chunk(b: Builder, frame: Frame, i: ir.Value) -> None:
        Row(b, frame, i, count, machine.lanes).emit()

    return kernel_module(num_chunks, chunk)


@dataclasses.dataclass(frozen=True)
class Kept:
    """Room for keys and their columns, from left to right; `size`: how many there are, an address."""

    keys: ir.Value
    columns: ir.Value
    size: ir.Value


class Row:
    """One row, in the function that `b` writes."""

    def __init__(self, b: Builder, frame: Frame, row: ir.Value, count: int, lanes: int):
        self.b, self.count, self.lanes = b, count, lanes
        self.kind = ir.VectorType(I32, lanes)
        self.num_columns = frame.extent(0, 1)
        self.row = b.address(frame.operand(0), b.mul(b.mul(row, self.num_columns), whole(4)))
        place = b.mul(row, whole(4 * count))
        self.values, self.found = b.address(frame.result(0), place), b.address(frame.result(1), place)
        self.whole_columns = b.and_(self.num_columns, whole(-lanes))
        # Beside what is wanted a register more fits, and behind that one is written that counts for nothing.
        self.room = (-(-2 * count // lanes) + 1) * lanes
        with b.goto_entry_block():
            self.peaks, keys, columns = (b.room(-(-n // 2), LINE_BYTES) for n in (MOST_PEAKS, *[self.room + lanes] * 2))
            self.kept = Kept(keys, columns, b.room(1))

    def emit(self) -> None:
        b = self.b
        b.store(whole(0), self.kept.size)
        least, bound_key = ir.Constant(I32, LEAST_KEY), self._least_of_largest(self.peaks, self._find_peaks())
        # What equals it is let in too; below the least key there is nothing, so without a bound that is one.
        bound = b.select(b.icmp_signed(">", bound_key, least), b.sub(bound_key, ir.Constant(I32, 1)), least)
        bound = self._keep_whole_registers(bound)
        self._keep_rest(bound)
        self._drop_all_but_largest()
        self._write_in_order()

    # ---- 1. peaks ----------------------------------------------------------------------------------

    def _find_peaks(self) -> ir.Value:
        """Returns how many there are: whole registers of them."""
        b, L = self.b, self.lanes
        registers = b.sdiv(self.num_columns, whole(L))
        each = b.sdiv(b.add(registers, whole(MOST_PEAKS // L - 1)), whole(MOST_PEAKS // L))
        each = b.select(b.icmp_signed("<", each, whole(1)), whole(1), each)
        pieces = b.sdiv(registers, each)
        with b.counting(whole(0), pieces, whole(1)) as (piece, _):
            first = b.mul(piece, each)
            with b.counting(first, b.add(first, each), whole(1), [splat(self.kind, LEAST_KEY)]) as (register, best):
                best[0] = self._larger(best[0], self._keys(b.mul(register, whole(L))))
            b.write(best[0], self.peaks, b.mul(piece, whole(4 * L)), align=4)
        return b.mul(pieces, whole(L))

    def _keys(self, column: ir.Value) -> ir.Value:
        """A register of the row as whole numbers of the same order: of negative ones all other bits change. The least
        number of all, a NaN, counts as the one above it."""
        return self._key(self.b.read(self.kind, self.row, self.b.mul(column, whole(4)), align=4))

    def _key(self, bits: ir.Value) -> ir.Value:
        b, number = self.b, self._number_like(bits)
        key = b.xor(bits, b.and_(b.ashr(bits, number(31)), number(2**31 - 1)))
        return self._larger(key, number(LEAST_KEY + 1))

    def _larger(self, one: ir.Value, other: ir.Value) -> ir.Value:
        return self.b.select(self.b.icmp_signed(">", one, other), one, other)

    def _number_like(self, value: ir.Value) -> Callable[[int], ir.Constant]:
        is_vector = isinstance(value.type, ir.VectorType)
        return lambda number: splat(value.type, number) if is_vector else ir.Constant(value.type, number)

    # ---- 2. the bound ------------------------------------------------------------------------------

    def _least_of_largest(self, keys: ir.Value, size: ir.Value) -> ir.Value:
        """The largest key that `count` of the keys at an address reach, or `LEAST_KEY` if there are not so many. They
        come in whole registers."""
        b, L = self.b, self.lanes
        lowest = ir.Constant(I32, LEAST_KEY)
        # From the highest bit to the lowest, as if the least key were 0: adding is the same.
        with b.counting(whole(0), whole(32), whole(1), [lowest]) as (bit, least):
            tried = b.add(least[0], b.shl(ir.Constant(I32, 1), b.trunc(b.sub(whole(31), bit), I32)))
            tried_L = spread(b, tried, L)
            with b.counting(whole(0), size, whole(L), [ir.Constant(self.kind, None)]) as (i, reached):
                key = b.read(self.kind, keys, b.mul(i, whole(4)), align=4)
                reached[0] = b.sub(reached[0], b.sext(b.icmp_signed(">=", key, tried_L), self.kind))
            enough = b.icmp_signed(">=", b.lane_sum(reached[0]), ir.Constant(I32, self.count))
            least[0] = b.select(enough, tried, least[0])
        return least[0]

    # ---- 3. what is let in -------------------------------------------------------------------------

    def _keep_whole_registers(self, bound: ir.Value) -> ir.Value:
        """Keep what exceeds the bound; returns the bound, which may have risen."""
        b, L = self.b, self.lanes
        mask = ir.IntType(L)
        lane = ir.Constant(self.kind, list(range(L)))
        with b.counting(whole(0), self.whole_columns, whole(L), [bound]) as (column, now):
            keys = self._keys(column)
            above = b.icmp_signed(">", keys, spread(b, now[0], L))
            before = b.block
            look, done = b.append_basic_block(), b.append_basic_block()
            b.cbranch(b.icmp_unsigned("!=", b.bitcast(above, mask), ir.Constant(mask, 0)), look, done)
            b.position_at_end(look)
            columns = b.add(spread(b, b.trunc(column, I32), L), lane)
            for i in range(L):
                index = ir.Constant(I32, i)
                self._keep(*(b.extract_element(x, index) for x in (keys, columns, above)))
            risen = self._make_room(now[0])
            b.branch(done)
            looked = b.block
            b.position_at_end(done)
            new = b.phi(I32)
            new.add_incoming(now[0], before)
            new.add_incoming(risen, looked)
            now[0] = new
        return now[0]

    def _keep_rest(self, bound: ir.Value) -> None:
        """The same for the columns beyond the last whole register: there is room for fewer than a register has."""
        b = self.b
        with b.counting(self.whole_columns, self.num_columns, whole(1)) as (column, _):
            key = self._key(b.read(I32, self.row, b.mul(column, whole(4)), align=4))
            self._keep(key, b.trunc(column, I32), b.icmp_signed(">", key, bound))

    def _keep(self, key: ir.Value, column: ir.Value, wanted: ir.Value) -> None:
        """Written in any case, and counted if wanted."""
        b, size = self.b, self.b.load(self.kept.size, typ=I64)
        for value, room in ((key, self.kept.keys), (column, self.kept.columns)):
            b.write(value, room, b.mul(size, whole(4)), align=4)
        b.store(b.add(size, b.zext(wanted, I64)), self.kept.size)

    def _make_room(self, bound: ir.Value) -> ir.Value:
        """Where another register might not fit, only the largest stay; returns the bound from then on."""
        b, before = self.b, self.b.block
        drop, done = b.append_basic_block(), b.append_basic_block()
        full = b.icmp_signed(">", b.load(self.kept.size, typ=I64), whole(self.room - self.lanes))
        b.cbranch(full, drop, done)
        b.position_at_end(drop)
        least, dropped = self._drop_all_but_largest(), b.block
        b.branch(done)
        b.position_at_end(done)
        now = b.phi(I32)
        now.add_incoming(bound, before)
        now.add_incoming(least, dropped)
        return now

    def _drop_all_but_largest(self) -> ir.Value:
        """Keep `count` of those kept, in their order; returns the least of them. Of equal ones the first stay."""
        b, kept, size = self.b, self.kept, self.b.load(self.kept.size, typ=I64)
        b.write(splat(self.kind, LEAST_KEY), kept.keys, b.mul(size, whole(4)), align=4)
        least = self._least_of_largest(kept.keys, size)
        zero = whole(0)
        with b.counting(zero, size, whole(1), [zero]) as (i, above):
            key = b.read(I32, kept.keys, b.mul(i, whole(4)), align=4)
            above[0] = b.add(above[0], b.zext(b.icmp_signed(">", key, least), I64))
        num_equal = b.sub(whole(self.count), above[0])
        with b.counting(zero, size, whole(1), [zero, num_equal]) as (i, now):
            place, equal_left = now
            from_, to = b.mul(i, whole(4)), b.mul(place, whole(4))
            key = b.read(I32, kept.keys, from_, align=4)
            for room in (kept.keys, kept.columns):
                b.write(b.read(I32, room, from_, align=4), room, to, align=4)
            equal = b.icmp_signed("==", key, least)
            stays = b.or_(b.icmp_signed(">", key, least), b.and_(equal, b.icmp_signed(">", equal_left, zero)))
            now[0] = b.add(place, b.zext(stays, I64))
            now[1] = b.sub(equal_left, b.zext(equal, I64))
        b.store(whole(self.count), kept.size)
        return least

    # ---- 4. their order ----------------------------------------------------------------------------

    def _write_in_order(self) -> None:
        b, L, kept = self.b, self.lanes, self.kept
        b.write(splat(self.kind, LEAST_KEY), kept.keys, 4 * self.count, align=4)
        lane = ir.Constant(self.kind, list(range(L)))
        with b.counting(whole(0), whole(self.count), whole(1)) as (i, _):
            own = spread(b, b.read(I32, kept.keys, b.mul(i, whole(4)), align=4), L)
            own_place = spread(b, b.trunc(i, I32), L)
            with b.counting(whole(0), whole(self.count), whole(L), [ir.Constant(self.kind, None)]) as (j, before):
                keys = b.read(self.kind, kept.keys, b.mul(j, whole(4)), align=4)
                places = b.add(spread(b, b.trunc(j, I32), L), lane)
                equal_before = b.and_(b.icmp_signed("==", keys, own), b.icmp_signed("<", places, own_place))
                is_before = b.or_(b.icmp_signed(">", keys, own), equal_before)
                before[0] = b.sub(before[0], b.sext(is_before, self.kind))
            place = b.mul(b.zext(b.lane_sum(before[0]), I64), whole(4))
            column = b.read(I32, kept.columns, b.mul(i, whole(4)), align=4)
            b.write(column, self.found, place, align=4)
            value = b.read(I32, self.row, b.mul(b.sext(column, I64), whole(4)), align=4)
            b.write(value, self.values, place, align=4)
