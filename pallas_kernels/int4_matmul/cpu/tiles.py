"""The instructions of a product with a weight in 4 bits, as LLVM IR: one kernel for each type and number of rows, and
for each type one that writes the weight in it.

A tile is R outputs and up to 8 rows of x, and goes through the inputs 64 at a time, which are two groups: 32 bytes and
two scales of each output. What differs between types and CPUs is a `Step`.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Protocol

from llvmlite import ir

from pallas_kernels.int4_matmul import GROUP, INPUTS, ZERO
from pallas_kernels.int4_matmul.cpu import RECORDS, TILE_ROWS
from pallas_kernels.int4_matmul.cpu.rows import CORRECTIONS, RECORD, STEPS
from pallas_kernels.llvm.builder import I16, I32, BFloat16, Builder, declare, splat, whole
from pallas_kernels.llvm.functions import add_pair_products, float32s, multiply_add, spread
from pallas_kernels.llvm.machine import Machine, has_pairs
from pallas_kernels.llvm.row_tiles import TILE_OUTPUTS, chunks_of, outputs_of, product_module, streams
from pallas_kernels.llvm.xla_ffi import Frame, kernel_module

BYTES = INPUTS // 2
SCALE_BYTES = 2
I8 = ir.IntType(8)


class Step(Protocol):
    """How 64 inputs are multiplied. `x_size`: bytes of an input of x. `sums`: the type of a register of sums."""

    x_size: int
    sums: ir.VectorType

    def weights(self, b: Builder, byte: ir.Value) -> list[ir.Value]:
        """The unscaled weights of 32 bytes, in registers."""
        ...

    def x(self, b: Builder, base: ir.Value, offset: ir.Value) -> list[ir.Value]:
        """The inputs that these registers meet."""
        ...

    def scales(self, b: Builder, both: ir.Value) -> list[ir.Value]:
        """For every register of a group's sums what they are multiplied with; `both` has the two scales."""
        ...

    def groups(self, b: Builder, weights: list[ir.Value], x: list[ir.Value]) -> list[ir.Value]:
        """The groups' sums, as many registers as there are of `scales`."""
        ...


