"""The instructions of a row's norm, as LLVM IR."""

import contextlib
from collections.abc import Callable, Iterator

from llvmlite import ir

from pallas_kernels.llvm.builder import F32, Builder, declare, splat, whole
from pallas_kernels.llvm.functions import (
    float32s,
    multiply_add,
    read_bfloat16,
    rounded_to_bfloat16,
    spread,
    write_bfloat16,
)
from pallas_kernels.llvm.xla_ffi import Frame, kernel_module

X, WEIGHT, EPS = range(3)
"""Operands: x_TD, weight_D of the same type, the one number that is added to the mean square."""
CHUNK = 64 << 10
"""Numbers that a thread takes at a time, in whole rows: some ten microseconds. Less is not worth another thread, which
may be late."""


def kernel(dtype: str, is_offset: bool, is_centred: bool, lanes: int) -> ir.Module:
    def num_chunks(b: Builder, frame: Frame) -> ir.Value:
        rows = rows_of_chunk(b, frame)
        return b.udiv(b.add(frame.extent(X, 0), b.sub(rows, whole(1))), rows)

    def chunk(b: Builder, frame: Frame, i: ir.Value) -> None:
        rows = rows_of_chunk(b, frame)
        first = b.mul(i, rows)
        last = b.smaller(b.add(first, rows), frame.extent(X, 0))
        with b.counting(first, last, whole(1)) as (row, _):
            Row(b, frame, dtype, lanes, row).emit(is_offset, is_centred)

    return kernel_module(num_chunks, chunk)


def rows_of_chunk(b: Builder, frame: Frame) -> ir.Value:
    return b.larger(b.udiv(whole(CHUNK), frame.extent(X, 1)), whole(1))


class Row:
    """One row, in the function that `b` writes."""

    def __init__(self, b: Builder, frame: Frame, dtype: str, lanes: int, row: ir.Value):
        self.b, self.frame, self.lanes, self.kind = b, frame, lanes, float32s(lanes)
        self.size = 2 if dtype == "bfloat16" else 4
        self.width = frame.extent(X, 1)
        start = b.at(row, self.width, whole(0), self.size)
        self.x, self.out = b.address(frame.operand(X), start), b.address(frame.result(0), start)
        self.count = b.sitofp(self.width, F32)

    def emit(self, is_offset: bool, is_centred: bool) -> None:
        b, mean = self.b, splat(self.kind, 0.0)
        if is_centred:
            mean = spread(b, self._mean(lambda x, total: b.fadd(total, x)), self.lanes)
        centred = (lambda x: b.fsub(x, mean)) if is_centred else (lambda x: x)
        square = self._mean(lambda x, total: multiply_add(b, centred(x), centred(x), total))
        sqrt = declare(b.module, "llvm.sqrt.f32", F32, F32)
        root = b.call(sqrt, [b.fadd(square, b.read(F32, self.frame.operand(EPS), 0, align=4))])
        factor = spread(b, b.fdiv(ir.Constant(F32, 1.0), root), self.lanes)
        with self._registers() as at:
            unit = b.fmul(centred(self._read(self.x, at)), factor)
            weight = self._read(self.frame.operand(WEIGHT), at)
            if is_offset:
                weight = b.fadd(weight, splat(self.kind, 1.0))
            elif self.size == 2:
                unit = rounded_to_bfloat16(b, unit)
            self._write(b.fmul(unit, weight), at)

    def _mean(self, add: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
        """Of what `add` makes of the row."""
        b = self.b
        with b.counting(whole(0), self.width, whole(self.lanes), [splat(self.kind, 0.0)]) as (d, total):
            total[0] = add(self._read(self.x, b.mul(d, whole(self.size))), total[0])
        return b.fdiv(b.lane_sum(total[0]), self.count)

    @contextlib.contextmanager
    def _registers(self) -> Iterator[ir.Value]:
        """A loop over the row: where each register of it is."""
        b = self.b
        with b.counting(whole(0), self.width, whole(self.lanes)) as (d, _):
            yield b.mul(d, whole(self.size))

    def _read(self, base: ir.Value, at: ir.Value) -> ir.Value:
        if self.size == 2:
            return read_bfloat16(self.b, base, at, self.lanes)
        return self.b.read(self.kind, base, at, align=4)

    def _write(self, values: ir.Value, at: ir.Value) -> None:
        if self.size == 2:
            write_bfloat16(self.b, values, self.out, at)
        else:
            self.b.write(values, self.out, at, align=4)
