"""Each token times its expert's weight on a CPU, in machine code of our own (`pallas_kernels/llvm`).

Layout: values [E, F, D] as they are; a row of a weight is read along memory.

Grid: for each expert chunks of 64 outputs, handed to XLA's threads one after the other, and one for the padding.

Skipping: the chunks of experts without tokens do nothing. Padding tokens are not read.

Requires: AVX2 and FMA, better AVX512. Tokens of float32 with weights of float32, of bfloat16 with bfloat16, of both
with int8 and one scale per output.

Padding: tokens beyond the last group give zeros. Inputs beyond the last whole register are added one by one; beyond the
last output nothing is read or written.

Numerics: values and tokens are exact in float32 (AVX512-BF16 takes denormal numbers for zero). An output is summed by
one thread, lane by lane and then over lanes, scaled, and rounded to x's type: its bits depend on its own token only.

Cost: reads the weights of experts that have tokens once, where they lie; six tokens at a time meet a chunk, which stays
in the nearest caches. `reference` copies each of them first, and takes 2 to 5 times as long, whatever the number of
tokens (64 experts of 768 outputs and 1,024 inputs, 1 to 256 tokens each, AMD EPYC of 2023, two busy cores).
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.llvm.code import register
from pallas_kernels.llvm.machine import Machine, has_pairs, this_machine

OP = "grouped_matmul"
TOKENS = {"float32": ("float32",), "bfloat16": ("bfloat16",), "int8": ("bfloat16", "float32")}
"""Type of weights -> types of tokens."""


def cannot_take(x_TD: Any, weights: Any) -> str | None:
    """It takes one scale per output, if any, and no zeros."""
    values_EFD, scale_ECF = weights.values_EFD, weights.scale_ECF
    dtype = str(values_EFD.dtype)
    if str(x_TD.dtype) not in TOKENS.get(dtype, ()):
        accepted = ", ".join(f"{' or '.join(tokens)} with {values}" for values, tokens in TOKENS.items())
        return f"x_TD is {x_TD.dtype} and values_EFD {dtype}; accepted are {accepted}"
    if scale_ECF is not None and scale_ECF.shape[1] != 1:
        return f"scale_ECF has {scale_ECF.shape[1]} groups of inputs; accepted is 1"
    if weights.zero_ECF is not None:
        return "there are zeros; accepted are weights without any"
    return None


def grouped_matmul(
    x_TD: jax.Array, weights: Any, group_sizes_E: jax.Array, *, interpret: Any = False, machine: Machine | None = None
) -> jax.Array:
    """See `grouped_matmul.grouped_matmul`; there is nothing to interpret. `machine`: a CPU with less than this one has,
    in tests."""
    machine, (E, F, _) = machine or this_machine(), weights.values_EFD.shape
    dtype, out = str(weights.values_EFD.dtype), jax.ShapeDtypeStruct((x_TD.shape[0], F), jnp.float32)
    first_E = jnp.zeros(E + 1, jnp.int32).at[1:].set(jnp.cumsum(group_sizes_E))  # of the padding too
    tokens = x_TD if dtype == "bfloat16" and has_pairs(machine) else x_TD.astype(jnp.float32)
    scales = () if weights.scale_ECF is None else (weights.scale_ECF,)
    sums_TF = jax.ffi.ffi_call(kernel(dtype, machine=machine), out)(tokens, weights.values_EFD, first_E, *scales)
    return sums_TF.astype(x_TD.dtype)


def kernel(dtype: str, *, machine: Machine) -> str:
    """What XLA calls the kernel for weights of a type; from now on it is known. Raises ValueError if there is none."""
    if dtype not in TOKENS:
        raise ValueError(f"there is no kernel for weights of {dtype}; there are for {', '.join(TOKENS)}.")
    return register(OP, _emit, dtype, machine=machine)


def _emit(dtype: str, machine: Machine) -> Any:
    from pallas_kernels.grouped_matmul.cpu import tiles  # needs llvmlite

    return tiles.kernel(dtype, machine)
