"""Rows of x as whole numbers of 8 bits with a step for every 32 inputs, as LLVM IR: what steps of bytes multiply.

A record is of as many groups as a register of packed weights has, which is of 32 inputs each: first the first halves of
all groups, then their second halves, as bytes of the packed weight have them; then for each group four times 32 bits,
of which the first is what an unsigned weight counts too much, below zero; and for each group four times its step in
float32. So a record has two bytes for an input.
"""

import math

from llvmlite import ir

from pallas_kernels.int4_matmul import GROUP, ZERO
from pallas_kernels.llvm.builder import F32, I32, Builder, declare, splat, whole
from pallas_kernels.llvm.functions import INFINITE, magnitude_bits, read_bfloat16, spread
from pallas_kernels.llvm.xla_ffi import Frame, kernel_module

LARGEST = 127
HALF = GROUP // 2
LANES = 4
"""Of a register of sums, for each group: four bytes are multiplied to one."""
LEAST = 2.0**-100
"""A group without a larger number is zeros: the inverse of its step would not be a finite number."""
_I8 = ir.IntType(8)


def corrections_at(num_groups: int) -> int:
    """Where in a record they begin."""
    return num_groups * GROUP


def steps_at(num_groups: int) -> int:
    """Where in a record they begin."""
    return corrections_at(num_groups) + num_groups * LANES * 4


def rounding(num_groups: int) -> ir.Module:
    """The kernel from bfloat16 rows to records of so many groups. Each row is a chunk."""

    def chunk(b: Builder, frame: Frame, row: ir.Value) -> None:
        num_inputs, x, out = frame.extent(0, 1), frame.operand(0), frame.result(0)
        with b.counting(whole(0), num_inputs, whole(num_groups * GROUP)) as (d, _):
            place = b.at(row, num_inputs, d, 2)  # of the inputs and of their record: both have two bytes for an input
            for group in range(num_groups):
                values = read_bfloat16(b, x, b.add(place, whole(group * GROUP * 2)), GROUP)
                _write_group(b, values, out, place, group, num_groups)

    return kernel_module(lambda b, frame: frame.extent(0, 0), chunk)


def _write_group(b: Builder, values: ir.Value, out: ir.Value, record: ir.Value, group: int, num_groups: int) -> None:
    """32 inputs. If one is not finite, their step is NaN, and so will be all sums of the row."""
    wholes, number = ir.VectorType(I32, GROUP), lambda value: ir.Constant(F32, value)
    largest_bits = b.folded(magnitude_bits(b, values), b.larger)
    finite = b.icmp_signed("<", largest_bits, ir.Constant(I32, INFINITE))
    largest = b.bitcast(largest_bits, F32)
    is_some = b.and_(finite, b.fcmp_ordered(">=", largest, number(LEAST)))
    inverse = b.fdiv(number(LARGEST), b.select(is_some, largest, number(LARGEST)))
    kept = b.select(is_some, values, splat(values.type, 0.0))
    rint = declare(b.module, f"llvm.rint.v{GROUP}f32", values.type, values.type)
    steps = b.fptosi(b.call(rint, [b.fmul(kept, spread(b, inverse, GROUP))]), wholes)
    narrow = b.trunc(steps, ir.VectorType(_I8, GROUP))
    for half in range(2):
        mask = ir.Constant(ir.VectorType(I32, HALF), list(range(half * HALF, (half + 1) * HALF)))
        part = b.shuffle_vector(narrow, narrow, mask)
        b.write(part, out, b.add(record, whole(HALF * (num_groups * half + group))), align=1)
    correction = b.mul(b.lane_sum(steps), ir.Constant(I32, -ZERO))
    first_of_four = b.insert_element(splat(ir.VectorType(I32, LANES), 0), correction, ir.Constant(I32, 0))
    b.write(first_of_four, out, b.add(record, whole(corrections_at(num_groups) + 4 * LANES * group)), align=4)
    size = b.select(finite, b.fmul(largest, number(1 / LARGEST)), number(math.nan))
    b.write(spread(b, size, LANES), out, b.add(record, whole(steps_at(num_groups) + 4 * LANES * group)), align=4)
