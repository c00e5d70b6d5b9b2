"""Products of few rows on a CPU, in machine code of our own (`pallas_kernels/llvm`).

Layout: both operands as they are, rows of inputs; a row of the weight is read along memory.

Grid: chunks of 32 outputs, handed to XLA's threads one after the other.

Skipping: none.

Requires: AVX2 and FMA, better AVX512; at most 8 rows of bfloat16 or 16 of int8.

Padding: inputs beyond the last whole register are added one by one; beyond the last output nothing is read or written.

Numerics: an output is summed by one thread, lane by lane and then over lanes, so its bits depend on its own row and
column only: not on other rows, nor on threads. AVX512-BF16 adds pairs of products at once, and takes denormal
numbers for zero. Sums of int8 are exact.

Cost: reads the weight once, whatever the number of rows; XLA's product of one row writes it in float32 first, and its
product of two waits for memory (`scripts/bench_products.py`).
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import few_rows_matmul as op
from pallas_kernels.llvm.code import register
from pallas_kernels.llvm.machine import Machine, has_pairs, this_machine

OP = "few_rows_matmul"
MOST_ROWS = {"bfloat16": 8, "int8": 16}


def cannot_take(x_TD: Any, weight_FD: Any) -> str | None:
    """More rows are bound by arithmetic, at which XLA is as good."""
    dtype, num_rows = str(x_TD.dtype), x_TD.shape[0]
    if dtype not in MOST_ROWS or x_TD.dtype != weight_FD.dtype:
        return f"x_TD is {dtype} and weight_FD {weight_FD.dtype}; accepted are {' and '.join(MOST_ROWS)}, both alike"
    most = MOST_ROWS[dtype]
    return None if 0 < num_rows <= most else f"x_TD has {num_rows} rows; accepted are 1 to {most} of {dtype}"


def few_rows_matmul(x_TD: jax.Array, weight_FD: jax.Array, machine: Machine | None = None) -> jax.Array:
    """See `few_rows_matmul.few_rows_matmul`. `machine`: a CPU with less than this one has, in tests."""
    dtype, T, F = str(x_TD.dtype), x_TD.shape[0], weight_FD.shape[0]
    machine = machine or this_machine()
    if dtype == "bfloat16" and not has_pairs(machine):
        x_TD = x_TD.astype(jnp.float32)  # what the kernel makes of the weights
    call = jax.ffi.ffi_call(kernel(dtype, T, machine=machine), jax.ShapeDtypeStruct((T, F), op.SUMS[dtype]))
    return call(x_TD, weight_FD)


def kernel(dtype: str, num_rows: int, *, machine: Machine) -> str:
    """What XLA calls the kernel for so many rows; from now on it is known. Raises ValueError where there is none."""
    if not 0 < int(num_rows) <= MOST_ROWS.get(dtype, 0):
        raise ValueError(f"there is no kernel for {num_rows} rows of {dtype}; there are for 1 to {MOST_ROWS}.")
    return register(OP, _emit, dtype, int(num_rows), machine=machine)


def _emit(dtype: str, num_rows: int, machine: Machine) -> Any:
    from pallas_kernels.few_rows_matmul.cpu import tiles  # needs llvmlite

    return tiles.kernel(dtype, num_rows, machine)
