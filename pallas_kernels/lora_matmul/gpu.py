"""What adapters add on an NVIDIA GPU (Pallas, Triton lowering): XLA multiplies with A, and one kernel does the rest.

Layout: all operands as they are.

Grid: (tiles of tokens, tiles of outputs); a program walks over the ranks of the slots between the least and the largest
of its tokens, a piece at a time, whichever slots a piece belongs to.

Skipping: ranks of slots that none of a tile's tokens has are not read.

Requires: bfloat16 or float16, and up to 64 tokens.

Padding: tokens, ranks and outputs beyond the last are not read.

Numerics: what A makes is rounded to the type of B before it is multiplied, and the sum is rounded once.

Cost: one launch for masks, B and the sum, where XLA has two or three. Of B it reads slots that are there, of A all.
Not timed.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.shapes import ceil_div

FEWEST_TOKENS, TILE_TOKENS = 16, 32  # of a tile: an instruction takes no fewer, and with 64 Triton orders them badly
OUTPUTS, RANKS = 64, 64  # of a tile, and of a piece
MOST_TOKENS = 64
"""Of more, launches are little, and XLA's product of all slots is the faster one."""


def cannot_take(x_TI: Any, a_SrI: Any) -> str | None:
    """It takes a step of decodes."""
    if str(x_TI.dtype) not in ("bfloat16", "float16"):
        return f"x_TI is {x_TI.dtype}; accepted are bfloat16 and float16"
    return None if len(x_TI) <= MOST_TOKENS else f"x_TI has {len(x_TI)} rows; accepted are up to {MOST_TOKENS}"


def lora_matmul(
    x_TI: jax.Array,
    a_SrI: jax.Array,
    b_SrO: jax.Array,
    slot_T: jax.Array,
    base_TO: jax.Array,
    dtype: Any,
    *,
    interpret: Any,
) -> jax.Array:
    """See `lora_matmul.lora_matmul`."""
    a_KI = a_SrI.reshape(-1, a_SrI.shape[2])
    u_TK = jnp.einsum("TI,KI->TK", x_TI, a_KI, preferred_element_type=jnp.float32)
    return own_product(u_TK, b_SrO, slot_T, base_TO, dtype, interpret)


def own_product(
    u_TK: jax.Array, b_SrO: jax.Array, slot_T: jax.Array, base_TO: jax.Array, dtype: Any, interpret: Any = False
) -> jax.Array:
    """base + what each token's own ranks, of those that all slots made of it, float32 [T, S r], add."""
    (S, r, O), T = b_SrO.shape, len(u_TK)
    tokens = min(TILE_TOKENS, max(FEWEST_TOKENS, pl.next_power_of_2(T)))
    return pl.pallas_call(
        functools.partial(_kernel, tokens=tokens, num_slots=S, num_ranks=r),
        out_shape=jax.ShapeDtypeStruct((T, O), dtype),
        grid=(ceil_div(T, tokens), ceil_div(O, OUTPUTS)),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="lora_matmul",
    )(slot_T, u_TK, b_SrO.reshape(S * r, O), base_TO)


def _kernel(slot_T, u_TK, b_KO, base_TO, out_TO, *, tokens: int, num_slots: int, num_ranks: int):
    tile_t, tile_o = pl.ds(pl.program_id(0) * tokens, tokens), pl.ds(pl.program_id(1) * OUTPUTS, OUTPUTS)
    in_t = pl.program_id(0) * tokens + jnp.arange(tokens) < slot_T.shape[0]
    in_o = pl.program_id(1) * OUTPUTS + jnp.arange(OUTPUTS) < b_KO.shape[1]
    slot_t = plgpu.load(slot_T.at[tile_t], mask=in_t, other=-1)
    first_t, end_t = slot_t * num_ranks, (slot_t + 1) * num_ranks
    least = jnp.min(jnp.where(slot_t < 0, num_slots, slot_t))
    end = (jnp.max(slot_t) + 1) * num_ranks

    def add_piece(i, sum_to):
        rank_k = i * RANKS + jnp.arange(RANKS)
        own_tk = (first_t[:, None] <= rank_k[None, :]) & (rank_k[None, :] < end_t[:, None]) & (slot_t >= 0)[:, None]
        is_read_k = jnp.max(own_tk.astype(jnp.int32), axis=0) > 0
        tile_k = pl.ds(i * RANKS, RANKS)
        u_tk = plgpu.load(u_TK.at[tile_t, tile_k], mask=own_tk, other=0.0)
        b_ko = plgpu.load(b_KO.at[tile_k, tile_o], mask=is_read_k[:, None] & in_o[None, :], other=0.0)
        return sum_to + jnp.dot(u_tk.astype(b_ko.dtype), b_ko, preferred_element_type=jnp.float32)

    is_there = in_t[:, None] & in_o[None, :]
    base_to = plgpu.load(base_TO.at[tile_t, tile_o], mask=is_there, other=0.0).astype(jnp.float32)
    sum_to = lax.fori_loop(least * num_ranks // RANKS, ceil_div(end, RANKS), add_piece, base_to)
    plgpu.store(out_TO.at[tile_t, tile_o], sum_to.astype(out_TO.dtype), mask=is_there)
