"""Latent attention in plain jax.numpy, token by token: the definition of correct, and the CPU backend.

Skipping: each token walks over its own context in chunks, and no further. That is no slower than walking with several
tokens: all heads of one token are the rows of one product.

Padding: tokens beyond the last row's walk over nothing and give zeros.

Numerics: scores, softmax state and accumulators are float32; probabilities enter the second product in the cache's
type. Slots that a token may not see are replaced by zeros, not multiplied by them: they may hold NaN.

Knows nothing of backends; arguments have been checked. Letter: s slots of a chunk.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.products import product
from pallas_kernels.ragged_paged_attention.quantized import is_quantized, kind_of
from pallas_kernels.shapes import ceil_div

CHUNK_SLOTS = 256
LOWEST = -1e30  # below any score, yet finite, so that the difference of two is not NaN


def cannot_take(*operands: Any) -> str | None:
    """It takes any operands."""
    return None


def attend(
    q_TNC: jax.Array,
    q_rope_TNP: jax.Array,
    cache: Any,
    metadata: Any,
    *,
    scale: float,
    interpret: Any,
    undivided: bool = False,
) -> jax.Array:
    """out_TNC over a cache that holds this step's tokens already; there is nothing to interpret. `undivided`: weighted
    latents, the sum of weights and what was subtracted from scores, in one array [T, N, C + 2]."""
    (T, N, C), width = q_TNC.shape, q_TNC.shape[2] + q_rope_TNP.shape[2]
    number = q_TNC.dtype if is_quantized(cache.arrays[0].dtype) else cache.arrays[0].dtype
    parts = (slice(0, C), slice(C, width))
    q_TNW = jnp.concatenate([q_TNC, q_rope_TNP], axis=2).astype(number)

    def attend_token(token, out_TNC):
        def add_chunk(chunk, state):
            top_N, total_N, out_NC = state
            x_sW, scale_2s, visible_s = _chunk(cache, metadata, token, chunk)
            x_sW = x_sW.astype(number)
            if scale_2s is None:
                product_Ns = product("NW,sW->Ns", q_TNW[token], x_sW[:, :width])
            else:
                products = (product("NW,sW->Ns", q_TNW[token][:, part], x_sW[:, part]) for part in parts)
                product_Ns = sum(x_Ns * scale_s for x_Ns, scale_s in zip(products, scale_2s))
            score_Ns = jnp.where(visible_s, scale * product_Ns, -jnp.inf)
            highest_N = jnp.maximum(top_N, score_Ns.max(axis=1))
            weight_Ns, fade_N = jnp.exp(score_Ns - highest_N[:, None]), jnp.exp(top_N - highest_N)
            scaled_Ns = weight_Ns if scale_2s is None else weight_Ns * scale_2s[0]
            added_NC = product("Ns,sC->NC", scaled_Ns.astype(number), x_sW[:, :C])
            return highest_N, total_N * fade_N + weight_Ns.sum(axis=1), out_NC * fade_N[:, None] + added_NC

        num_chunks = ceil_div(metadata.position_T[token] + 1, chunk_slots(cache.arrays[0]))
        nothing = jnp.full(N, LOWEST), jnp.zeros(N), jnp.zeros((N, C))
        top_N, total_N, out_NC = lax.fori_loop(0, num_chunks, add_chunk, nothing)
        if undivided:
            return out_TNC.at[token].set(jnp.concatenate([out_NC, total_N[:, None], top_N[:, None]], axis=1))
        out_NC /= jnp.where(total_N == 0, 1, total_N)[:, None]
        return out_TNC.at[token].set(out_NC.astype(out_TNC.dtype))

    out_TNC = jnp.zeros((T, N, C + 2), jnp.float32) if undivided else jnp.zeros_like(q_TNC)
    return lax.fori_loop(0, T, attend_token, out_TNC)


def chunk_slots(cache_BSW: jax.Array) -> int:
    """Slots of a chunk: whole blocks."""
    S = cache_BSW.shape[1]
    return max(1, CHUNK_SLOTS // S) * S


def _chunk(
    cache: Any, metadata: Any, token: jax.Array, chunk: jax.Array
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Slots [s, W] of one chunk of a token's context, zeros where it may not see; the scales of latents and of rope
    keys, if there are any, likewise; and where it may."""
    cache_BSW, kind = cache.arrays[0], kind_of(cache.scales)
    S, W = cache_BSW.shape[1:]
    position_s = chunk * chunk_slots(cache_BSW) + jnp.arange(chunk_slots(cache_BSW))
    visible_s = position_s <= metadata.position_T[token]
    block = metadata.block_tables_RM.at[metadata.row_T[token], position_s[::S] // S].get(mode="clip")
    x_sW = cache_BSW.at[block].get(mode="clip").reshape(-1, W)
    scale_2s = None
    if kind == "token":
        scale_2s = jnp.swapaxes(cache.scales[0].at[block].get(mode="clip")[..., :S], 0, 1).reshape(2, -1)
    elif kind == "head":
        scale_2s = jnp.concatenate(cache.scales)[:, None]
    if scale_2s is not None:
        scale_2s = jnp.where(visible_s, scale_2s, 0)
    return jnp.where(visible_s[:, None], x_sW, 0), scale_2s, visible_s
