"""The instructions of a product of few rows, as LLVM IR: one kernel for each type and number of rows.

A tile is R rows of the weight and T rows of x, all or up to 6: each register of the weight is multiplied with T of x,
and each of x with R of the weight. What differs between types and CPUs is a `Step`.
"""

from collections.abc import Sequence
from typing import Protocol

from llvmlite import ir

from pallas_kernels.few_rows_matmul import TILE_ROWS
from pallas_kernels.llvm.builder import F32, I16, I32, BFloat16, Builder, declare, splat, whole
from pallas_kernels.llvm.functions import add_pair_products, float32s, multiply_add, read_bfloat16
from pallas_kernels.llvm.machine import Machine, has_dot, has_pairs
from pallas_kernels.llvm.row_tiles import AHEAD, TILE_OUTPUTS, product_module, streams
from pallas_kernels.llvm.xla_ffi import Frame

I8 = ir.IntType(8)


class Step(Protocol):
    """How a register of each operand is multiplied. Sizes are bytes of an input in each operand, `width` the inputs of
    a register, `sums` the type of a register of sums."""

    width: int
    x_size: int
    weight_size: int
    sums: ir.VectorType

    def weight(self, b: Builder, base: ir.Value, offset: ir.Value) -> ir.Value:
        """A register of the weight."""
        ...

    def x(self, b: Builder, base: ir.Value, offset: ir.Value) -> ir.Value: ...

    def add_product(self, b: Builder, sums: ir.Value, weight: ir.Value, x: ir.Value) -> ir.Value: ...

    def one_product(self, b: Builder, weight: ir.Value, weight_at: ir.Value, x: ir.Value, x_at: ir.Value) -> ir.Value:
        """That of a single input, for those beyond the last whole register."""
        ...

    def total(self, b: Builder, sums: ir.Value) -> ir.Value:
        """Of all lanes."""
        return b.lane_sum(sums)


class ConvertedStep(Step):
    """bfloat16 weights made float32, as x is already."""

    x_size, weight_size = 4, 2

    def __init__(self, machine: Machine):
        self.width = machine.lanes
        self.sums = float32s(self.width)

    def weight(self, b: Builder, base: ir.Value, offset: ir.Value) -> ir.Value:
        return read_bfloat16(b, base, offset, self.width)

    def x(self, b: Builder, base: ir.Value, offset: ir.Value) -> ir.Value:
        return b.read(self.sums, base, offset, align=4)

    def add_product(self, b: Builder, sums: ir.Value, weight: ir.Value, x: ir.Value) -> ir.Value:
        return multiply_add(b, x, weight, sums)

    def one_product(self, b: Builder, weight: ir.Value, weight_at: ir.Value, x: ir.Value, x_at: ir.Value) -> ir.Value:
        return b.fmul(one_bfloat16(b, weight, weight_at), b.read(F32, x, x_at, align=4))


class PairStep(Step):
    """bfloat16 with AVX512-BF16: the products of pairs of neighbours, both operands as they are."""

    x_size = weight_size = 2

    def __init__(self, machine: Machine):
        self.width = 2 * machine.lanes
        self.sums = ir.VectorType(F32, machine.lanes)
        self._values = ir.VectorType(BFloat16(), self.width)

    def weight(self, b: Builder, base: ir.Value, offset: ir.Value) -> ir.Value:
        return b.read(self._values, base, offset, align=2)

    x = weight

    def add_product(self, b: Builder, sums: ir.Value, weight: ir.Value, x: ir.Value) -> ir.Value:
        return add_pair_products(b, sums, weight, x)

    def one_product(self, b: Builder, weight: ir.Value, weight_at: ir.Value, x: ir.Value, x_at: ir.Value) -> ir.Value:
        return b.fmul(one_bfloat16(b, weight, weight_at), one_bfloat16(b, x, x_at))


