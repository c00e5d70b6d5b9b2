"""Latent attention on an NVIDIA GPU (Pallas, Triton lowering): one program attends from some heads of one token.

Layout: a slot is its latent and then its rope key, contiguous: [blocks, slots, latent + rope].

Grid: (tokens, tiles of heads, parts of the context). All heads read the same slots, so a tile of heads is the rows of
one product, in prompts as in decodes. Where a step has too few tokens to fill the device, each token's context is cut
into equal parts, whose results XLA merges.

Skipping: context behind the token, at the grain of one iteration. Programs without context write zeros.

Requires: bfloat16 or float16 queries, and a cache of the same type or of 8 bits; latent and rope of a power of two, 16
or more.

Padding: padding tokens have no context and give zeros. Heads beyond the last are masked.

Numerics: scores, softmax state, accumulators and partial results are float32; probabilities enter the second product
in the cache's type. Numbers of 8 bits are exact in that of queries; scales of slots multiply scores, and probabilities
before they enter. Slots that the token may not see are not read, so they may hold NaN.

Cost: a decode reads each slot once for each tile of heads, the second time from the second-level cache; a prompt as
often for each of its tokens. XLA would write a copy of the context first. In a step of many tokens a context is not
cut, and a long one takes a program's time for each of its tokens. Not measured.

Knows nothing of who owns a block. Letters beside the package's: X heads of a tile, s slots of an iteration.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.ragged_paged_attention.gpu.kernels import as_operand
from pallas_kernels.ragged_paged_attention.gpu.tiles import device_kind, reads_float8
from pallas_kernels.ragged_paged_attention.quantized import is_quantized, kind_of
from pallas_kernels.shapes import ceil_div

HEADS = 64  # rows of a tile, at most: a matrix instruction of Hopper takes no fewer
FEWEST_HEADS = 16
SLOTS = 32  # of one iteration
PROGRAMS = 512  # as many as fill a device: some for each of its cores
FEWEST_SLOTS = 128  # a part that is worth a program
LOWEST = -1e30  # below any score, yet finite, so that the difference of two is not NaN
LOG2_E = math.log2(math.e)


def cannot_take(q_TNC: Any, q_rope_TNP: Any, cache: Any) -> str | None:
    """Two-byte types, a cache of these or of 8 bits, and sizes that Triton has."""
    cache_BSW = cache.arrays[0]
    is_like = q_TNC.dtype == cache_BSW.dtype or is_quantized(cache_BSW.dtype)
    if str(q_TNC.dtype) not in ("bfloat16", "float16") or not is_like:
        accepted = "accepted are bfloat16 or float16 for both, or 8 bits for the cache"
        return f"queries are {q_TNC.dtype} and the cache {cache_BSW.dtype}; {accepted}"
    for name, size in (("latents", q_TNC.shape[2]), ("rope keys", q_rope_TNP.shape[2])):
        if size < 16 or size & (size - 1):
            return f"{name} have {size} numbers; accepted are powers of two from 16 on"
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
    """out_TNC over a cache that holds this step's tokens already, or what is `undivided` of it: each part of a context
    as if it had one slot, whose value is the part's result and whose score is its weight."""
    (T, N, C), cache_BSW = q_TNC.shape, cache.arrays[0]
    heads = min(HEADS, max(FEWEST_HEADS, pl.next_power_of_2(N)))
    num_tiles = ceil_div(N, heads)
    parts = num_parts(T * num_tiles, metadata.block_tables_RM.shape[1] * cache_BSW.shape[1])
    out_type = q_TNC.dtype if parts == 1 and not undivided else jnp.float32
    out_TUNC, weight_TUN = pl.pallas_call(
        functools.partial(
            _kernel,
            heads=heads,
            parts=parts,
            scale=scale * LOG2_E,
            scaled_by=kind_of(cache.scales),
            reads_float8=reads_float8(device_kind(bool(interpret))),
        ),
        out_shape=(
            jax.ShapeDtypeStruct((T, parts, N, C), out_type),
            jax.ShapeDtypeStruct((T, parts, N), jnp.float32),
        ),
        grid=(T, num_tiles, parts),
        compiler_params=plgpu.CompilerParams(num_warps=8 if heads == HEADS else 4, num_stages=2),
        interpret=interpret,
        name="mla_paged_attention",
    )(metadata.row_T, metadata.position_T, metadata.block_tables_RM, q_TNC, q_rope_TNP, cache_BSW, *cache.scales)
    if undivided:
        top_T1N = jnp.max(weight_TUN, axis=1, keepdims=True)
        share_TUN = jnp.exp2(weight_TUN - top_T1N)
        out_TNC, total_TN = jnp.sum(out_TUNC * share_TUN[..., None], axis=1), jnp.sum(share_TUN, axis=1)
        return jnp.concatenate([out_TNC, total_TN[..., None], top_T1N[:, 0, :, None] / LOG2_E], axis=2)
    if parts == 1:
        return out_TUNC[:, 0]
    share_TUN = jax.nn.softmax(weight_TUN * (1 / LOG2_E), axis=1)
    return jnp.sum(out_TUNC * share_TUN[..., None], axis=1).astype(q_TNC.dtype)


