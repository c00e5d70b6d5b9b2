"""Rows of x as whole numbers of 8 bits with a step for every 32 inputs, as LLVM IR: what `ByteStep` multiplies.

64 inputs, two groups, are a record of 128 bytes: the first halves of both groups, then their second halves, as bytes of
the packed weight have them; eight times 32 bits of what an unsigned weight counts too much; and eight float32 steps,
four of each group.
"""

import math

from llvmlite import ir

from pallas_kernels.int4_matmul import GROUP, INPUTS, ZERO
from pallas_kernels.llvm.builder import F32, I32, Builder, declare, splat, whole
from pallas_kernels.llvm.functions import read_bfloat16, spread
from pallas_kernels.llvm.xla_ffi import Frame, kernel_module

RECORD = 128
CORRECTIONS, STEPS = 64, 96
"""Where in a record they begin."""
LARGEST = 127
HALF = GROUP // 2
LEAST = 2.0**-100
"""A group without a larger number is zeros: the inverse of its step would not be a finite number."""
_I8, _INFINITE = ir.IntType(8), 0x7F800000


def rounding() -> ir.Module:
    """The kernel from bfloat16 rows to records. Each row is a chunk."""

    def chunk(b: Builder, frame: Frame, row: ir.Value) -> None:
        num_inputs, x, out = frame.extent(0, 1), frame.operand(0), frame.result(0)
        with b.counting(whole(0), num_inputs, whole(INPUTS)) as (d, _):
            place = b.at(row, num_inputs, d, 1)
            record = b.mul(place, whole(RECORD // INPUTS))
            for group in range(INPUTS // GROUP):
                values = read_bfloat16(b, x, b.mul(b.add(place, whole(group * GROUP)), whole(2)), GROUP)
                _write_group(b, values, out, record, group)

    return kernel_module(lambda b, frame: frame.extent(0, 0), chunk)


def _write_group(b: Builder, values: ir.Value, out: ir.Value, record: ir.Value, group: int) -> None:
    """32 inputs. If one is not finite, their step is NaN, and so will be all sums of the row."""
    wholes, number = ir.VectorType(I32, GROUP), lambda value: ir.Constant(F32, value)
    bits = b.and_(b.bitcast(values, wholes), splat(wholes, 0x7FFFFFFF))
    # As whole numbers: they are in the order of the sizes, with infinity and NaN above all.
    largest_bits = b.folded(bits, lambda low, high: b.select(b.icmp_signed(">", low, high), low, high))
    finite = b.icmp_signed("<", largest_bits, ir.Constant(I32, _INFINITE))
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
        b.write(part, out, b.add(record, whole(2 * HALF * half + HALF * group)), align=1)
    excess = b.mul(b.lane_sum(steps), ir.Constant(I32, ZERO))
    first_of_four = b.insert_element(splat(ir.VectorType(I32, 4), 0), excess, ir.Constant(I32, 0))
    b.write(first_of_four, out, b.add(record, whole(CORRECTIONS + 16 * group)), align=4)
    size = b.select(finite, b.fmul(largest, number(1 / LARGEST)), number(math.nan))
    b.write(spread(b, size, 4), out, b.add(record, whole(STEPS + 16 * group)), align=4)
