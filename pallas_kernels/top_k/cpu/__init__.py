"""The largest of every row on a CPU, in machine code of our own (`pallas_kernels/llvm`).

Layout: rows as they are.

Grid: a chunk of work for each row, handed to XLA's threads one after the other.

Skipping: a register of numbers none of which exceeds the bound.

Requires: AVX2, better AVX512; at most 1,024 wanted of a row.

Padding: numbers beyond the last whole register are looked at one by one.

Numerics: numbers are compared as `lax.top_k` does, and returned as they are: the same bits.

Cost: reads a row twice, the second time from the cache: once for the largest of each of some 4,096 pieces, among which
the C-th largest is a bound that C numbers reach, and once for those that do. XLA's partial sort takes 3 to 6 times as
long (`scripts/bench_kernel.py --op top_k`).
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.llvm.code import register
from pallas_kernels.llvm.machine import Machine, this_machine

OP = "top_k"
MOST = 1024
"""What is wanted lies on a thread's stack, and is put in order by comparing all with all."""


def cannot_take(x_SV: Any, count: int) -> str | None:
    return None if 0 < count <= MOST else f"count is {count}; accepted are 1 to {MOST}"


def top_k(x_SV: jax.Array, count: int, machine: Machine | None = None) -> tuple[jax.Array, jax.Array]:
    """See `top_k.top_k`. `machine`: a CPU with less than this one has, in tests."""
    shape = (x_SV.shape[0], count)
    results = [jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.float32, jnp.int32)]
    values_SC, columns_SC = jax.ffi.ffi_call(kernel(count, machine=machine or this_machine()), results)(x_SV)
    return values_SC, columns_SC


def kernel(count: int | str, *, machine: Machine) -> str:
    """What XLA calls the kernel for so many; from now on it is known. Raises ValueError where there is none."""
    if not 0 < int(count) <= MOST:
        raise ValueError(f"there is no kernel for the {count} largest; there are for 1 to {MOST}.")
    return register(OP, _emit, int(count), machine=machine)


def _emit(count: int, machine: Machine) -> Any:
    from pallas_kernels.top_k.cpu import selection  # needs llvmlite

    return selection.kernel(count, machine)
