"""What adapters add on a CPU, in machine code of our own (`pallas_kernels/llvm`): both products of a token as one call.

Layout: all operands as they are; rows of A and of B are read along memory.

Grid: tokens, or of many tiles of four, handed to XLA's threads one after the other.

Skipping: slots that no token has are not read; tokens of no slot copy their base.

Requires: AVX2 and FMA, better AVX512; bfloat16 or float32, up to 1,024 ranks, and a base of float32.

Padding: inputs and outputs beyond the last whole register are computed one by one.

Numerics: what A makes stays float32. A token's bits depend on itself and its slot only.

Cost: reads the slots of its tokens, from memory once, and again from caches for tokens that share one.
"""

from typing import Any

import jax

from pallas_kernels.llvm.code import register
from pallas_kernels.llvm.machine import Machine, has_pairs, this_machine
from pallas_kernels.lora_matmul import MOST_RANKS

OP = "lora_matmul"
DTYPES = ("bfloat16", "float32")
TILE_TOKENS, MANY_TOKENS = 4, 16
"""Neighbours that meet a slot at once, and of how many tokens there must be so many for each thread."""


def cannot_take(x_TI: Any, a_SrI: Any) -> str | None:
    """It takes what it has room for."""
    if str(x_TI.dtype) not in DTYPES:
        return f"x_TI is {x_TI.dtype}; accepted are {' and '.join(DTYPES)}"
    return None if a_SrI.shape[1] <= MOST_RANKS else f"a_SrI has {a_SrI.shape[1]} ranks; accepted are {MOST_RANKS}"


def lora_matmul(
    x_TI: jax.Array,
    a_SrI: jax.Array,
    b_SrO: jax.Array,
    slot_T: jax.Array,
    base_TO: jax.Array,
    dtype: Any,
    *,
    interpret: Any = False,
    machine: Machine | None = None,
) -> jax.Array:
    """See `lora_matmul.lora_matmul`; there is nothing to interpret. `machine`: a CPU with less than this one has, in
    tests."""
    machine, weights, out = machine or this_machine(), str(a_SrI.dtype), str(dtype)
    out = out if out in DTYPES else "float32"
    if weights == "bfloat16" and not has_pairs(machine):
        x_TI = x_TI.astype("float32")  # what the kernel makes of the weights
    name = kernel(weights, out, TILE_TOKENS if len(x_TI) >= MANY_TOKENS else 1, machine=machine)
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(base_TO.shape, out))
    return call(x_TI, a_SrI, b_SrO, slot_T, base_TO.astype("float32")).astype(dtype)


def kernel(weights: str, out: str, tile: int | str, *, machine: Machine) -> str:
    """What XLA calls the kernel for types of weights and of results, and tokens of a tile; from now on it is known.
    Raises ValueError if there is none."""
    if weights not in DTYPES or out not in DTYPES or str(tile) not in ("1", str(TILE_TOKENS)):
        accepted = f"{' and '.join(DTYPES)}, of 1 and {TILE_TOKENS} tokens"
        raise ValueError(f"there is no kernel for {weights}, {out}, {tile} tokens; there are for {accepted}.")
    return register(OP, _emit, weights, out, int(tile), machine=machine)


def _emit(weights: str, out: str, tile: int, machine: Machine) -> Any:
    from pallas_kernels.lora_matmul.cpu import tokens  # needs llvmlite

    return tokens.kernel(weights, out, tile, machine)
