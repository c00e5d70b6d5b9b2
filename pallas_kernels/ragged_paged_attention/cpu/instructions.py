"""The instructions of attention by single queries over pages, as LLVM IR: one kernel for each shape of heads.

A chunk of work is the G queries of one token that share a kv head, and a range of its context. It goes through the
range in tiles of as many slots as a register has lanes: scores of a tile are one register for each query, and so are
its weights. Sums of values stay in the first-level cache; they are scaled down only where a score exceeds all before.
What the next tile needs is asked for one tile ahead, since blocks lie anywhere.
"""

import dataclasses

from llvmlite import ir

from pallas_kernels.llvm.builder import F32, I32, PTR, VOID, BFloat16, Builder, declare, splat, whole
from pallas_kernels.llvm.functions import (
    add_pair_products,
    exp,
    float32s,
    lane_max,
    multiply_add,
    read_bfloat16,
    spread,
    sums_of_each,
    tanh,
)
from pallas_kernels.llvm.xla_ffi import Frame, kernel_module
from pallas_kernels.ragged_paged_attention.numerics import LOWEST

Q, KEYS, VALUES, RANGES, ROWS, TABLES, SETTINGS = range(7)
"""Operands: q_TKGH, k_BKSH, v_BKSH, ranges_PT2, row_T, block_tables_RM, (scale, soft cap)."""
OUT, TOTAL, TOP = range(3)
"""Results: weighted sums out_PTKGH, and total and top [P, T, K, G], as `numerics.Softmax` has them."""
LINE_BYTES = 64


@dataclasses.dataclass(frozen=True)
class Heads:
    """What a kernel is made for. `pairs`: the CPU multiplies pairs of bfloat16, and queries come as such."""

    dtype: str
    group_size: int
    head_dim: int
    block_size: int
    capped: bool
    lanes: int
    num_registers: int
    pairs: bool

    @property
    def size(self) -> int:
        """Bytes of a number in the cache."""
        return 2 if self.dtype == "bfloat16" else 4


def kernel(heads: Heads) -> ir.Module:
    def num_chunks(b: Builder, frame: Frame) -> ir.Value:
        return b.mul(b.mul(frame.extent(RANGES, 0), frame.extent(RANGES, 1)), frame.extent(KEYS, 1))

    def chunk(b: Builder, frame: Frame, i: ir.Value) -> None:
        Chunk(b, frame, heads, i).emit()

    return kernel_module(num_chunks, chunk)


