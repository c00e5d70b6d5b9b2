"""The instructions of a product with a weight in 4 bits, as LLVM IR: one kernel for each type and number of rows, and
one that writes the weight in float32.

A tile is R outputs and up to 8 rows of x, and goes through the inputs some groups at a time: two are 32 bytes and two
scales of each output. What differs between types and CPUs is a `Step`.
"""

from collections.abc import Sequence
from typing import Protocol

from llvmlite import ir

from pallas_kernels.int4_matmul import GROUP, INPUTS, RECORDS, TILE_ROWS, ZERO
from pallas_kernels.int4_matmul.cpu.rows import LANES, corrections_at, steps_at
from pallas_kernels.llvm.builder import I16, I32, Builder, declare, splat, whole
from pallas_kernels.llvm.functions import float32s, multiply_add, spread
from pallas_kernels.llvm.machine import Machine, has_dot
from pallas_kernels.llvm.row_tiles import AHEAD, TILE_OUTPUTS, chunks_of, outputs_of, product_module, streams
from pallas_kernels.llvm.xla_ffi import Frame, kernel_module

I8 = ir.IntType(8)
GROUP_BYTES, SCALE_BYTES = GROUP // 2, 2
_LANE_SHORTS = 8
"""16-bit numbers in each part of a register within which bytes change places in one instruction."""


class Step(Protocol):
    """How the inputs of some groups are multiplied. `x_size`: bytes of an input of x. `sums`: the type of a register of
    sums."""

    num_groups: int
    x_size: int
    sums: ir.VectorType

    def weights(self, b: Builder, byte: ir.Value) -> list[ir.Value]:
        """The unscaled weights of the groups' bytes, in registers."""
        ...

    def x(self, b: Builder, base: ir.Value, offset: ir.Value) -> list[ir.Value]:
        """The inputs that these registers meet."""
        ...

    def scales(self, b: Builder, all_scales: ir.Value) -> list[ir.Value]:
        """For every register of the groups' sums what they are multiplied with; `all_scales`: those of all groups, as
        one whole number."""
        ...

    def groups(self, b: Builder, weights: list[ir.Value], x: list[ir.Value]) -> list[ir.Value]:
        """The groups' sums, as many registers as there are of `scales`."""
        ...


