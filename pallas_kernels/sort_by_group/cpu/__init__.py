"""Sorting by group on a CPU, in machine code of our own (`pallas_kernels/llvm`): counted, not compared.

Layout: groups as they are.

Grid: one chunk, which is a few microseconds of one thread.

Skipping: none.

Requires: what any kernel does.

Padding: things of no group come last.

Numerics: whole numbers; the order is that of XLA's stable sort.

Cost: reads the groups twice, once to count them. XLA's two sorts compare.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.llvm.code import register
from pallas_kernels.llvm.machine import Machine, this_machine

OP = "sort_by_group"


def cannot_take(group_P: Any, num_groups: Any) -> str | None:
    """It takes any operands."""
    return None


def sort_by_group(group_P: jax.Array, num_groups: int, machine: Machine | None = None) -> tuple[jax.Array, jax.Array]:
    """See `sort_by_group.sort_by_group`. `machine`: a CPU with less than this one has, in tests."""
    shapes = [jax.ShapeDtypeStruct(group_P.shape, jnp.int32)] * 2
    # The last result holds the counts; how long it is the kernel learns from an operand.
    counts = jax.ShapeDtypeStruct((num_groups + 1,), jnp.int32)
    call = jax.ffi.ffi_call(kernel(machine=machine or this_machine()), [*shapes, counts])
    order_P, place_P, _ = call(group_P, jnp.zeros(counts.shape, jnp.int32))
    return order_P, place_P


def kernel(*, machine: Machine) -> str:
    """What XLA calls the kernel; from now on it is known."""
    return register(OP, _emit, machine=machine)


def _emit(machine: Machine) -> Any:
    from pallas_kernels.sort_by_group.cpu import counting  # needs llvmlite

    return counting.kernel()