class Chunk:
    """One token's queries of one kv head and a range of its context, in the function that `b` writes.

    On the stack: `acc` sums of weighted values [G, H], `totals` sums of weights [G, lanes], `tops` [G], and `weights`
    of a tile [G, lanes].
    """

    def __init__(self, b: Builder, frame: Frame, heads: Heads, index: ir.Value):
        self.b, self.frame, self.heads, self.index = b, frame, heads, index
        self.kind, self.bits = float32s(heads.lanes), ir.VectorType(I32, heads.lanes)
        num_heads, num_tokens = frame.extent(KEYS, 1), frame.extent(RANGES, 1)
        self.head, part = b.srem(index, num_heads), b.sdiv(index, num_heads)
        self.num_heads, token = num_heads, b.srem(part, num_tokens)
        self.q_row = b.mul(b.add(b.mul(token, num_heads), self.head), whole(heads.group_size))
        self.begin, self.end = (self._integer(RANGES, b.add(b.mul(part, whole(2)), whole(x))) for x in (0, 1))
        row = self._integer(ROWS, token)
        self.table = b.mul(row, frame.extent(TABLES, 1))
        G, H, L = heads.group_size, heads.head_dim, heads.lanes
        self.acc, self.totals, self.tops, self.weights = (self._room(n) for n in (G * H, G * L, G, G * L))
        self.q, self.k, self.v = (frame.operand(i) for i in (Q, KEYS, VALUES))
        self.scale, self.cap = (
            spread(b, b.read(F32, frame.operand(SETTINGS), 4 * i, align=4), L) for i in range(2)
        )  # fmt: skip

    def emit(self) -> None:
        b, L = self.b, self.heads.lanes
        self._begin()
        first, last = b.and_(self.begin, whole(-L)), b.and_(b.sub(self.end, whole(1)), whole(-L))
        with b.counting(first, self.end, whole(L)) as (slot, _):
            place = self._place(slot)
            ahead = self._place(b.smaller(b.add(slot, whole(L)), last))
            self._fetch(self.k, ahead)
            self._weigh(slot, place)
            self._fetch(self.v, ahead)
            self._add_values(slot, place)
        self._finish()

    def _begin(self) -> None:
        b, heads = self.b, self.heads
        nothing = ir.Constant(self.kind, None)
        with b.counting(whole(0), whole(heads.group_size * heads.head_dim), whole(heads.lanes)) as (i, _):
            b.write(nothing, self.acc, b.mul(i, whole(4)), align=4)
        with b.counting(whole(0), whole(heads.group_size), whole(1)) as (g, _):
            b.write(nothing, self.totals, b.mul(g, whole(4 * heads.lanes)), align=4)
            b.write(ir.Constant(F32, LOWEST), self.tops, b.mul(g, whole(4)), align=4)

    def _weigh(self, slot: ir.Value, place: ir.Value) -> None:
        """The weights of a tile's slots for each query; 0 outside of the range, whatever lies there."""
        b, L = self.b, self.heads.lanes
        lane = ir.Constant(self.bits, list(range(L)))
        position = b.add(spread(b, b.trunc(slot, I32), L), lane)
        begin, end = (spread(b, b.trunc(x, I32), L) for x in (self.begin, self.end))
        seen = b.and_(b.icmp_signed(">=", position, begin), b.icmp_signed("<", position, end))
        with b.counting(whole(0), whole(self.heads.group_size), whole(1)) as (g, _):
            score = b.fmul(self._products(g, place), self.scale)
            if self.heads.capped:
                score = b.fmul(tanh(b, b.fdiv(score, self.cap)), self.cap)
            score = b.select(seen, score, splat(self.kind, LOWEST))
            top_at, total_at = b.mul(g, whole(4)), b.mul(g, whole(4 * L))
            before, tile_top = b.read(F32, self.tops, top_at, align=4), lane_max(b, score)
            with b.if_then(b.fcmp_ordered(">", tile_top, before)):
                self._fade(g, exp(b, spread(b, b.fsub(before, tile_top), L)))
                b.write(tile_top, self.tops, top_at, align=4)
            top = spread(b, b.read(F32, self.tops, top_at, align=4), L)
            weight = b.select(seen, exp(b, b.fsub(score, top)), ir.Constant(self.kind, None))
            b.write(weight, self.weights, total_at, align=4)
            total = b.fadd(b.read(self.kind, self.totals, total_at, align=4), weight)
            b.write(total, self.totals, total_at, align=4)

    def _fade(self, g: ir.Value, fade: ir.Value) -> None:
        """Scale down what query g has summed."""
        b, heads = self.b, self.heads
        total_at = b.mul(g, whole(4 * heads.lanes))
        b.write(b.fmul(b.read(self.kind, self.totals, total_at, align=4), fade), self.totals, total_at, align=4)
        start = b.mul(g, whole(4 * heads.head_dim))
        with b.counting(whole(0), whole(4 * heads.head_dim), whole(4 * heads.lanes)) as (i, _):
            at = b.add(start, i)
            b.write(b.fmul(b.read(self.kind, self.acc, at, align=4), fade), self.acc, at, align=4)

    def _products(self, g: ir.Value, place: ir.Value) -> ir.Value:
        """Query g times the keys of a tile, a slot in each lane."""
        b, heads = self.b, self.heads
        width, q_size = (2 * heads.lanes, 2) if heads.pairs else (heads.lanes, 4)
        start = b.mul(b.add(self.q_row, g), whole(heads.head_dim * q_size))
        sums: list[ir.Value] = [ir.Constant(self.kind, None)] * heads.lanes
        for d in range(0, heads.head_dim, width):
            q_at = b.add(start, whole(d * q_size))
            if heads.pairs:
                values = ir.VectorType(BFloat16(), width)
                q = b.read(values, self.q, q_at, align=2)
            else:
                q = b.read(self.kind, self.q, q_at, align=4)
            for j in range(heads.lanes):
                at = b.add(place, whole((j * heads.head_dim + d) * heads.size))
                if heads.pairs:
                    sums[j] = add_pair_products(b, sums[j], b.read(values, self.k, at, align=2), q)
                else:
                    sums[j] = multiply_add(b, self._numbers(self.k, at), q, sums[j])
        return sums_of_each(b, sums)

    def _add_values(self, slot: ir.Value, place: ir.Value) -> None:
        """Add the weighted values of a tile: of those in the range only, since 0 times NaN is NaN."""
        b, heads = self.b, self.heads
        G, H, L = heads.group_size, heads.head_dim, heads.lanes
        first = b.sub(self.begin, slot)
        first = b.select(b.icmp_signed(">", first, whole(0)), first, whole(0))
        last = b.smaller(b.sub(self.end, slot), whole(L))
        most = max(1, heads.num_registers // 2 // G)
        columns = next(n for n in range(most, 0, -1) if (H // L) % n == 0)
        with b.counting(whole(0), whole(H), whole(columns * L)) as (d, _):
            at = [b.add(b.mul(d, whole(4)), whole(4 * (g * H + c * L))) for g in range(G) for c in range(columns)]
            sums = [b.read(self.kind, self.acc, offset, align=4) for offset in at]
            start = b.add(place, b.mul(d, whole(heads.size)))
            with b.counting(first, last, whole(1), sums) as (j, now):
                row = b.add(start, b.mul(j, whole(H * heads.size)))
                values = [self._numbers(self.v, b.add(row, whole(c * L * heads.size))) for c in range(columns)]
                for g in range(G):
                    weight = b.read(F32, self.weights, b.add(b.mul(j, whole(4)), whole(4 * g * L)), align=4)
                    weight = spread(b, weight, L)
                    for c in range(columns):
                        now[g * columns + c] = multiply_add(b, values[c], weight, now[g * columns + c])
            for offset, total in zip(at, now):
                b.write(total, self.acc, offset, align=4)

    def _finish(self) -> None:
        b, heads = self.b, self.heads
        out, total, top = (self.frame.result(i) for i in (OUT, TOTAL, TOP))
        row = b.mul(self.index, whole(heads.group_size))
        start = b.mul(row, whole(4 * heads.head_dim))
        with b.counting(whole(0), whole(4 * heads.group_size * heads.head_dim), whole(4 * heads.lanes)) as (i, _):
            b.write(b.read(self.kind, self.acc, i, align=4), out, b.add(start, i), align=4)
        with b.counting(whole(0), whole(heads.group_size), whole(1)) as (g, _):
            at = b.mul(b.add(row, g), whole(4))
            lanes = b.read(self.kind, self.totals, b.mul(g, whole(4 * heads.lanes)), align=4)
            b.write(b.lane_sum(lanes), total, at, align=4)
            b.write(b.read(F32, self.tops, b.mul(g, whole(4)), align=4), top, at, align=4)

    def _place(self, slot: ir.Value) -> ir.Value:
        """The offset in the cache, in bytes, of a slot of the context that is in the range's tiles."""
        b, heads = self.b, self.heads
        block = self._integer(TABLES, b.add(self.table, b.udiv(slot, whole(heads.block_size))))
        first = b.mul(b.add(b.mul(block, self.num_heads), self.head), whole(heads.block_size))
        return b.mul(b.add(first, b.urem(slot, whole(heads.block_size))), whole(heads.head_dim * heads.size))

    def _fetch(self, base: ir.Value, place: ir.Value) -> None:
        """Ask for the memory of a tile."""
        b, heads = self.b, self.heads
        prefetch = declare(b.module, "llvm.prefetch.p0", VOID, PTR, I32, I32, I32)
        reads, stays, data = (ir.Constant(I32, flag) for flag in (0, 3, 1))
        for line in range(0, heads.lanes * heads.head_dim * heads.size, LINE_BYTES):
            b.call(prefetch, [b.address(base, b.add(place, whole(line))), reads, stays, data])

    def _numbers(self, base: ir.Value, at: ir.Value) -> ir.Value:
        """A register of the cache in float32."""
        if self.heads.dtype == "float32":
            return self.b.read(self.kind, base, at, align=4)
        return read_bfloat16(self.b, base, at, self.heads.lanes)

    def _integer(self, operand: int, index: ir.Value) -> ir.Value:
        """An int32 of an operand."""
        b = self.b
        return b.sext(b.read(I32, self.frame.operand(operand), b.mul(index, whole(4)), align=4), ir.IntType(64))

    def _room(self, num_floats: int) -> ir.Value:
        """Room on the stack, once in a function, not in each turn of the loop around a chunk."""
        with self.b.goto_entry_block():
            return self.b.room(-(-num_floats // 2), align=LINE_BYTES)