class ByteStep:
    """x in the records of `rows`. A register of bytes has a half of each group, and one of sums four lanes of each: 16
    bits hold the sums of two pairs of products, and pairs of these are summed in 32."""

    x_size = 2

    def __init__(self, num_groups: int):
        self.num_groups = num_groups
        self.sums = float32s(LANES * num_groups)
        self._bytes = ir.VectorType(I8, num_groups * GROUP_BYTES)
        self._words, self._totals = ir.VectorType(I16, self._bytes.count // 2), ir.VectorType(I32, self.sums.count)

    def weights(self, b: Builder, byte: ir.Value) -> list[ir.Value]:
        return [b.and_(byte, splat(self._bytes, 15)), b.lshr(byte, splat(self._bytes, 4))]

    def x(self, b: Builder, base: ir.Value, offset: ir.Value) -> list[ir.Value]:
        starts = (0, self._bytes.count, corrections_at(self.num_groups), steps_at(self.num_groups))
        kinds = (self._bytes, self._bytes, self._totals, self.sums)
        return [b.read(kind, base, b.add(offset, whole(start)), align=4) for start, kind in zip(starts, kinds)]

    def scales(self, b: Builder, all_scales: ir.Value) -> list[ir.Value]:
        """One register with the scales of the groups of lanes, which are as far as bytes change places at once."""
        shorts = ir.VectorType(I16, 2 * self.sums.count)
        repeated = b.bitcast(spread(b, all_scales, shorts.count // self.num_groups), shorts)
        below = shorts.count  # the first number of what zeros are taken from: bfloat16 is the upper half of float32
        upper = [_LANE_SHORTS * group + group for group in range(self.num_groups) for _ in range(LANES)]
        mask = ir.Constant(ir.VectorType(I32, shorts.count), [place for each in upper for place in (below, each)])
        return [b.bitcast(b.shuffle_vector(repeated, ir.Constant(shorts, None), mask), self.sums)]

    def groups(self, b: Builder, weights: list[ir.Value], x: list[ir.Value]) -> list[ir.Value]:
        return [b.fmul(b.sitofp(self._total(b, weights, x), self.sums), x[3])]

    def _total(self, b: Builder, weights: list[ir.Value], x: list[ir.Value]) -> ir.Value:
        """Whole numbers. AVX512 alone has no need of wider registers here."""
        multiply = declare(b.module, "llvm.x86.avx2.pmadd.ub.sw", self._words, self._bytes, self._bytes)
        widen = declare(b.module, "llvm.x86.avx2.pmadd.wd", self._totals, self._words, self._words)
        words = b.add(*[b.call(multiply, [weight, part]) for weight, part in zip(weights, x)])
        return b.add(b.call(widen, [words, splat(self._words, 1)]), x[2])


class DotStep(ByteStep):
    """The same with VNNI, which multiplies bytes by fours and sums them in 32 bits."""

    def _total(self, b: Builder, weights: list[ir.Value], x: list[ir.Value]) -> ir.Value:
        name = f"llvm.x86.avx512.vpdpbusd.{8 * self._bytes.count}"
        dot = declare(b.module, name, self._totals, self._totals, self._bytes, self._bytes)
        first, second, correction, _ = x
        return b.call(dot, [b.call(dot, [correction, weights[0], first]), weights[1], second])


class ConvertedStep:
    """Weights made float32, as x is already; registers in the order of the inputs of two groups."""

    num_groups, x_size = 2, 4

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

    def scales(self, b: Builder, all_scales: ir.Value) -> list[ir.Value]:
        bits = ir.VectorType(I32, self.sums.count)
        both = spread(b, all_scales, self.sums.count)  # which an instruction does that reads
        of_each = (b.shl(both, splat(bits, 16)), b.and_(both, splat(bits, -(1 << 16))))
        return [b.bitcast(each, self.sums) for each in of_each]

    def groups(self, b: Builder, weights: list[ir.Value], x: list[ir.Value]) -> list[ir.Value]:
        half, found = len(weights) // 2, []
        for own in (slice(half), slice(half, None)):
            first, *others = zip(weights[own], x[own])
            total = b.fmul(*first)
            for each in others:
                total = multiply_add(b, *each, total)
            found.append(total)
        return found


def step_for(dtype: str, machine: Machine) -> Step:
    """The fastest for rows of a type, or for records."""
    if dtype in RECORDS:
        return (DotStep if has_dot(machine) else ByteStep)(RECORDS[dtype])
    return ConvertedStep(machine)


def unpacking(machine: Machine) -> ir.Module:
    """The kernel that writes the weight in float32, from its bytes and scales; further operands are not read."""
    step, lanes, size = ConvertedStep(machine), machine.lanes, 4

    def chunk(b: Builder, frame: Frame, i: ir.Value) -> None:
        (first, last), num_bytes = outputs_of(b, i, frame.extent(0, 0)), frame.extent(0, 1)
        packed, scale, out = frame.operand(0), frame.operand(1), frame.result(0)
        with b.counting(b.mul(first, num_bytes), b.mul(last, num_bytes), whole(INPUTS // 2)) as (place, _):
            weights, scales = read_inputs(b, step, packed, scale, place)
            for k, weight in enumerate(weights):
                at = b.mul(b.add(b.mul(place, whole(2)), whole(k * lanes)), whole(size))
                b.write(b.fmul(weight, scales[k * lanes // GROUP]), out, at, align=size)

    return kernel_module(lambda b, frame: chunks_of(b, frame.extent(0, 0)), chunk)


def read_inputs(
    b: Builder, step: Step, packed: ir.Value, scale: ir.Value, place: ir.Value
) -> tuple[list[ir.Value], list[ir.Value]]:
    """(weights, scales) of a step's inputs, whose bytes begin at `place`."""
    byte = b.read(ir.VectorType(I8, step.num_groups * GROUP_BYTES), packed, place, align=1)
    all_bits = ir.IntType(8 * SCALE_BYTES * step.num_groups)
    all_scales = b.read(all_bits, scale, scale_place(b, place), align=2)
    return step.weights(b, byte), step.scales(b, all_scales)


def scale_place(b: Builder, place: ir.Value) -> ir.Value:
    """Where the scales are of the groups whose bytes are at a place."""
    return b.udiv(place, whole(GROUP_BYTES // SCALE_BYTES))


def kernel(dtype: str, num_rows: int, machine: Machine) -> ir.Module:
    """The kernel of `int4_matmul` for `num_rows` rows of a type, or records; with 8 and more, of any number that leaves
    the same rest when it is divided by 8."""
    step = step_for(dtype, machine)

    def emit_tile(b: Builder, frame: Frame, rows: Sequence[ir.Value], first: ir.Value, last: ir.Value) -> None:
        Tile(b, frame, step, rows, machine.num_registers).emit_all(first, last)

    return product_module(num_rows, TILE_ROWS, emit_tile)


class Tile:
    """Sums of T rows of x with R outputs, in the function that `b` writes."""

    def __init__(self, b: Builder, frame: Frame, step: Step, rows: Sequence[ir.Value], num_registers: int):
        self.b, self.step, self.rows, self.T = b, step, rows, len(rows)
        self.R = next((R for R in TILE_OUTPUTS if num_registers >= self.T * R + 3 * R + 4), 1)
        self.x, self.packed, self.scale, self.out = *(frame.operand(i) for i in range(3)), frame.result(0)
        self.num_outputs, self.num_bytes = frame.extent(1, 0), frame.extent(1, 1)
        self.num_inputs = b.mul(self.num_bytes, whole(2))

    def emit_all(self, first: ir.Value, last: ir.Value) -> None:
        """The tiles of a range of outputs."""
        with streams(self.b, first, last, self.R) as columns:
            self._emit(columns)

    def _emit(self, columns: list[ir.Value]) -> None:
        """The tile of some outputs."""
        b, step, R = self.b, self.step, self.R
        of_each = [self._weight_of(column) for column in columns]
        zeros = [ir.Constant(step.sums, None)] * (self.T * R)
        with b.counting(whole(0), self.num_bytes, whole(step.num_groups * GROUP_BYTES), zeros) as (byte, sums):
            for packed, _ in of_each:
                b.prefetch(packed, b.add(byte, whole(AHEAD)))
            weights, scales = zip(*[read_inputs(b, step, *weight, byte) for weight in of_each])
            for t, row in enumerate(self.rows):
                x = step.x(b, self.x, b.at(row, self.num_inputs, b.mul(byte, whole(2)), step.x_size))
                for r in range(R):
                    for scale, group in zip(scales[r], step.groups(b, weights[r], x)):
                        sums[t * R + r] = multiply_add(b, group, scale, sums[t * R + r])
        for i, vector in enumerate(sums):
            place = b.at(self.rows[i // R], self.num_outputs, columns[i % R], 4)
            b.write(b.lane_sum(vector), self.out, place, align=4)

    def _weight_of(self, column: ir.Value) -> tuple[ir.Value, ir.Value]:
        """(bytes, scales) of an output: where they begin."""
        place = self.b.mul(column, self.num_bytes)
        return self.b.address(self.packed, place), self.b.address(self.scale, scale_place(self.b, place))