class IntegerStep(Step):
    """int8, widened to 16 bits and multiplied in pairs."""

    x_size = weight_size = 1

    def __init__(self, machine: Machine):
        self.width = 2 * machine.lanes
        self.sums = ir.VectorType(I32, machine.lanes)
        self._values, self._wide = ir.VectorType(I8, self.width), ir.VectorType(I16, self.width)
        self._multiply = "llvm.x86.avx512.pmaddw.d.512" if machine.lanes == 16 else "llvm.x86.avx2.pmadd.wd"

    def weight(self, b: Builder, base: ir.Value, offset: ir.Value) -> ir.Value:
        return b.sext(b.read(self._values, base, offset, align=1), self._wide)

    x = weight

    def add_product(self, b: Builder, sums: ir.Value, weight: ir.Value, x: ir.Value) -> ir.Value:
        multiply = declare(b.module, self._multiply, self.sums, self._wide, self._wide)
        return b.add(sums, b.call(multiply, [weight, x]))

    def one_product(self, b: Builder, weight: ir.Value, weight_at: ir.Value, x: ir.Value, x_at: ir.Value) -> ir.Value:
        return b.mul(*(b.sext(b.read(I8, base, at, align=1), I32) for base, at in ((weight, weight_at), (x, x_at))))


class WordStep(IntegerStep):
    """int8 weights with rows of int16."""

    x_size = 2

    def x(self, b: Builder, base: ir.Value, offset: ir.Value) -> ir.Value:
        return b.read(self._wide, base, offset, align=2)

    def one_product(self, b: Builder, weight: ir.Value, weight_at: ir.Value, x: ir.Value, x_at: ir.Value) -> ir.Value:
        factors = (b.read(I8, weight, weight_at, align=1), b.read(I16, x, x_at, align=2))
        return b.sitofp(b.mul(*(b.sext(factor, I32) for factor in factors)), F32)

    def total(self, b: Builder, sums: ir.Value) -> ir.Value:
        return b.lane_sum(b.sitofp(sums, float32s(self.sums.count)))  # which 32 bits may not hold


class DotStep(IntegerStep):
    """int8 with VNNI, which multiplies bytes without a sign with those that have one: a weight counts as 128 more than
    it is, and `kernel` takes 128 times the sum of x from the result."""

    def __init__(self, machine: Machine):
        super().__init__(machine)
        self.width = 4 * machine.lanes
        self._values = ir.VectorType(I8, self.width)
        self._dot = f"llvm.x86.avx512.vpdpbusd.{32 * machine.lanes}"

    def weight(self, b: Builder, base: ir.Value, offset: ir.Value) -> ir.Value:
        return b.xor(self.x(b, base, offset), splat(self._values, -128))

    def x(self, b: Builder, base: ir.Value, offset: ir.Value) -> ir.Value:
        return b.read(self._values, base, offset, align=1)

    def add_product(self, b: Builder, sums: ir.Value, weight: ir.Value, x: ir.Value) -> ir.Value:
        dot = declare(b.module, self._dot, self.sums, self.sums, self._values, self._values)
        return b.call(dot, [sums, weight, x])


def one_bfloat16(b: Builder, base: ir.Value, offset: ir.Value) -> ir.Value:
    """A bfloat16 number in float32."""
    return b.bitcast(b.shl(b.zext(b.read(I16, base, offset, align=2), I32), ir.Constant(I32, 16)), F32)


def step_for(dtype: str, machine: Machine) -> Step:
    """The fastest for operands of a type."""
    if dtype == "bfloat16":
        return PairStep(machine) if has_pairs(machine) else ConvertedStep(machine)
    if dtype == "int16":
        return WordStep(machine)
    return DotStep(machine) if has_dot(machine) else IntegerStep(machine)


def kernel(dtype: str, num_rows: int, machine: Machine) -> ir.Module:
    """The kernel of `few_rows_matmul` for `num_rows` rows of a type."""
    step = step_for(dtype, machine)

    def emit_tile(b: Builder, frame: Frame, rows: Sequence[ir.Value], first: ir.Value, last: ir.Value) -> None:
        Tile(b, frame, step, rows, machine.num_registers).emit_all(first, last)

    return product_module(num_rows, TILE_ROWS, emit_tile)


