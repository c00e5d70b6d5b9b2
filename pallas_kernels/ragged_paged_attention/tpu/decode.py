"""The decode kernel: one new query per request, several pieces of any requests' contexts at a time.

This module knows nothing of where queries come from and of writing to the cache. Letters beside the package's:
Z requests that decode, E tiles of query rows, X rows of a tile (the G query heads of one kv head, padded to sublanes,
or those of several), P slots of an item, D lanes of an operand, n items times heads.
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

from pallas_kernels.ragged_paged_attention.tpu.fetch import Fetcher, FetchShape, Item
from pallas_kernels.ragged_paged_attention.tpu.lanes import NUM_LANES, Lanes
from pallas_kernels.ragged_paged_attention.tpu.operands import UNCHECKED, Operands
from pallas_kernels.ragged_paged_attention.tpu.softmax import (
    LOWEST,
    ScoreRule,
    clear_unseen,
    in_one_row,
    is_seen_whole,
    query_key_products,
    visible_slots,
    weighted_values,
)
from pallas_kernels.ragged_paged_attention.tpu.tile_state import Softmax, merged, repeated, sums_by_lane


@dataclasses.dataclass(frozen=True)
class DecodeShape:
    """Everything static. `heads_per_tile`: kv heads whose queries share a tile."""

    fetch: FetchShape
    lanes: Lanes
    rule: ScoreRule
    rows_per_block: int
    heads_per_tile: int


def decode_attention(operands: Operands, shape: DecodeShape, *, vmem_limit_bytes: int, interpret: Any) -> jax.Array:
    """out_ZEXD in q's dtype: attention of each segment's query, q_ZEXD, over its piece of context, from the cache, and
    over what was begun. Zeros where no segment is."""
    Z, E, X, D = operands.q.shape
    rows, heads = shape.rows_per_block, shape.fetch.num_heads
    tiles = heads // shape.heads_per_tile
    block, place = (rows, tiles, X, D), lambda h, j, *_: (j, h, 0, 0)
    leaves, treedef = jax.tree.flatten(operands)
    call = pl.pallas_call(
        functools.partial(_kernel, shape, treedef),
        out_shape=jax.ShapeDtypeStruct(operands.q.shape, operands.q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=operands.num_scalars,
            grid=(E // tiles, Z // rows),
            in_specs=operands.specs(block, place, heads),
            out_specs=pl.BlockSpec(block, place),
            scratch_shapes=[
                shape.fetch.scratch(operands.kv_BKSW.dtype),
                pltpu.VMEM((heads, X, D), jnp.float32),
                pltpu.VMEM((2, heads, X, NUM_LANES), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem_limit_bytes, **UNCHECKED
        ),
        interpret=interpret,
        name="paged_attention_decode",
    )
    return call(*leaves)


def _kernel(shape: DecodeShape, treedef: Any, *refs: Any) -> None:
    operands = jax.tree.unflatten(treedef, refs[: treedef.num_leaves])
    out_ref, scratch, *state_refs = refs[treedef.num_leaves :]
    grid_block = pl.program_id(1)
    fetcher = Fetcher(shape.fetch, operands, pl.program_id(0) * shape.fetch.num_heads, scratch)
    pl.when(grid_block == 0)(fetcher.begin)
    out_ref[...] = jnp.zeros_like(out_ref)
    fetcher.run_steps(grid_block, functools.partial(_attend_items, shape, fetcher, _State(*state_refs), out_ref))


@dataclasses.dataclass(frozen=True)
class _State:
    """The softmax of the segment at hand, over what was seen of it so far: tops, all lanes alike, and totals, to be
    summed over lanes, [heads, X, lanes], and weighted values [heads, X, D]."""

    acc_ref: Any
    top_total_ref: Any

    def load(self) -> Softmax:
        return self.top_total_ref[0], self.top_total_ref[1], self.acc_ref[...]

    def store(self, softmax: Softmax) -> None:
        self.top_total_ref[0], self.top_total_ref[1], self.acc_ref[...] = softmax


def _attend_items(
    shape: DecodeShape, fetcher: Fetcher, state: _State, out_ref: Any, step: jax.Array, meanwhile: Callable
) -> None:
    """Attend to all items of a step at once, then add each to its segment, which may end there. But for what nobody may
    see it is straight code, in which `meanwhile` is done too: where an item is not in use nothing changes, and outputs
    are written again with each item of a segment."""
    first_segment = pl.program_id(1) * shape.rows_per_block
    blocks_ref, scales_ref = fetcher.blocks(step), fetcher.token_scales(step)
    items = [fetcher.item(step, i) for i in range(shape.fetch.num_items)]
    is_whole = functools.reduce(jnp.logical_and, [is_seen_whole(item, shape.fetch.item_slots) for item in items])

    @pl.when(jnp.logical_not(is_whole))
    def _():
        @pl.loop(0, shape.fetch.num_items)
        def _(i):
            clear_unseen(blocks_ref.at[i], None if scales_ref is None else scales_ref.at[i], fetcher.item(step, i))

    meanwhile()
    query, queries = jnp.int32(0), []
    for item in items:  # those that are not in use come last
        query = jnp.where(item.in_use, item.segment - first_segment, query)
        queries.append(query)
    parts = _softmaxes(shape, fetcher, items, queries, step)
    softmax = state.load()
    for item, query, part in zip(items, queries, parts):
        old = (jnp.where(item.is_first, x, y) for x, y in zip(_nothing(shape, fetcher.operands, item, query), softmax))
        softmax = tuple(jnp.where(item.in_use, x, y) for x, y in zip(merged(tuple(old), part), softmax))
        out_KXD = softmax[2] / softmax[1].sum(axis=-1, keepdims=True)
        out_ref[query] = _own_rows(out_KXD, shape.heads_per_tile).astype(out_ref.dtype)
    state.store(softmax)


def _of_heads(x_EX: jax.Array, heads_per_tile: int) -> jax.Array:
    """x_KX: for each kv head the tile of queries that it meets."""
    E, *rest = x_EX.shape
    return jnp.broadcast_to(x_EX[:, None], (E, heads_per_tile, *rest)).reshape(E * heads_per_tile, *rest)


def _own_rows(x_KXD: jax.Array, heads_per_tile: int) -> jax.Array:
    """x_EXD: of each tile the rows of every kv head that are its own queries."""
    K, X, D = x_KXD.shape
    x_EpXD = x_KXD.reshape(K // heads_per_tile, heads_per_tile, X, D)
    row, own = lax.broadcasted_iota(jnp.int32, (1, X, D), 1), x_EpXD[:, 0]
    for p in range(1, heads_per_tile):
        own = jnp.where(row < p * (X // heads_per_tile), own, x_EpXD[:, p])
    return own


def _nothing(shape: DecodeShape, operands: Operands, item: Item, query: jax.Array) -> Softmax:
    """What a segment begins with. A sink is a weight with no value; what shared spans have left has sinks in it."""
    sinks, begun = operands.sinks, operands.begun
    top, total = (LOWEST, 0.0) if sinks is None else (sinks[...], 1 / NUM_LANES)
    if begun is None:
        return top, total, 0.0
    is_begun = operands.segments.begun_Z[item.segment] > 0
    either = lambda x, y: jnp.where(is_begun, x, y)
    begun_top, begun_out = (_of_heads(ref[query], shape.heads_per_tile) for ref in (begun.top, begun.out))
    return either(begun_top, top), either(1 / NUM_LANES, total), either(begun_out, 0.0)


def _scales(shape: DecodeShape, fetcher: Fetcher, step: jax.Array) -> tuple[Any, Any]:
    """Scales of keys and of values, to multiply with [n, X, P], or None."""
    token_scales_ref, head_scales_ref = fetcher.token_scales(step), fetcher.operands.head_scales_K2L
    if token_scales_ref is not None:
        of_items = [in_one_row(token_scales_ref[i], shape.fetch.block_size) for i in range(shape.fetch.num_items)]
        return tuple(jnp.concatenate(x, axis=0) for x in zip(*of_items))
    if head_scales_ref is not None:
        scales_K2L = jnp.concatenate([head_scales_ref[...]] * shape.fetch.num_items, axis=0)
        return scales_K2L[:, :1, :1], scales_K2L[:, 1:, :1]
    return None, None


def _softmaxes(
    shape: DecodeShape, fetcher: Fetcher, items: list[Item], queries: list[jax.Array], step: jax.Array
) -> list[Softmax]:
    """That of each item by itself."""
    heads, P = shape.fetch.num_heads, shape.fetch.item_slots
    q_nXD = jnp.concatenate([_of_heads(fetcher.operands.q[query], shape.heads_per_tile) for query in queries])
    n, X, D = q_nXD.shape
    blocks_ref, scales = fetcher.blocks(step), _scales(shape, fetcher, step)
    k_nPD, v_nPD = (
        blocks_ref[..., lanes].reshape(n, P, D).astype(q_nXD.dtype) for lanes in (shape.lanes.keys, shape.lanes.values)
    )
    exponent_nXP = shape.rule.exponents(query_key_products(q_nXD, k_nPD, scales[0]))
    of_items = [slice(i * heads, (i + 1) * heads) for i in range(len(items))]
    seen = [visible_slots(item, (1, 1, P), 2) for item in items]
    exponent_nXP = jnp.concatenate(
        [jnp.where(seen_11P, exponent_nXP[mine], LOWEST) for seen_11P, mine in zip(seen, of_items)]
    )
    top_nXL = jnp.broadcast_to(exponent_nXP.max(axis=-1, keepdims=True), (n, X, NUM_LANES))
    weight_nXP = jnp.exp2(exponent_nXP - repeated(top_nXL, exponent_nXP))
    total_nXL, out_nXD = sums_by_lane(weight_nXP), weighted_values(weight_nXP, v_nPD, scales[1])
    return [(top_nXL[mine], total_nXL[mine], out_nXD[mine]) for mine in of_items]
