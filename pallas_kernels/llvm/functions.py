"""Functions of float32 vectors that no instruction computes, and reductions over several vectors at once."""

import math
from collections.abc import Sequence

from llvmlite import ir

from pallas_kernels.llvm.builder import F32, I16, I32, Builder, declare, splat

INFINITE = 0x7F800000
"""The bits of infinity in float32."""
LEAST_EXPONENT = -87.0
"""`exp` takes what is smaller for this: the result is still a normal number, 1.6e-38."""
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4  # the first times a whole number below 256 is exact
_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
"""Of (exp(r) - 1 - r) / r**2 for |r| < 0.35, the highest power first (the Cephes library's expf)."""


def multiply_add(b: Builder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """x * y + z, rounded once."""
    fma = declare(b.module, f"llvm.fma.v{x.type.count}f32", x.type, *[x.type] * 3)
    return b.call(fma, [x, y, z])


def add_pair_products(b: Builder, sums: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    """sums + the products of pairs of neighbours of bfloat16 numbers, by AVX512-BF16."""
    dot = declare(b.module, "llvm.x86.avx512bf16.dpbf16ps.512", sums.type, sums.type, x.type, y.type)
    return b.call(dot, [sums, x, y])


def read_bfloat16(b: Builder, base: ir.Value, offset: int | ir.Value, count: int) -> ir.Value:
    """So many bfloat16 numbers, as a vector of float32."""
    bits = ir.VectorType(I32, count)
    wide = b.zext(b.read(ir.VectorType(I16, count), base, offset, align=2), bits)
    return b.bitcast(b.shl(wide, splat(bits, 16)), float32s(count))


def write_bfloat16(b: Builder, values: ir.Value, base: ir.Value, offset: int | ir.Value) -> None:
    """A vector of float32 as bfloat16, rounded."""
    bits = bfloat16_bits(b, values)
    b.write(b.trunc(bits, ir.VectorType(I16, bits.type.count)), base, offset, align=2)


def rounded_to_bfloat16(b: Builder, values: ir.Value) -> ir.Value:
    """A vector of float32 with no more digits than bfloat16 has."""
    bits = bfloat16_bits(b, values)
    return b.bitcast(b.shl(bits, splat(bits.type, 16)), values.type)


def bfloat16_bits(b: Builder, values: ir.Value) -> ir.Value:
    """Rounded, to even where two are as near; NaN stays NaN. As whole numbers, since instructions for it take denormal
    numbers for zero, or are not there."""
    bits = ir.VectorType(I32, values.type.count)
    whole_bits, half = b.bitcast(values, bits), splat(bits, 16)
    last = b.and_(b.lshr(whole_bits, half), splat(bits, 1))
    rounded = b.lshr(b.add(b.add(whole_bits, last), splat(bits, 0x7FFF)), half)
    quiet = b.or_(b.lshr(whole_bits, half), splat(bits, 0x40))
    return b.select(b.fcmp_unordered("uno", values, values), quiet, rounded)


def bfloat16_pairs(b: Builder, first: ir.Value, second: ir.Value) -> ir.Value:
    """In each lane the two bfloat16 numbers that lanes of float32 vectors hold, the first one in the low half."""
    bits = ir.VectorType(I32, first.type.count)
    low = b.lshr(b.bitcast(first, bits), splat(bits, 16))
    return b.bitcast(b.or_(low, b.bitcast(second, bits)), first.type)


def spread(b: Builder, scalar: ir.Value, count: int) -> ir.Value:
    """A vector of one value."""
    kind = ir.VectorType(scalar.type, count)
    first = b.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(I32, 0))
    return b.shuffle_vector(first, first, ir.Constant(ir.VectorType(I32, count), [0] * count))


def exp(b: Builder, x: ir.Value) -> ir.Value:
    """e to the power of every lane, up to 88, with an error of about one unit of the last place."""
    kind, bits = x.type, ir.VectorType(I32, x.type.count)
    least = splat(kind, LEAST_EXPONENT)
    x = b.select(b.fcmp_ordered("<", x, least), least, x)
    rint = declare(b.module, f"llvm.rint.v{kind.count}f32", kind, kind)
    n = b.call(rint, [b.fmul(x, splat(kind, math.log2(math.e)))])
    r = multiply_add(b, n, splat(kind, -_LN2_HIGH), x)
    r = multiply_add(b, n, splat(kind, -_LN2_LOW), r)
    y = splat(kind, _POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        y = multiply_add(b, y, r, splat(kind, coefficient))
    y = b.fadd(multiply_add(b, y, b.fmul(r, r), r), splat(kind, 1.0))
    power = b.shl(b.add(b.fptosi(n, bits), splat(bits, 127)), splat(bits, 23))
    return b.fmul(y, b.bitcast(power, kind))


def tanh(b: Builder, x: ir.Value) -> ir.Value:
    """1 - 2 / (exp(2x) + 1): its error is that of numbers near 1, also where the result is near 0."""
    kind = x.type
    most = splat(kind, 20.0)
    x = b.select(b.fcmp_ordered(">", x, most), most, x)
    below_one = b.fdiv(splat(kind, 2.0), b.fadd(exp(b, b.fadd(x, x)), splat(kind, 1.0)))
    return b.fsub(splat(kind, 1.0), below_one)


def sums_of_each(b: Builder, vectors: Sequence[ir.Value]) -> ir.Value:
    """A vector whose i-th lane is the sum over the lanes of the i-th of as many vectors."""
    now, lanes = list(vectors), vectors[0].type.count
    assert len(now) == lanes, (len(now), lanes)
    width = lanes  # of the pieces that a register has, each a part of the sum of another vector
    while len(now) > 1:
        indices = [[i for i in range(2 * lanes) if (i % width < width // 2) == is_low] for is_low in (True, False)]
        masks = [ir.Constant(ir.VectorType(I32, lanes), list(half)) for half in indices]
        now = [
            b.fadd(*(b.shuffle_vector(one, other, mask) for mask in masks)) for one, other in zip(now[::2], now[1::2])
        ]
        width //= 2
    return now[0]


def turned(b: Builder, vectors: Sequence[ir.Value]) -> list[ir.Value]:
    """The columns of a square matrix, of its rows."""
    now, lanes = list(vectors), vectors[0].type.count
    assert len(now) == lanes, (len(now), lanes)
    step = 1  # pieces of so many lanes that are not on the diagonal of two rows change places
    while step < lanes:
        low = [lane if not lane & step else lanes + lane - step for lane in range(lanes)]
        high = [lane + step if not lane & step else lanes + lane for lane in range(lanes)]
        masks = [ir.Constant(ir.VectorType(I32, lanes), half) for half in (low, high)]
        for i in (i for i in range(lanes) if not i & step):
            now[i], now[i + step] = (b.shuffle_vector(now[i], now[i + step], mask) for mask in masks)
        step *= 2
    return now


def magnitude_bits(b: Builder, values: ir.Value) -> ir.Value:
    """A vector of float32 without signs, as whole numbers: these are in the order of the sizes, with infinity and NaN
    above all."""
    bits = ir.VectorType(I32, values.type.count)
    return b.and_(b.bitcast(values, bits), splat(bits, 0x7FFFFFFF))


def lane_max(b: Builder, vector: ir.Value) -> ir.Value:
    """The largest lane."""
    return b.folded(vector, lambda low, high: b.select(b.fcmp_ordered(">", low, high), low, high))


def float32s(count: int) -> ir.VectorType:
    return ir.VectorType(F32, count)
