"""Products with weights in 4 bits on a CPU, in machine code of our own (`pallas_kernels/llvm`).

Layout: x and the weight as they are; an output's bytes and scales are read along memory.

Grid: chunks of 64 outputs, handed to XLA's threads one after the other.

Skipping: none.

Requires: AVX2 and FMA, better AVX512 with VNNI.

Padding: none, since inputs are whole registers; beyond the last output nothing is read or written.

Numerics: rows of bfloat16 become whole numbers of 8 bits, each at most a 254th of the largest of its 32 away; sums of a
group are exact, and scaled in float32. Products of float32 rows are summed in float32 and then scaled, which is closer
than weights rounded to float32 would be. An output is summed by one thread, lane by lane and then over lanes, so its
bits depend on its own row and column only.

Cost: reads 4.5 bits a weight once; eight rows at a time meet a chunk, whose weights stay in the nearest cache. Bytes
are multiplied faster than XLA multiplies bfloat16, so rows of that type are multiplied here however many there are. For
more than 32 rows of float32 it only writes the weight, and XLA multiplies; XLA itself takes 7 times as long to write it
(`scripts/bench_products.py`).
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.int4_matmul import GROUP, RECORDS, TILE_ROWS, reference
from pallas_kernels.llvm.code import register
from pallas_kernels.llvm.machine import Machine, has_dot, this_machine
from pallas_kernels.shapes import same_rest

OP = "int4_matmul"
MOST_ROWS = 32
"""Of float32. With more it is faster to write the weight and to let XLA multiply."""
UNPACKED = "unpacked"
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
    if T == 0:
        return jnp.zeros((T, F), jnp.float32)
    if x_TD.dtype == jnp.bfloat16:
        kind = records_for(D, machine)
        records = jax.ShapeDtypeStruct((T, 2 * D), jnp.uint8)
        x_TD = jax.ffi.ffi_call(kernel(kind, machine=machine), records)(x_TD)
        return _call(kind, machine, x_TD, packed_FB, scale_FC)
    if T > MOST_ROWS:
        unpack = jax.ffi.ffi_call(kernel(UNPACKED, machine=machine), jax.ShapeDtypeStruct((F, D), jnp.float32))
        # It reads nothing of x. Without x XLA would write the weights of all layers before the first product.
        return reference.product(x_TD, unpack(packed_FB, scale_FC, x_TD))
    return _call("float32", machine, x_TD, packed_FB, scale_FC)


def records_for(num_inputs: int, machine: Machine) -> str:
    """Registers of 64 bytes where they are whole, and bytes are multiplied in them."""
    return "quads" if machine.lanes == 16 and has_dot(machine) and num_inputs % (4 * GROUP) == 0 else "pairs"


def _call(dtype: str, machine: Machine, x_TD: jax.Array, packed_FB: jax.Array, scale_FC: jax.Array) -> jax.Array:
    """Float32 sums [T, F]."""
    T, F = len(x_TD), len(packed_FB)
    sums_TF = jax.ShapeDtypeStruct((T, F), jnp.float32)
    return jax.ffi.ffi_call(kernel(dtype, same_rest(T, TILE_ROWS), machine=machine), sums_TF)(x_TD, packed_FB, scale_FC)


def kernel(dtype: str, num_rows: int | str | None = None, *, machine: Machine) -> str:
    """What XLA calls the kernel for so many rows of float32, or of records; from now on it is known. 8 to 15 rows stand
    for all numbers with the same rest by 8. Without rows: the kernel that makes records, or writes the weight in
    float32. Raises ValueError where there is none."""
    if num_rows is None and dtype == UNPACKED:
        return register(OP, _emit_unpacking, UNPACKED, machine=machine)
    if num_rows is None and dtype in RECORDS:
        return register(OP, _emit_rounding, dtype, machine=machine)
    if num_rows is None or dtype not in ("float32", *RECORDS) or not 0 < int(num_rows) < 2 * TILE_ROWS:
        raise ValueError(f"there is no kernel for {num_rows} rows of {dtype}; there are for 1 to {2 * TILE_ROWS - 1}.")
    return register(OP, _emit, dtype, int(num_rows), machine=machine)


def _emit(dtype: str, num_rows: int, machine: Machine) -> Any:
    from pallas_kernels.int4_matmul.cpu import tiles  # needs llvmlite

    return tiles.kernel(dtype, num_rows, machine)


def _emit_unpacking(name: str, machine: Machine) -> Any:
    from pallas_kernels.int4_matmul.cpu import tiles  # needs llvmlite

    return tiles.unpacking(machine)


def _emit_rounding(dtype: str, machine: Machine) -> Any:
    from pallas_kernels.int4_matmul.cpu import rows  # needs llvmlite

    return rows.rounding(RECORDS[dtype])