class Tile:
    """Sums of T rows of x with R rows of the weight, in the function that `b` writes."""

    def __init__(self, b: Builder, frame: Frame, step: Step, rows: Sequence[ir.Value], num_registers: int):
        self.b, self.step, self.rows, self.T = b, step, rows, len(rows)
        self.R = next((R for R in TILE_OUTPUTS if num_registers >= (self.T + 1) * R + 1), 1)
        self.x, self.weight, self.out = frame.operand(0), frame.operand(1), frame.result(0)
        self.num_outputs, self.num_inputs = frame.extent(1, 0), frame.extent(1, 1)
        self.whole_inputs = b.and_(self.num_inputs, whole(-step.width))

    def emit_all(self, first: ir.Value, last: ir.Value) -> None:
        """The tiles of a range of outputs."""
        offsets = self._x_sums() if isinstance(self.step, DotStep) else None
        with streams(self.b, first, last, self.R) as columns:
            self._emit(columns, offsets)

    def _emit(self, columns: list[ir.Value], offsets: list[ir.Value] | None) -> None:
        """The tile of some outputs."""
        b, T, R = self.b, self.T, self.R
        zeros = [ir.Constant(self.step.sums, None)] * (T * R)
        with b.counting(whole(0), self.whole_inputs, whole(self.step.width), zeros) as (d, sums):
            places = [self._at(column, d, self.step.weight_size) for column in columns]
            for place in places:
                b.prefetch(self.weight, b.add(place, whole(AHEAD)))
            weights = [self.step.weight(b, self.weight, place) for place in places]
            for t in range(T):
                x = self.step.x(b, self.x, self._at(self.rows[t], d, self.step.x_size))
                for r in range(R):
                    sums[t * R + r] = self.step.add_product(b, sums[t * R + r], weights[r], x)
        totals = [self.step.total(b, vector) for vector in sums]
        if offsets is not None:
            totals = [b.sub(total, offsets[i // R]) for i, total in enumerate(totals)]
        self._add_last_inputs(columns, totals)
        for i, total in enumerate(totals):
            self._write(total, self.rows[i // R], columns[i % R])

    def _write(self, total: ir.Value, row: ir.Value, column: ir.Value) -> None:
        self.b.write(total, self.out, self.b.at(row, self.num_outputs, column, 4), align=4)

    def _add_last_inputs(self, columns: list[ir.Value], totals: list[ir.Value]) -> None:
        """Those beyond the last whole register."""
        b, step = self.b, self.step
        add = b.add if totals[0].type == I32 else b.fadd
        with b.counting(self.whole_inputs, self.num_inputs, whole(1), totals) as (d, now):
            for i in range(len(now)):
                places = (
                    self._at(columns[i % self.R], d, step.weight_size),
                    self._at(self.rows[i // self.R], d, step.x_size),
                )
                now[i] = add(now[i], step.one_product(b, self.weight, places[0], self.x, places[1]))
        totals[:] = now

    def _x_sums(self) -> list[ir.Value]:
        """128 times the sum of each row of x, as far as registers are whole."""
        b, step = self.b, self.step
        ones = splat(ir.VectorType(I8, step.width), 1)
        zeros = [ir.Constant(step.sums, None)] * self.T
        with b.counting(whole(0), self.whole_inputs, whole(step.width), zeros) as (d, sums):
            for t in range(self.T):
                x = step.x(b, self.x, self._at(self.rows[t], d, step.x_size))
                sums[t] = step.add_product(b, sums[t], ones, x)
        return [b.shl(b.lane_sum(vector), ir.Constant(I32, 7)) for vector in sums]

    def _at(self, row: ir.Value, column: ir.Value, itemsize: int) -> ir.Value:
        return self.b.at(row, self.num_inputs, column, itemsize)