def num_parts(num_programs: int, max_slots: int) -> int:
    """Into how many parts contexts of up to `max_slots` are cut, for `num_programs` tiles of heads."""
    return max(1, min(PROGRAMS // num_programs, ceil_div(max_slots, FEWEST_SLOTS)))


def _kernel(
    row_T,
    position_T,
    tables_RM,
    q_TNC,
    q_rope_TNP,
    cache_BSW,
    *refs,
    heads: int,
    parts: int,
    scale: float,
    scaled_by: str,
    reads_float8: bool,
):
    """Write one part's output, and the logarithm to the base of 2 of its weight. `scaled_by`: which scales there are
    (`quantized.py`), behind the cache."""
    *scales, out_TUNC, weight_TUN = refs
    token, part = pl.program_id(0), pl.program_id(2)
    tile_x = pl.ds(pl.program_id(1) * heads, heads)
    mine_x = pl.program_id(1) * heads + jnp.arange(heads) < q_TNC.shape[1]
    row, position, C, P = row_T[token], position_T[token], q_TNC.shape[2], q_rope_TNP.shape[2]
    q_xC = plgpu.load(q_TNC.at[token, tile_x], mask=mine_x[:, None], other=0)
    q_xP = plgpu.load(q_rope_TNP.at[token, tile_x], mask=mine_x[:, None], other=0)

    def load(first: int, size: int, block_s, offset_s, visible_s):
        column_1c = first + lax.broadcasted_iota(jnp.int32, (1, size), 1)
        where = block_s[:, None], offset_s[:, None], column_1c
        nothing = 0.0 if jnp.issubdtype(cache_BSW.dtype, jnp.floating) else 0
        visible_sc = jnp.broadcast_to(visible_s[:, None], (SLOTS, size))
        found = plgpu.load(cache_BSW.at[where], mask=visible_sc, other=nothing)
        return as_operand(reads_float8, found, q_TNC.dtype)

    def scale_of(which: int, block_s, offset_s, visible_s):
        """Of latents (0) or rope keys (1), in each slot [1, s]."""
        if scaled_by == "head":
            return scales[which][0]
        where = block_s, jnp.full((SLOTS,), which, jnp.int32), offset_s
        return plgpu.load(scales[0].at[where], mask=visible_s, other=0.0)[None, :]

    def add_slots(i, state):
        top_x1, total_x1, out_xC = state
        position_s = i * SLOTS + lax.iota(jnp.int32, SLOTS)
        visible_s = position_s <= position
        column_s, offset_s = (op(position_s, jnp.int32(cache_BSW.shape[1])) for op in (lax.div, lax.rem))
        block_s = plgpu.load(tables_RM.at[row, column_s], mask=visible_s, other=0)
        latent_sC, rope_sP = (load(*size, block_s, offset_s, visible_s) for size in ((0, C), (C, P)))
        score_xs, of_rope_xs = plgpu.dot(q_xC, latent_sC, trans_b=True), plgpu.dot(q_xP, rope_sP, trans_b=True)
        if scales:
            of_latent, of_rope = (scale_of(which, block_s, offset_s, visible_s) for which in (0, 1))
            score_xs, of_rope_xs = score_xs * of_latent, of_rope_xs * of_rope
        score_xs = jnp.where(visible_s[None, :], (score_xs + of_rope_xs) * scale, -jnp.inf)
        highest_x1 = jnp.maximum(top_x1, jnp.max(score_xs, axis=1)[:, None])
        weight_xs, fade_x1 = jnp.exp2(score_xs - highest_x1), jnp.exp2(top_x1 - highest_x1)
        scaled_xs = weight_xs * of_latent if scales else weight_xs
        out_xC = out_xC * fade_x1 + plgpu.dot(scaled_xs.astype(latent_sC.dtype), latent_sC)
        return highest_x1, total_x1 * fade_x1 + jnp.sum(weight_xs, axis=1)[:, None], out_xC

    num_steps = ceil_div(position + 1, SLOTS)
    per_part = ceil_div(num_steps, parts)
    first = jnp.minimum(part * per_part, num_steps)
    nothing = jnp.full((heads, 1), LOWEST), jnp.zeros((heads, 1)), jnp.zeros((heads, C))
    state = tuple(x.astype(jnp.float32) for x in nothing)
    top_x1, total_x1, out_xC = lax.fori_loop(first, jnp.minimum(first + per_part, num_steps), add_slots, state)
    total_x1 = jnp.where(total_x1 == 0, jnp.float32(1), total_x1)
    out_xC = (out_xC * (1 / total_x1)).astype(out_TUNC.dtype)
    plgpu.store(out_TUNC.at[token, part, tile_x], out_xC, mask=mine_x[:, None])
    weight_x = jnp.sum(top_x1 + jnp.log2(total_x1), axis=1)
    plgpu.store(weight_TUN.at[token, part, tile_x], weight_x, mask=mine_x)
