"""Products with weights in 4 bits on a CPU, in machine code of our own (`pallas_kernels/llvm`).

Layout: x and the weight as they are; an output's bytes and scales are read along memory.

Grid: chunks of 64 outputs, handed to XLA's threads one after the other.

Skipping: none.

Requires: AVX2 and FMA, better AVX512 with its bfloat16.

Padding: none, since inputs are whole registers; beyond the last output nothing is read or written.

Numerics: products of a group are summed in float32 and then scaled, which is closer than weights rounded to bfloat16,
with which more than 32 rows are multiplied. Where there are no products of bfloat16, such rows become whole numbers of
8 bits, each at most a 254th of the largest of its 32 away, and sums of groups are exact. An output is summed by one
thread, lane by lane and then over lanes, so its bits depend on its own row and column only. AVX512-BF16 adds pairs of
products at once, and takes denormal numbers for zero.

Cost: reads 4.5 bits a weight once; eight rows at a time meet a chunk, whose weights stay in the nearest cache. For more
than 32 rows it only writes the weight in the type of x, and XLA multiplies: that is bound by arithmetic, and writing is
a small part of it; XLA itself takes 7 times as long to write it (`scripts/bench_products.py`). Rows that are whole
numbers are multiplied here however many there are: those machines multiply bytes faster than XLA bfloat16.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.int4_matmul import reference
from pallas_kernels.llvm.code import register
from pallas_kernels.llvm.machine import Machine, has_pairs, this_machine
from pallas_kernels.shapes import same_rest

OP = "int4_matmul"
MOST_ROWS = 32
"""With more it is faster to write the weight and to let XLA multiply, except for whole numbers."""
TILE_ROWS = 8
"""Rows of x that meet an output's weights at once."""
RECORDS = "records"
"""In place of a type: bfloat16 rows as `rows` makes records of them."""
_TYPES = ("bfloat16", "float32")


def cannot_take(x_TD: Any, packed_FB: Any, scale_FC: Any) -> str | None:
    """It takes any number of rows."""
    dtype = str(x_TD.dtype)
    return None if dtype in _TYPES else f"x_TD is {dtype}; accepted are {' and '.join(_TYPES)}"


def int4_matmul(
    x_TD: jax.Array, packed_FB: jax.Array, scale_FC: jax.Array, machine: Machine | None = None
) -> jax.Array:
    """See `int4_matmul.int4_matmul`. `machine`: a CPU with less than this one has, in tests."""
    (T, D), F, machine = x_TD.shape, packed_FB.shape[0], machine or this_machine()
    if x_TD.dtype == jnp.bfloat16 and not has_pairs(machine) and T > 0:
        records = jax.ShapeDtypeStruct((T, 2 * D), jnp.uint8)
        x_TD = jax.ffi.ffi_call(kernel(RECORDS, machine=machine), records)(x_TD)
        return _call(RECORDS, machine, x_TD, packed_FB, scale_FC)
    if not 0 < T <= MOST_ROWS:
        unpack = jax.ffi.ffi_call(kernel(str(x_TD.dtype), machine=machine), jax.ShapeDtypeStruct((F, D), x_TD.dtype))
        # It reads nothing of x. Without x XLA would write the weights of all layers before the first product.
        return reference.product(x_TD, unpack(packed_FB, scale_FC, x_TD))
    return _call(str(x_TD.dtype), machine, x_TD, packed_FB, scale_FC)


def _call(dtype: str, machine: Machine, x_TD: jax.Array, packed_FB: jax.Array, scale_FC: jax.Array) -> jax.Array:
    """Float32 sums [T, F]."""
    T, F = len(x_TD), len(packed_FB)
    sums_TF = jax.ShapeDtypeStruct((T, F), jnp.float32)
    return jax.ffi.ffi_call(kernel(dtype, same_rest(T, TILE_ROWS), machine=machine), sums_TF)(x_TD, packed_FB, scale_FC)


def kernel(dtype: str, num_rows: int | str | None = None, *, machine: Machine) -> str:
    """What XLA calls the kernel for so many rows of a type, or of records; from now on it is known. 8 to 15 rows stand
    for all numbers with the same rest by 8. Without rows: the kernel that writes the weight in a type, or records.
    Raises ValueError where there is none."""
    if dtype not in (*_TYPES, RECORDS) or not (num_rows is None or 0 < int(num_rows) < 2 * TILE_ROWS):
        raise ValueError(f"there is no kernel for {num_rows} rows of {dtype}; there are for 1 to {2 * TILE_ROWS - 1}.")
    if num_rows is not None:
        return register(OP, _emit, dtype, int(num_rows), machine=machine)
    return register(OP, _emit_rounding if dtype == RECORDS else _emit_unpacking, dtype, machine=machine)


def _emit(dtype: str, num_rows: int, machine: Machine) -> Any:
    from pallas_kernels.int4_matmul.cpu import tiles  # needs llvmlite

    return tiles.kernel(dtype, num_rows, machine)


def _emit_unpacking(dtype: str, machine: Machine) -> Any:
    from pallas_kernels.int4_matmul.cpu import tiles  # needs llvmlite

    return tiles.unpacking(dtype, machine)


def _emit_rounding(dtype: str, machine: Machine) -> Any:
    from pallas_kernels.int4_matmul.cpu import rows  # needs llvmlite

    return rows.rounding()
