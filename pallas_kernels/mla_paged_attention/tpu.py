"""Latent attention on a TPU: blocks of several requests are fetched at once, one step ahead of the products.

Layout: a slot is its latent, its rope key, and zeros up to whole registers of 128 lanes: [blocks, slots, lanes].

Grid: tiles of neighbouring tokens with all their heads. Steps go over the pieces of contexts that a tile's requests
read, `ITEMS` at a time, of whatever requests, and on from tile to tile without a gap: what moves is
`ragged_paged_attention`'s (`fetch.py`, `segments.py`), of whose caches this is one with one head. Where all pieces of a
step are read by one token each, the heads of these tokens are the rows of products side by side. Else pieces follow
each other, each against the blocks of the tile's rows that read it.

Skipping: context behind a request's last token in the tile is neither fetched nor looked up, at the grain of a block.
Pieces that all rows of a block see whole are not masked.

Requires: bfloat16 or float32 queries; a cache of the same type, or of int8, float8_e4m3fn, float8_e5m2; latents of a
multiple of 128; heads of whole tiles of sublanes (8 float32, 16 bfloat16), and blocks too, those of 8 bits of 16.

Padding: padding tokens belong to no request and give zeros. Block ids beyond a context are not looked up. Tokens beyond
the last tile are garbage in and out. No operand is padded: queries and their rope parts come as they are, and meet in
VMEM.

Numerics: scores, softmax state and accumulators are float32; probabilities enter the second product in the cache's
type, of 8 bits in the queries', scales multiplying scores and probabilities in float32. Slots behind the last token
are replaced by zeros, not multiplied by them: they may hold NaN.

Cost: a decode reads each block of its context once, a prompt once for each tile of tokens; XLA would write a copy of
the context first. A step computes all of its items, also where a tile has fewer left, and whole pieces. Not measured.

Knows nothing of who owns a block. Letters beside the package's: X rows of a tile (its tokens times heads), x of a block
of rows, P slots of an item, I items of a step, L lanes of a register.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention.quantized import is_quantized, kind_of
from pallas_kernels.ragged_paged_attention.shared_tiles import runs_of_rows
from pallas_kernels.ragged_paged_attention.tpu.fetch import Fetcher, FetchShape, Item
from pallas_kernels.ragged_paged_attention.tpu.lanes import NUM_LANES, over_lanes
from pallas_kernels.ragged_paged_attention.tpu.operands import UNCHECKED
from pallas_kernels.ragged_paged_attention.tpu.plan import paged, pages_of
from pallas_kernels.ragged_paged_attention.tpu.segments import Segments, item_slots_of, segments_of
from pallas_kernels.ragged_paged_attention.tpu.softmax import (
    LOG2_E,
    LOWEST,
    ScoreRule,
    clear_unseen,
    in_one_row,
    query_key_products,
    visible_slots,
    weighted_values,
)
from pallas_kernels.ragged_paged_attention.tpu.tile_state import TileState, merged, repeated, sums_by_lane
from pallas_kernels.shapes import ceil_div, largest_divisor

ROWS = 512  # of a tile: tokens times heads
BLOCK_ROWS = 128  # of a tile that are multiplied at once where a request has several tokens in it, but not all
ITEMS, ITEM_SLOTS = 4, 512
VMEM_LIMIT_BYTES = 48 * 2**20
SMALLEST_BLOCK = 16  # slots of a block that 8-bit types may have too, though half a tile of theirs


def cannot_take(q_TNC: Any, q_rope_TNP: Any, cache: Any) -> str | None:
    """Whole registers everywhere."""
    cache_BSW, dtype = cache.arrays[0], q_TNC.dtype
    (_, N, C), S = q_TNC.shape, cache_BSW.shape[1]
    if str(dtype) not in ("bfloat16", "float32") or (dtype != cache_BSW.dtype and not is_quantized(cache_BSW.dtype)):
        accepted = "bfloat16 or float32 for both, or a cache of int8, float8_e4m3fn or float8_e5m2"
        return f"queries are {dtype} and the cache {cache_BSW.dtype}; accepted are {accepted}"
    sublanes = 32 // jnp.dtype(dtype).itemsize
    of_block = SMALLEST_BLOCK if is_quantized(cache_BSW.dtype) else sublanes
    for name, size, accepted in (("latent_dim", C, NUM_LANES), ("block_size", S, of_block), ("num_heads", N, sublanes)):
        if size % accepted:
            return f"{name} = {size}; accepted are multiples of {accepted} for {dtype}"
    return None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Operands:
    """What the kernel reads: arrays outside of it, refs inside.

    token_xL: which token of a block of rows each row belongs to. Data, since a TPU divides no vectors of integers.
    seen_XL: the last slot that each row sees; None where contexts are whole. Of a cache of 8 bits there may be
    scales_2L, of latents and of rope keys, all lanes alike, or those of tokens.
    """

    segments: Segments
    q_XC: Any
    q_rope_XP: Any
    token_xL: Any
    seen_XL: Any
    scales_2L: Any
    tables: Any
    kv_BKSW: Any
    token_scales_BK2L: Any

    @property
    def num_scalars(self) -> int:
        return len(jax.tree.leaves(self.segments))

    def specs(self, rows: int) -> list[pl.BlockSpec]:
        """Of the leaves after the scalars."""
        of_tile = lambda x: pl.BlockSpec((rows, x.shape[1]), lambda j, *_: (j, 0))
        whole = lambda x: pl.BlockSpec(x.shape, lambda j, *_: (0, 0))
        in_hbm = lambda x: pl.BlockSpec(memory_space=pltpu.HBM)
        places = (of_tile, of_tile, whole, of_tile, whole, in_hbm, in_hbm, in_hbm)
        leaves = [getattr(self, field.name) for field in dataclasses.fields(self)][1:]
        return [make(x) for make, x in zip(places, leaves) if x is not None]


@dataclasses.dataclass(frozen=True)
class _Shape:
    """Everything static: `num_heads` rows belong to each token."""

    fetch: FetchShape
    rule: ScoreRule
    num_heads: int
    tile_rows: int
    block_rows: int


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
    """out_TNC over a cache that holds this step's tokens already, or what is `undivided` of it: each token's part of a
    context as if it were one slot, whose value is the part's result and whose score is its weight."""
    (T, N, C), cache_BSW, kind = q_TNC.shape, cache.arrays[0], kind_of(cache.scales)
    S, W, tokens = *cache_BSW.shape[1:], max(1, ROWS // N)
    num_tiles, item_slots = ceil_div(T, tokens), item_slots_of(S, ITEM_SLOTS)
    block_rows = N * largest_divisor(tokens, max(1, BLOCK_ROWS // N))
    runs = runs_of_rows(metadata.query_start_loc_R1, metadata.position_T, tokens)
    operands = _Operands(
        segments=segments_of(runs, num_tiles, item_slots),
        q_XC=q_TNC.reshape(-1, C),
        q_rope_XP=q_rope_TNP.reshape(T * N, -1),
        token_xL=over_lanes(jnp.repeat(jnp.arange(block_rows // N, dtype=jnp.int32), N)),
        seen_XL=over_lanes(jnp.repeat(metadata.position_T, N)) if undivided else None,
        scales_2L=over_lanes(jnp.concatenate(cache.scales)) if kind == "head" else None,
        tables=paged(metadata.block_tables_RM),
        kv_BKSW=cache_BSW[:, None],
        token_scales_BK2L=cache.scales[0][:, None] if kind == "token" else None,
    )
    fetch = FetchShape(
        num_items=ITEMS,
        num_heads=1,
        item_slots=item_slots,
        block_size=S,
        slot_lanes=W,
        pages_per_row=pages_of(metadata.block_tables_RM.shape[1]),
        token_scales=kind == "token",
    )
    shape = _Shape(fetch, ScoreRule(scale, None), N, tokens * N, block_rows)
    if not undivided:
        return _call(operands, shape, [jax.ShapeDtypeStruct((T * N, C), q_TNC.dtype)], interpret)[0].reshape(T, N, C)
    structs = [jax.ShapeDtypeStruct((T * N, width), jnp.float32) for width in (C, NUM_LANES)]
    out_XC, top_XL = _call(operands, shape, structs, interpret)
    parts = out_XC, jnp.ones((T * N, 1), jnp.float32), top_XL[:, :1] / LOG2_E
    return jnp.concatenate(parts, axis=1).reshape(T, N, C + 2)


def _call(operands: _Operands, shape: _Shape, outputs: list[Any], interpret: Any) -> list[jax.Array]:
    """What a tile's softmax comes to, or the first of it."""
    X, C, W = shape.tile_rows, operands.q_XC.shape[1], operands.kv_BKSW.shape[3]
    leaves, treedef = jax.tree.flatten(operands)
    return pl.pallas_call(
        functools.partial(_kernel, shape, treedef, len(outputs)),
        out_shape=outputs,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=operands.num_scalars,
            grid=(ceil_div(len(operands.q_XC), X),),
            in_specs=operands.specs(X),
            out_specs=[pl.BlockSpec((X, out.shape[1]), lambda j, *_: (j, 0)) for out in outputs],
            scratch_shapes=[
                shape.fetch.scratch(operands.kv_BKSW.dtype),
                pltpu.VMEM((X, W), operands.q_XC.dtype),
                pltpu.VMEM((1, X, C), jnp.float32),
                pltpu.VMEM((2, 1, X, NUM_LANES), jnp.float32),
                pltpu.VMEM((X, shape.fetch.item_slots), jnp.float32),
                pltpu.VMEM((X, NUM_LANES), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_LIMIT_BYTES, **UNCHECKED
        ),
        interpret=interpret,
        name="mla_paged_attention",
    )(*leaves)


def _kernel(shape: _Shape, treedef: Any, num_outputs: int, *refs: Any) -> None:
    operands = jax.tree.unflatten(treedef, refs[: treedef.num_leaves])
    outputs = refs[treedef.num_leaves : treedef.num_leaves + num_outputs]
    scratch, q_XW, *state_refs = refs[treedef.num_leaves + num_outputs :]
    tile = pl.program_id(0)
    fetcher = Fetcher(shape.fetch, operands, 0, scratch)
    pl.when(tile == 0)(fetcher.begin)
    C, width = operands.q_XC.shape[1], operands.q_XC.shape[1] + operands.q_rope_XP.shape[1]
    q_XW[:, :C] = operands.q_XC[...]
    q_XW[:, C:] = jnp.zeros((q_XW.shape[0], q_XW.shape[1] - C), q_XW.dtype)
    q_XW[:, C:width] = operands.q_rope_XP[...]
    state = TileState(*state_refs)
    state.reset(None, len(q_XW))
    fetcher.run_steps(tile, functools.partial(_attend_step, _Pieces(shape, fetcher, q_XW, C), state))
    for out_ref, x in zip(outputs, state.result()):
        out_ref[...] = x[0].astype(out_ref.dtype)


@dataclasses.dataclass(frozen=True)
class _Pieces:
    """Of a step's products: what is multiplied, and what is done about it before and after."""

    shape: _Shape
    fetcher: Fetcher
    q_XW: Any
    latent_dim: int

    def clear(self, step: jax.Array, i: Any, item: Item) -> None:
        scales_ref = self.fetcher.token_scales(step)
        clear_unseen(self.fetcher.blocks(step).at[i], None if scales_ref is None else scales_ref.at[i], item)

    def keys_and_values(self, step: jax.Array, items: Any) -> tuple[jax.Array, jax.Array]:
        """([n, P, W], [n, P, C]) of the pieces `items`, a slice, in the queries' type."""
        blocks_ref, dtype, latent = self.fetcher.blocks(step), self.q_XW.dtype, slice(0, self.latent_dim)
        k_nPW = blocks_ref[items, 0].astype(dtype)
        if str(blocks_ref.dtype).startswith("float8"):  # not every TPU converts them, and then it takes long
            return k_nPW, k_nPW[..., latent]
        return k_nPW, blocks_ref[items, 0, :, latent].astype(dtype)

    def exponents(self, q_nxW: jax.Array, k_nPW: jax.Array, scales: Any) -> jax.Array:
        """[n, x, P] of queries against keys."""
        if scales is None:
            return self.shape.rule.exponents(query_key_products(q_nxW, k_nPW, None))
        parts = (slice(0, self.latent_dim), slice(self.latent_dim, None))
        products = [query_key_products(q_nxW[..., part], k_nPW[..., part], x) for part, x in zip(parts, scales)]
        return self.shape.rule.exponents(sum(products))

    def scales(self, step: jax.Array, items: Any) -> tuple[jax.Array, jax.Array] | None:
        """Scales of latents and of rope keys, to multiply with [n, x, P]."""
        token_scales_ref, scales_2L = self.fetcher.token_scales(step), self.fetcher.operands.scales_2L
        if token_scales_ref is not None:
            scales_nb12L = token_scales_ref[items]
            rows = [in_one_row(scales_b12L, self.shape.fetch.block_size) for scales_b12L in scales_nb12L]
            return tuple(jnp.concatenate(x, axis=0) for x in zip(*rows))
        if scales_2L is not None:
            return scales_2L[:1, :1][None], scales_2L[1:, :1][None]
        return None


def _attend_step(pieces: _Pieces, state: TileState, step: jax.Array, meanwhile: Callable) -> None:
    """Side by side where one token reads each piece of context, else piece by piece."""
    segments = pieces.fetcher.segments
    items = [pieces.fetcher.item(step, i) for i in range(ITEMS)]
    one_each = functools.reduce(
        jnp.logical_and,
        [segments.end_query_Z[item.segment] - segments.first_query_Z[item.segment] == 1 for item in items],
    )
    pl.when(one_each)(lambda: _attend_singles(pieces, state, step, items, meanwhile))

    @pl.when(jnp.logical_not(one_each))
    def _():
        meanwhile()

        @pl.loop(0, ITEMS)
        def _(i):
            item = pieces.fetcher.item(step, i)
            pl.when(item.in_use)(lambda: _attend_rows(pieces, state, step, i, item))


def _attend_singles(pieces: _Pieces, state: TileState, step: jax.Array, items: list[Item], meanwhile: Callable) -> None:
    """All pieces at once, then one after the other into the softmax of its token, in straight code but for what nobody
    may see; `meanwhile` is done beside it."""
    N, segments = pieces.shape.num_heads, pieces.fetcher.segments
    for i, item in enumerate(items):
        pieces.clear(step, i, item)
    meanwhile()
    rows, first = [], jnp.int32(0)
    for item in items:  # those that are not in use come last, and change nothing
        first = jnp.where(item.in_use, segments.first_query_Z[item.segment] * N, first)
        rows.append(pl.ds(pl.multiple_of(first, N), N))
    parts_I = _softmaxes(pieces, step, items, rows)
    softmax = state.load(rows[0])
    for i, item in enumerate(items):
        if i:  # the first goes on from what was there, the others from the one before, or begin
            softmax = tuple(jnp.where(item.is_first, x, old) for x, old in zip((LOWEST, 0.0, 0.0), softmax))
        added = merged(softmax, tuple(x_I[i] for x_I in parts_I))
        softmax = tuple(jnp.where(item.in_use, x, old) for x, old in zip(added, softmax))
        state.store(rows[i], softmax)


def _softmaxes(pieces: _Pieces, step: jax.Array, items: list[Item], rows: list[Any]) -> tuple[jax.Array, ...]:
    """(tops [I, N, L], totals, weighted latents [I, N, C]) of each piece by itself, for the queries in `rows`."""
    q_INW = jnp.stack([pieces.q_XW[of_item] for of_item in rows])
    (k_IPW, v_IPC), scales = pieces.keys_and_values(step, slice(None)), pieces.scales(step, slice(None))
    exponent_INP = pieces.exponents(q_INW, k_IPW, scales)
    visible_I1P = jnp.stack([visible_slots(item, (1, exponent_INP.shape[2]), 1) for item in items])
    exponent_INP = jnp.where(visible_I1P, exponent_INP, 2 * LOWEST)
    top_INL = jnp.broadcast_to(exponent_INP.max(axis=-1, keepdims=True), (*exponent_INP.shape[:2], NUM_LANES))
    weight_INP = jnp.exp2(exponent_INP - repeated(top_INL, exponent_INP))
    total_INL = jnp.stack([sums_by_lane(weight_NP) for weight_NP in weight_INP])
    return top_INL, total_INL, weighted_values(weight_INP, v_IPC, None if scales is None else scales[0])


def _attend_rows(pieces: _Pieces, state: TileState, step: jax.Array, i: jax.Array, item: Item) -> None:
    """One piece: all rows of the tile at once where they see it whole, else the blocks of rows that its segment has."""
    operands, N, x = pieces.fetcher.operands, pieces.shape.num_heads, pieces.shape.block_rows
    segments, per_block, X = operands.segments, x // N, len(pieces.q_XW)
    begin, end = segments.first_query_Z[item.segment], segments.end_query_Z[item.segment]
    slots, least = pieces.shape.fetch.item_slots, segments.least_Z[item.segment]
    all_see_all = (begin == 0) & (end == X // N) & (item.position + slots <= least + 1)
    pieces.clear(step, i, item)

    def attend(rows: Any, num_rows: int, mask: Any) -> None:
        (k_1PW, v_1PC), scales = pieces.keys_and_values(step, pl.ds(i, 1)), pieces.scales(step, pl.ds(i, 1))
        state.put(mask(pieces.exponents(pieces.q_XW[rows][None], k_1PW, scales)[0]))
        v_scale = None if scales is None else scales[0]
        for start in range(0, num_rows, x):
            state.add(0, pl.ds(rows.start + start, x), pl.ds(start, x), v_1PC[0], v_scale)

    pl.when(all_see_all)(lambda: attend(pl.ds(0, X), X, lambda exponent_XP: exponent_XP))

    @pl.when(jnp.logical_not(all_see_all))
    def _():
        @pl.loop(lax.div(begin, per_block), lax.div(end + per_block - 1, per_block))
        def _(b):
            rows = pl.ds(pl.multiple_of(b * x, x), x)

            def hide(exponent_xP: jax.Array) -> jax.Array:
                token_x1 = b * per_block + operands.token_xL[:, :1]
                last_x1 = least + token_x1 - begin if operands.seen_XL is None else operands.seen_XL[rows, :1]
                last_x1 = jnp.where((token_x1 >= begin) & (token_x1 < end), last_x1, -1)
                position_1P = item.position + lax.broadcasted_iota(jnp.int32, (1, slots), 1)
                return jnp.where(position_1P <= last_x1, exponent_xP, 2 * LOWEST)

            attend(rows, x, hide)
