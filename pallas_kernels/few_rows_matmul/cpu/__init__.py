"""Products of few rows on a CPU, in machine code of our own (`pallas_kernels/llvm`).

Layout: both operands as they are, rows of inputs; a row of the weight is read along memory.

Grid: chunks of 64 outputs, handed to XLA's threads one after the other.

Skipping: none.

Requires: AVX2 and FMA, better AVX512. At most 64 rows of bfloat16, and 128 of int8; any number of int16 where bytes are
not multiplied by fours (VNNI): there it is the best form of products with int8 weights.

Padding: inputs beyond the last whole register are added one by one; beyond the last output nothing is read or written.

Numerics: an output is summed by one thread, lane by lane and then over lanes, so its bits depend on its own row and
column only: not on other rows, nor on threads. AVX512-BF16 adds pairs of products at once, and takes denormal
numbers for zero. Sums of int8 are exact, and so are those of int16 in a lane, which are rounded to float32 then.

Cost: reads the weight once, whatever the number of rows, six of which at a time meet a chunk, which stays in the
nearest caches; XLA's product of one row writes it in float32 first, and its product of two waits for memory
(`scripts/bench_products.py`).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import few_rows_matmul as op
from pallas_kernels.llvm.code import register
from pallas_kernels.llvm.machine import Machine, has_dot, has_pairs, this_machine
from pallas_kernels.shapes import same_rest

OP = "few_rows_matmul"
TILE_ROWS = 6
"""Rows that meet outputs' weights at once: two outputs, so that of 16 registers 12 are sums, or four where there are
32. With 8 rows and one output, bfloat16 took 1.1 to 1.6 times as long."""
MOST_ROWS = {"bfloat16": 64, "int8": 128, "int16": math.inf}
"""With more it is XLA that multiplies, and is as good: those are bound by arithmetic. Of int8 a token has two."""


def cannot_take(x_TD: Any, weight_FD: Any) -> str | None:
    """It takes few rows, but any number of int16."""
    dtype, num_rows, machine = str(x_TD.dtype), x_TD.shape[0], this_machine()
    if op.WEIGHTS.get(dtype) != str(weight_FD.dtype):
        accepted = " and ".join(f"{row} with {weight}" for row, weight in op.WEIGHTS.items())
        return f"x_TD is {dtype} and weight_FD {weight_FD.dtype}; accepted are {accepted}"
    if dtype == "int16" and has_dot(machine):
        return "this CPU multiplies bytes by fours, so planes of int8 are faster than x_TD in int16"
    most = MOST_ROWS[dtype]
    return None if 0 < num_rows <= most else f"x_TD has {num_rows} rows; accepted are 1 to {most} of {dtype}"


def few_rows_matmul(x_TD: jax.Array, weight_FD: jax.Array, machine: Machine | None = None) -> jax.Array:
    """See `few_rows_matmul.few_rows_matmul`. `machine`: a CPU with less than this one has, in tests."""
    dtype, T, F = str(x_TD.dtype), x_TD.shape[0], weight_FD.shape[0]
    machine = machine or this_machine()
    if dtype == "bfloat16" and not has_pairs(machine):
        x_TD = x_TD.astype(jnp.float32)  # what the kernel makes of the weights
    name = kernel(dtype, same_rest(T, TILE_ROWS), machine=machine)
    return jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((T, F), op.SUMS[dtype]))(x_TD, weight_FD)


def kernel(dtype: str, num_rows: int, *, machine: Machine) -> str:
    """What XLA calls the kernel for so many rows; from now on it is known. 6 to 11 stand for all numbers with the same
    rest by 6. Raises ValueError where there is none."""
    most = 2 * TILE_ROWS - 1 if dtype in op.SUMS else 0
    if not 0 < int(num_rows) <= most:
        raise ValueError(f"there is no kernel for {num_rows} rows of {dtype}; there are for 1 to {most}.")
    return register(OP, _emit, dtype, int(num_rows), machine=machine)


def _emit(dtype: str, num_rows: int, machine: Machine) -> Any:
    from pallas_kernels.few_rows_matmul.cpu import tiles  # needs llvmlite

    return tiles.kernel(dtype, num_rows, machine)
