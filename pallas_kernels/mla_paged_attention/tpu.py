"""Latent attention on a TPU: blocks are fetched by asynchronous copies, one chunk of context ahead of the products.

Layout: a slot is its latent, its rope key, and zeros up to whole registers of 128 lanes: [blocks, slots, lanes].

Grid: tiles of neighbouring tokens with all their heads. A tile's requests are worked on one after the other: where it
has one token of a request, that token's heads are the rows of a product, else all rows of the tile are.

Skipping: context behind a request's last token in the tile is not fetched, at the grain of a block.

Requires: bfloat16 or float32 queries and cache of the same type; latents of a multiple of 128; heads and blocks of
whole tiles of sublanes (8 float32, 16 bfloat16). One row of the block table must fit into SMEM, not all of it.

Padding: padding tokens belong to no request and give zeros. Block ids beyond a context are not looked up.

Numerics: scores, softmax state and accumulators are float32; probabilities enter the second product in the cache's
type. Slots behind the last token are replaced by zeros, not multiplied by them: they may hold NaN.

Cost: a decode reads each block of its context once, a prompt once for each tile of tokens; XLA would write a copy of
the context first. The first chunk of a request is waited for. Not measured.

Knows nothing of who owns a block. Letters beside the package's: X rows of a tile (its tokens times heads), s slots of
a chunk, J tiles.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.shapes import ceil_div

ROWS = 512  # of a tile: tokens times heads
CHUNK_SLOTS = 512
LANES = 128
VMEM_LIMIT_BYTES = 32 * 2**20
LOWEST = -1e30  # below any score, yet finite, so that the difference of two is not NaN
LOG2_E = math.log2(math.e)


def cannot_take(q_TNC: Any, q_rope_TNP: Any, cache_BSW: Any) -> str | None:
    """Whole registers everywhere."""
    dtype, (_, N, C), S = q_TNC.dtype, q_TNC.shape, cache_BSW.shape[1]
    if str(dtype) not in ("bfloat16", "float32") or dtype != cache_BSW.dtype:
        return f"queries are {dtype} and the cache {cache_BSW.dtype}; accepted are bfloat16 or float32 for both"
    sublanes = 32 // jnp.dtype(dtype).itemsize
    for name, size, accepted in (("latent_dim", C, LANES), ("block_size", S, sublanes), ("num_heads", N, sublanes)):
        if size % accepted:
            return f"{name} = {size}; accepted are multiples of {accepted} for {dtype}"
    return None


def attend(
    q_TNC: jax.Array,
    q_rope_TNP: jax.Array,
    cache_BSW: jax.Array,
    metadata: Any,
    *,
    scale: float,
    interpret: Any,
    undivided: bool = False,
) -> jax.Array:
    """out_TNC over a cache that holds this step's tokens already, or what is `undivided` of it."""
    (T, N, C), (_, S, W) = q_TNC.shape, cache_BSW.shape
    tokens = max(1, ROWS // N)
    num_tiles, X = ceil_div(T, tokens), tokens * N
    pad = ((0, num_tiles * tokens - T), (0, 0), (0, W - C - q_rope_TNP.shape[2]))
    q_XW = jnp.pad(jnp.concatenate([q_TNC, q_rope_TNP], axis=2), pad).reshape(-1, W)
    tables_R1M = metadata.block_tables_RM[:, None]
    tables_R1M = jnp.pad(tables_R1M, ((0, 0), (0, 0), (0, -tables_R1M.shape[2] % LANES)))
    whole, of_tile = pl.BlockSpec(memory_space=pl.ANY), lambda width: pl.BlockSpec((X, width), lambda j, *_: (j, 0))
    prefetched = (metadata.query_start_loc_R1, metadata.seq_lens_R, *_rows_of_tiles(metadata, num_tiles, tokens))
    inputs = [(q_XW, of_tile(W)), (_token_of_row(tokens, N), pl.BlockSpec((X, LANES), lambda j, *_: (0, 0)))]
    outputs = [(jax.ShapeDtypeStruct((len(q_XW), C), q_TNC.dtype), of_tile(C))]
    if undivided:
        seen_T = jnp.pad(metadata.position_T, pad[0])
        seen_XL = jnp.broadcast_to(jnp.repeat(seen_T, N)[:, None], (len(q_XW), LANES))
        prefetched, inputs = (*prefetched, seen_T), [*inputs, (seen_XL, of_tile(LANES))]
        outputs = [
            (jax.ShapeDtypeStruct((len(q_XW), width), jnp.float32), of_tile(width)) for width in (C, LANES, LANES)
        ]
    inputs += [(tables_R1M, whole), (cache_BSW, whole)]
    out_XC, *state = pl.pallas_call(
        functools.partial(_part_kernel if undivided else _kernel, num_heads=N, scale=scale * LOG2_E),
        out_shape=[shape for shape, _ in outputs],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(num_tiles,),
            in_specs=[spec for _, spec in inputs],
            out_specs=[spec for _, spec in outputs],
            scratch_shapes=[
                pltpu.VMEM((2, max(1, CHUNK_SLOTS // S) * S, W), cache_BSW.dtype),
                pltpu.SMEM(tables_R1M.shape[1:], jnp.int32),
                pltpu.SemaphoreType.DMA((3,)),
                pltpu.VMEM((X, C), jnp.float32),
                pltpu.VMEM((2, X, LANES), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=VMEM_LIMIT_BYTES),
        interpret=interpret,
        name="mla_paged_attention",
    )(*prefetched, *(array for array, _ in inputs))
    if undivided:
        top_XL, total_XL = state
        out_XC = jnp.concatenate([out_XC, total_XL[:, :1], top_XL[:, :1] / LOG2_E], axis=1)
    return out_XC.reshape(-1, N, out_XC.shape[1])[:T]


def _rows_of_tiles(metadata: Any, num_tiles: int, tokens: int) -> tuple[jax.Array, jax.Array]:
    """Rows [first, end) of the block table that have tokens in each tile; rows without a token may be among them."""
    start_J1 = jnp.arange(num_tiles)[:, None] * tokens
    start_R1 = metadata.query_start_loc_R1
    first_J = jnp.sum(start_R1[1:] <= start_J1, axis=1)
    end_J = jnp.sum(start_R1[:-1] < start_J1 + tokens, axis=1)
    return first_J.astype(jnp.int32), jnp.maximum(end_J, first_J).astype(jnp.int32)


def _token_of_row(tokens: int, num_heads: int) -> jax.Array:
    """[X, lanes]: which of the tile's tokens a row belongs to. Data, since a TPU divides no vectors of integers."""
    token_X = jnp.repeat(jnp.arange(tokens, dtype=jnp.int32), num_heads)
    return jnp.broadcast_to(token_X[:, None], (tokens * num_heads, LANES))


def _kernel(start_R1, seq_lens_R, first_J, end_J, q_XW, token_XL, tables_R1M, cache_BSW, out_XC, *scratch, **settings):
    _attend_tile(
        start_R1, seq_lens_R, first_J, end_J, q_XW, token_XL, None, tables_R1M, cache_BSW, *scratch, **settings
    )
    *_, sum_XC, state_2XL = scratch
    total_X1 = state_2XL[1, :, :1]
    out_XC[...] = (sum_XC[...] / jnp.where(total_X1 == 0, 1.0, total_X1)).astype(out_XC.dtype)


def _part_kernel(
    start_R1,
    seq_lens_R,
    first_J,
    end_J,
    seen_T,
    q_XW,
    token_XL,
    seen_XL,
    tables_R1M,
    cache_BSW,
    out_XC,
    top_XL,
    total_XL,
    *scratch,
    **settings,
):
    """Where others hold a part of the context: the last slot that each token sees is data, and nothing is divided."""
    seen = seen_T, seen_XL
    _attend_tile(
        start_R1, seq_lens_R, first_J, end_J, q_XW, token_XL, seen, tables_R1M, cache_BSW, *scratch, **settings
    )
    *_, sum_XC, state_2XL = scratch
    out_XC[...], top_XL[...], total_XL[...] = sum_XC[...], state_2XL[0], state_2XL[1]


def _attend_tile(
    start_R1,
    seq_lens_R,
    first_J,
    end_J,
    q_XW,
    token_XL,
    seen,
    tables_R1M,
    cache_BSW,
    chunks_2sW,
    table_1M,
    semaphores,
    sum_XC,
    state_2XL,
    *,
    num_heads: int,
    scale: float,
):
    tile = pl.program_id(0)
    first_token, tokens = tile * (q_XW.shape[0] // num_heads), q_XW.shape[0] // num_heads
    sum_XC[...] = jnp.zeros_like(sum_XC)
    state_2XL[0] = jnp.full(state_2XL.shape[1:], LOWEST, jnp.float32)
    state_2XL[1] = jnp.zeros(state_2XL.shape[1:], jnp.float32)

    @pl.loop(first_J[tile], end_J[tile])
    def _(row):
        begin = jnp.maximum(start_R1[row] - first_token, 0)
        end = jnp.minimum(start_R1[row + 1] - first_token, tokens)
        offset = seq_lens_R[row] - start_R1[row + 1] + first_token  # position of the tile's first token, if it is mine
        length = offset + end if seen is None else seen[0][first_token + jnp.maximum(end, 1) - 1] + 1
        refs = q_XW, token_XL, None if seen is None else seen[1], sum_XC, state_2XL
        add = functools.partial(_add_chunk, *refs, begin, end, offset, scale)

        def attend_chunk(chunk_sW, position):
            pl.when(end - begin == 1)(lambda: add(chunk_sW, position, pl.ds(begin * num_heads, num_heads)))
            pl.when(end - begin > 1)(lambda: add(chunk_sW, position, slice(None)))

        @pl.when(end > begin)
        def _():
            _over_context(tables_R1M.at[row], cache_BSW, chunks_2sW, table_1M, semaphores, length, attend_chunk)


def _over_context(table_hbm, cache_BSW, chunks_2sW, table_1M, semaphores, length, attend_chunk) -> None:
    """`attend_chunk(chunk_sW, position of its first slot)` for the chunks of the context [0, length)."""
    S, slots = cache_BSW.shape[1], chunks_2sW.shape[1]
    table_copy = pltpu.make_async_copy(table_hbm, table_1M, semaphores.at[2])
    table_copy.start()
    table_copy.wait()

    def each_block(chunk, act):
        @pl.loop(0, jnp.minimum(lax.div(length - chunk * slots + S - 1, S), slots // S))
        def _(i):
            target = chunks_2sW.at[chunk & 1, pl.ds(pl.multiple_of(i * S, S), S)]
            block = table_1M[0, chunk * (slots // S) + i]
            act(pltpu.make_async_copy(cache_BSW.at[block], target, semaphores.at[chunk & 1]))

    num_chunks = lax.div(length + slots - 1, slots)
    each_block(0, lambda copy: copy.start())

    @pl.loop(0, num_chunks)
    def _(chunk):
        pl.when(chunk + 1 < num_chunks)(lambda: each_block(chunk + 1, lambda copy: copy.start()))
        each_block(chunk, lambda copy: copy.wait())
        chunk_sW = chunks_2sW.at[chunk & 1]

        @pl.when((chunk + 1) * slots > length)
        def _():
            position_sW = chunk * slots + lax.broadcasted_iota(jnp.int32, chunk_sW.shape, 0)
            chunk_sW[...] = jnp.where(position_sW < length, chunk_sW[...], jnp.zeros_like(chunk_sW))

        attend_chunk(chunk_sW, chunk * slots)


def _add_chunk(
    q_XW, token_XL, seen_XL, sum_XC, state_2XL, begin, end, offset, scale: float, chunk_sW, position, rows
) -> None:
    """Let some rows of the tile attend to one chunk, those whose token is in [begin, end)."""
    slots, C, L = chunk_sW.shape[0], sum_XC.shape[1], state_2XL.shape[2]
    over_lanes, plain = (((1,), (1,)), ((), ())), (((1,), (0,)), ((), ()))
    product = functools.partial(
        lax.dot_general,
        precision=lax.Precision.HIGHEST if q_XW.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    token_X1 = token_XL[rows, :1]
    last_X1 = offset + token_X1 if seen_XL is None else seen_XL[rows, :1]
    last_X1 = jnp.where((token_X1 >= begin) & (token_X1 < end), last_X1, -1)
    position_1s = position + lax.broadcasted_iota(jnp.int32, (1, slots), 1)
    score_Xs = product(q_XW[rows, :], chunk_sW[...], over_lanes) * scale
    score_Xs = jnp.where(position_1s <= last_X1, score_Xs, 2 * LOWEST)  # below LOWEST, so that its weight is zero
    old_X1 = state_2XL[0, rows, :1]
    top_X1 = jnp.maximum(old_X1, jnp.max(score_Xs, axis=1, keepdims=True))
    weight_Xs, fade_X1 = jnp.exp2(score_Xs - top_X1), jnp.exp2(old_X1 - top_X1)
    total_X1 = state_2XL[1, rows, :1] * fade_X1 + jnp.sum(weight_Xs, axis=1, keepdims=True)
    added_XC = product(weight_Xs.astype(chunk_sW.dtype), chunk_sW[:, :C], plain)
    sum_XC[rows, :] = sum_XC[rows, :] * fade_X1 + added_XC
    state_2XL[0, rows, :] = jnp.broadcast_to(top_X1, (len(top_X1), L))
    state_2XL[1, rows, :] = jnp.broadcast_to(total_X1, (len(total_X1), L))
