"""Normalised rows on a CPU, in machine code of our own (`pallas_kernels/llvm`).

Layout: rows as they are.

Grid: chunks of rows with some 64 thousand numbers, handed to XLA's threads one after the other.

Skipping: none.

Requires: AVX2 and FMA, better AVX512; rows of a multiple of 16 numbers, in bfloat16 or float32.

Padding: none.

Numerics: float32, and rounded where the reference rounds; a row is summed lane by lane and then over lanes, so its bits
depend on itself only.

Cost: reads a row twice, or three times if its mean is taken off, the first time from memory.
"""

from typing import Any

import jax
import numpy as np

from pallas_kernels.llvm.code import register
from pallas_kernels.llvm.machine import Machine, this_machine
from pallas_kernels.rms_norm import How

OP = "rms_norm"
MULTIPLE = 16
DTYPES = ("bfloat16", "float32")
WEIGHTS, MEANS = ("factors", "offsets"), ("kept", "taken")
"""What weights are, and what becomes of the mean."""


def cannot_take(x_TD: Any, weight_D: Any) -> str | None:
    """It takes whole registers, of types that it reads."""
    dtype, width = str(x_TD.dtype), x_TD.shape[-1]
    if dtype not in DTYPES or weight_D.dtype != x_TD.dtype:
        return f"x_TD is {dtype} and weight_D {weight_D.dtype}; accepted are {' and '.join(DTYPES)}, both alike"
    return (
        None if width % MULTIPLE == 0 and width else f"rows have {width} numbers; accepted are multiples of {MULTIPLE}"
    )


def rms_norm(x_TD: jax.Array, weight_D: jax.Array, how: How, machine: Machine | None = None) -> jax.Array:
    """See `rms_norm.rms_norm`. `machine`: a CPU with less than this one has, in tests."""
    name = kernel(str(x_TD.dtype), WEIGHTS[how.is_offset], MEANS[how.is_centred], machine=machine or this_machine())
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(x_TD.shape, x_TD.dtype))
    return call(x_TD, weight_D, np.array([how.eps], np.float32))


def kernel(dtype: str, weights: str, means: str, *, machine: Machine) -> str:
    """What XLA calls the kernel; from now on it is known. Raises ValueError where there is none."""
    if dtype not in DTYPES or weights not in WEIGHTS or means not in MEANS:
        accepted = ", ".join(" or ".join(each) for each in (DTYPES, WEIGHTS, MEANS))
        raise ValueError(f"there is no kernel for {dtype}, {weights}, {means}; accepted are {accepted}.")
    return register(OP, _emit, dtype, weights, means, machine=machine)


def _emit(dtype: str, weights: str, means: str, machine: Machine) -> Any:
    from pallas_kernels.rms_norm.cpu import rows  # needs llvmlite

    return rows.kernel(dtype, weights == "offsets", means == "taken", machine.lanes)
