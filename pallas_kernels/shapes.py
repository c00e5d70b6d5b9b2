"""Integer arithmetic on shapes. Knows nothing of arrays; works on Python integers and on traced ones alike."""

import math

BITS = {
    "float32": 32,
    "int32": 32,
    "bfloat16": 16,
    "float16": 16,
    "int8": 8,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "int4": 4,
    "float4_e2m1fn": 4,
}
"""Of a number, by the name of its type."""


def ceil_div(a, b):
    """The smallest integer not below a / b, for b > 0."""
    return (a + b - 1) // b


def same_rest(n: int, tile: int) -> int:
    """n below `tile`; else the number from `tile` to below twice as much that stands for all with the same rest."""
    return n if n < tile else tile + n % tile


def largest_divisor(n: int, limit: int) -> int:
    """The largest number not above `limit` that divides n."""
    return max(d for d in range(1, min(n, max(limit, 1)) + 1) if n % d == 0)


def array_bytes(dtype: str, *dims: int) -> int:
    """What an array takes, four-bit numbers packed. Raises KeyError for types that `BITS` lacks."""
    return math.prod(dims) * BITS[dtype] // 8