class PairStep:
    """bfloat16 with AVX512-BF16. One register of sums has both groups, eight lanes of each: a register of weights has
    a half of each group."""

    x_size = 2

    def __init__(self, machine: Machine):
        self.sums = float32s(machine.lanes)
        self._halves, self._values = ir.VectorType(I16, GROUP), ir.VectorType(BFloat16(), GROUP)
        # The instruction that looks numbers up takes five bits, of which the upper one belongs to the next value.
        self._table = ir.Constant(self._halves, [bits_of(value % 16 - ZERO) >> 16 for value in range(GROUP)])

    def weights(self, b: Builder, byte: ir.Value) -> list[ir.Value]:
        look_up = declare(b.module, "llvm.x86.avx512.permvar.hi.512", self._halves, self._halves, self._halves)
        low = b.zext(byte, self._halves)
        high = b.lshr(low, splat(self._halves, 4))
        return [b.bitcast(b.call(look_up, [self._table, each]), self._values) for each in (low, high)]

    def x(self, b: Builder, base: ir.Value, offset: ir.Value) -> list[ir.Value]:
        starts = (0, GROUP // 2)
        return [b.bitcast(halves_of_groups(b, base, offset, start), self._values) for start in starts]

    def scales(self, b: Builder, both: ir.Value) -> list[ir.Value]:
        return scales_of_halves(b, both, self.sums)

    def groups(self, b: Builder, weights: list[ir.Value], x: list[ir.Value]) -> list[ir.Value]:
        first = add_pair_products(b, ir.Constant(self.sums, None), weights[0], x[0])
        return [add_pair_products(b, first, weights[1], x[1])]


class ByteStep:
    """x in the records of `rows`. A register of 32 bytes has a half of each group, and one of sums both groups, four
    lanes of each: 16 bits hold the sums of two pairs of products, and pairs of these are summed in 32. AVX512 has no
    need of wider registers here."""

    x_size = RECORD // INPUTS

    def __init__(self, machine: Machine):
        self.sums = float32s(8)
        self._bytes, self._words = ir.VectorType(I8, BYTES), ir.VectorType(I16, BYTES // 2)
        self._totals = ir.VectorType(I32, self.sums.count)

    def weights(self, b: Builder, byte: ir.Value) -> list[ir.Value]:
        return [b.and_(byte, splat(self._bytes, 15)), b.lshr(byte, splat(self._bytes, 4))]

    def x(self, b: Builder, base: ir.Value, offset: ir.Value) -> list[ir.Value]:
        parts = ((0, self._bytes), (BYTES, self._bytes), (CORRECTIONS, self._totals), (STEPS, self.sums))
        return [b.read(kind, base, b.add(offset, whole(start)), align=4) for start, kind in parts]

    def scales(self, b: Builder, both: ir.Value) -> list[ir.Value]:
        return scales_of_halves(b, both, self.sums)

    def groups(self, b: Builder, weights: list[ir.Value], x: list[ir.Value]) -> list[ir.Value]:
        multiply = declare(b.module, "llvm.x86.avx2.pmadd.ub.sw", self._words, self._bytes, self._bytes)
        widen = declare(b.module, "llvm.x86.avx2.pmadd.wd", self._totals, self._words, self._words)
        words = b.add(*[b.call(multiply, [weight, part]) for weight, part in zip(weights, x)])
        total = b.sub(b.call(widen, [words, splat(self._words, 1)]), x[2])
        return [b.fmul(b.sitofp(total, self.sums), x[3])]


class ConvertedStep:
    """Weights made float32, as x is already; registers in the order of the inputs."""

    x_size = 4

    def __init__(self, machine: Machine):
        self.sums = float32s(machine.lanes)

    def weights(self, b: Builder, byte: ir.Value) -> list[ir.Value]:
        lanes, found = self.sums.count, []
        whole_numbers = ir.VectorType(I32, lanes)
        for start in range(0, INPUTS, lanes):
            group, within = divmod(start, GROUP)
            first = group * GROUP // 2 + within % (GROUP // 2)
            mask = ir.Constant(ir.VectorType(I32, lanes), list(range(first, first + lanes)))
            value = b.zext(b.shuffle_vector(byte, byte, mask), whole_numbers)
            is_low = within < GROUP // 2
            value = b.and_(value, splat(whole_numbers, 15)) if is_low else b.lshr(value, splat(whole_numbers, 4))
            found.append(b.sitofp(b.sub(value, splat(whole_numbers, ZERO)), self.sums))
        return found

    def x(self, b: Builder, base: ir.Value, offset: ir.Value) -> list[ir.Value]:
        starts = range(0, INPUTS, self.sums.count)
        return [b.read(self.sums, base, b.add(offset, whole(4 * start)), align=4) for start in starts]

    def scales(self, b: Builder, both: ir.Value) -> list[ir.Value]:
        return scales_of_groups(b, both, self.sums)

    def groups(self, b: Builder, weights: list[ir.Value], x: list[ir.Value]) -> list[ir.Value]:
        half, found = len(weights) // 2, []
        for own in (slice(half), slice(half, None)):
            first, *others = zip(weights[own], x[own])
            total = b.fmul(*first)
            for each in others:
                total = multiply_add(b, *each, total)
            found.append(total)
        return found


STEP_TYPES: dict[str, Callable[[Machine], Step]] = {"bfloat16": PairStep, RECORDS: ByteStep, "float32": ConvertedStep}
"""By the type of x, as a kernel takes it."""


def halves_of_groups(b: Builder, base: ir.Value, offset: ir.Value, start: int) -> ir.Value:
    """16 inputs of 2 bytes of each of two groups, from `start` on in each."""
    half = ir.VectorType(I16, GROUP // 2)
    parts = [b.read(half, base, b.add(offset, whole(2 * (start + g))), align=2) for g in (0, GROUP)]
    return b.shuffle_vector(*parts, ir.Constant(ir.VectorType(I32, GROUP), list(range(GROUP))))


def scales_of_halves(b: Builder, both: ir.Value, kind: ir.VectorType) -> list[ir.Value]:
    """One register, for sums of which the lower half of the lanes is of the first group."""
    bits, half = ir.VectorType(I32, kind.count), kind.count // 2
    moved = b.shl(spread(b, both, kind.count), ir.Constant(bits, [16] * half + [0] * half))
    return [b.bitcast(b.and_(moved, splat(bits, -(1 << 16))), kind)]


def scales_of_groups(b: Builder, both: ir.Value, kind: ir.VectorType) -> list[ir.Value]:
    """A register for each of the two groups."""
    bits = ir.VectorType(I32, kind.count)
    spread_both = spread(b, both, kind.count)  # which an instruction does that reads
    of_each = (b.shl(spread_both, splat(bits, 16)), b.and_(spread_both, splat(bits, -(1 << 16))))
    return [b.bitcast(each, kind) for each in of_each]


def bits_of(number: float) -> int:
    """Those of a float32."""
    return struct.unpack("<I", struct.pack("<f", number))[0]


def unpacking(dtype: str, machine: Machine) -> ir.Module:
    """The kernel that writes the weight in a type, from its bytes and scales; further operands are not read."""
    step = ConvertedStep(machine)
    lanes, size = machine.lanes, 2 if dtype == "bfloat16" else 4

    def chunk(b: Builder, frame: Frame, i: ir.Value) -> None:
        (first, last), num_bytes = outputs_of(b, i, frame.extent(0, 0)), frame.extent(0, 1)
        packed, scale, out = frame.operand(0), frame.operand(1), frame.result(0)
        with b.counting(b.mul(first, num_bytes), b.mul(last, num_bytes), whole(BYTES)) as (place, _):
            weights, scales = read_inputs(b, step, packed, scale, place)
            for k, weight in enumerate(weights):
                weight = b.fmul(weight, scales[k * lanes // GROUP])
                weight = rounded_to_bfloat16(b, weight) if dtype == "bfloat16" else weight
                b.write(weight, out, b.mul(b.add(b.mul(place, whole(2)), whole(k * lanes)), whole(size)), align=size)

    return kernel_module(lambda b, frame: chunks_of(b, frame.extent(0, 0)), chunk)


def rounded_to_bfloat16(b: Builder, number: ir.Value) -> ir.Value:
    """The bits of float32 numbers, rounded to nearest, ties to even."""
    kind = ir.VectorType(I32, number.type.count)
    bits, sixteen = b.bitcast(number, kind), splat(kind, 16)
    odd = b.and_(b.lshr(bits, sixteen), splat(kind, 1))
    up = b.add(bits, b.add(odd, splat(kind, 0x7FFF)))
    return b.trunc(b.lshr(up, sixteen), ir.VectorType(I16, kind.count))


def read_inputs(
    b: Builder, step: Step, packed: ir.Value, scale: ir.Value, place: ir.Value
) -> tuple[list[ir.Value], list[ir.Value]]:
    """(weights, scales) of 64 inputs, whose bytes begin at `place`."""
    byte = b.read(ir.VectorType(I8, BYTES), packed, place, align=1)
    both = b.read(I32, scale, b.udiv(place, whole(GROUP // 2 // SCALE_BYTES)), align=2)
    return step.weights(b, byte), step.scales(b, both)


def kernel(dtype: str, num_rows: int, machine: Machine) -> ir.Module:
    """The kernel of `int4_matmul` for `num_rows` rows of a type; with 8 and more, of any number that leaves the same
    rest when it is divided by 8."""
    step: Step = STEP_TYPES[dtype](machine)
    assert dtype != "bfloat16" or has_pairs(machine), f"{machine} has no products of bfloat16"

    def emit_tile(b: Builder, frame: Frame, rows: Sequence[ir.Value], first: ir.Value, last: ir.Value) -> None:
        Tile(b, frame, step, rows, machine.num_registers).emit_all(first, last)

    return product_module(num_rows, TILE_ROWS, emit_tile)


class Tile:
    """Sums of T rows of x with R outputs, in the function that `b` writes."""

    def __init__(self, b: Builder, frame: Frame, step: Step, rows: Sequence[ir.Value], num_registers: int):
        self.b, self.step, self.rows, self.T = b, step, rows, len(rows)
        self.R = next((R for R in TILE_OUTPUTS if num_registers >= self.T * R + 3 * R + 4), 1)
        self.x, self.packed, self.scale, self.out = *(frame.operand(i) for i in range(3)), frame.result(0)
        self.num_outputs, self.num_inputs = frame.extent(1, 0), b.mul(frame.extent(1, 1), whole(2))

    def emit_all(self, first: ir.Value, last: ir.Value) -> None:
        """The tiles of a range of outputs."""
        with streams(self.b, first, last, self.R) as columns:
            self._emit(columns)

    def _emit(self, columns: list[ir.Value]) -> None:
        """The tile of some outputs."""
        b, step, R = self.b, self.step, self.R
        zeros = [ir.Constant(step.sums, None)] * (self.T * R)
        with b.counting(whole(0), self.num_inputs, whole(INPUTS), zeros) as (d, sums):
            weights, scales = zip(*[self._read(column, d) for column in columns])
            for t, row in enumerate(self.rows):
                x = step.x(b, self.x, b.at(row, self.num_inputs, d, step.x_size))
                for r in range(R):
                    for scale, group in zip(scales[r], step.groups(b, weights[r], x)):
                        sums[t * R + r] = multiply_add(b, group, scale, sums[t * R + r])
        for i, vector in enumerate(sums):
            place = b.at(self.rows[i // R], self.num_outputs, columns[i % R], 4)
            b.write(b.lane_sum(vector), self.out, place, align=4)

    def _read(self, column: ir.Value, d: ir.Value) -> tuple[list[ir.Value], list[ir.Value]]:
        """(weights, scales) of 64 inputs of an output."""
        place = self.b.udiv(self.b.at(column, self.num_inputs, d, 1), whole(2))
        return read_inputs(self.b, self.step, self.packed, self.scale, place)
