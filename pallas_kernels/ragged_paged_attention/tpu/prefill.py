"""The prefill kernel: tiles of neighbouring queries, each against its requests' contexts, chunk by chunk.

This module knows nothing of where queries come from and of writing to the cache. Letters beside the package's:
Y tokens, padded to whole tiles, Q queries of a tile, X = G * Q query rows of one kv head, P slots of a chunk, D lanes
of an operand.
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
from pallas_kernels.ragged_paged_attention.tpu.operands import UNCHECKED, Begun, Operands
from pallas_kernels.ragged_paged_attention.tpu.softmax import (
    LOWEST,
    ScoreRule,
    clear_unseen,
    in_one_row,
    query_key_products,
)
from pallas_kernels.ragged_paged_attention.tpu.tile_state import TileState

NEVER = 2**30  # a position that no query sees


@dataclasses.dataclass(frozen=True)
class PrefillShape:
    """Everything static. `fetch` has one item in a step. The query heads of `groups_at_once` are multiplied with keys
    at once, and `part_rows` of their rows with values."""

    fetch: FetchShape
    lanes: Lanes
    rule: ScoreRule
    window: int | None
    query_tile: int
    groups_at_once: int
    part_rows: int


def prefill_attention(operands: Operands, shape: PrefillShape, *, vmem_limit_bytes: int, interpret: Any) -> jax.Array:
    """out_KGYD in q's dtype: attention of the queries of all segments, q_KGYD, zeros for other tokens."""
    out = jax.ShapeDtypeStruct(operands.q.shape, operands.q.dtype)
    return _call(operands, shape, out, "paged_attention_prefill", vmem_limit_bytes, interpret)


def spans_attention(operands: Operands, shape: PrefillShape, *, vmem_limit_bytes: int, interpret: Any) -> Begun:
    """The same, unfinished: what other kernels begin with."""
    K, G, Y, D = operands.q.shape
    begun = Begun(*(jax.ShapeDtypeStruct((K, G, Y, lanes), jnp.float32) for lanes in (D, NUM_LANES)))
    return _call(operands, shape, begun, "paged_attention_spans", vmem_limit_bytes, interpret)


def _call(
    operands: Operands, shape: PrefillShape, outputs: Any, name: str, vmem_limit_bytes: int, interpret: Any
) -> Any:
    K, G, Y, D = operands.q.shape
    heads, Q = shape.fetch.num_heads, shape.query_tile
    block, place = (heads, G, Q, D), lambda h, j, *_: (h, 0, j, 0)
    leaves, treedef = jax.tree.flatten(operands)
    call = pl.pallas_call(
        functools.partial(_kernel, shape, treedef),
        out_shape=outputs,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=operands.num_scalars,
            grid=(K // heads, Y // Q),
            in_specs=operands.specs(block, place, heads),
            out_specs=jax.tree.map(lambda x: pl.BlockSpec((*block[:-1], x.shape[-1]), place), outputs),
            scratch_shapes=[
                shape.fetch.scratch(operands.kv_BKSW.dtype),
                pltpu.VMEM((heads, G * Q, D), jnp.float32),
                pltpu.VMEM((2, heads, G * Q, NUM_LANES), jnp.float32),
                pltpu.VMEM((shape.groups_at_once * Q, shape.fetch.item_slots), jnp.float32),
                pltpu.VMEM((shape.groups_at_once * Q, NUM_LANES), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem_limit_bytes, **UNCHECKED
        ),
        interpret=interpret,
        name=name,
    )
    return call(*leaves)


def _kernel(shape: PrefillShape, treedef: Any, *refs: Any) -> None:
    operands = jax.tree.unflatten(treedef, refs[: treedef.num_leaves])
    outputs, scratch, *state_refs = refs[treedef.num_leaves :]
    tile = pl.program_id(1)
    fetcher = Fetcher(shape.fetch, operands, pl.program_id(0) * shape.fetch.num_heads, scratch)
    pl.when(tile == 0)(fetcher.begin)
    state = TileState(*state_refs)
    state.reset(operands.sinks, shape.query_tile)
    if operands.begun is not None:
        pl.when(operands.segments.begun_J[tile] > 0)(lambda: state.begin(operands.begun))
    fetcher.run_steps(tile, functools.partial(_attend_chunk, shape, fetcher, state))
    for out_ref, x in zip(jax.tree.leaves(outputs), state.result()):
        out_ref[...] = x.astype(out_ref.dtype).reshape(out_ref.shape)


def _attend_chunk(
    shape: PrefillShape, fetcher: Fetcher, state: TileState, step: jax.Array, meanwhile: Callable
) -> None:
    """Every query of the tile that belongs to the item's segment sees what it may of one chunk."""
    meanwhile()
    item = fetcher.item(step, 0)
    view = _View.of(shape, fetcher.operands, item)
    chunk_ref, scales_ref = fetcher.blocks(step).at[0], fetcher.token_scales(step)
    if scales_ref is not None:
        scales_ref = scales_ref.at[0]

    def attend(mask: Any) -> None:
        rows = shape.groups_at_once * shape.query_tile
        q_ref = fetcher.operands.q

        @pl.loop(0, shape.fetch.num_heads)
        def _(h):
            @pl.loop(0, q_ref.shape[1] // shape.groups_at_once)
            def _(g):
                q_XD = q_ref[h, pl.ds(g * shape.groups_at_once, shape.groups_at_once)].reshape(rows, -1)
                k_PD, v_PD = (
                    chunk_ref[h, :, lanes].astype(q_XD.dtype) for lanes in (shape.lanes.keys, shape.lanes.values)
                )
                k_scale, v_scale = _scales(scales_ref, fetcher.operands.head_scales_K2L, h, shape.fetch.block_size)
                product_XP = query_key_products(q_XD[None], k_PD[None], k_scale)[0]
                state.put(mask(shape.rule.exponents(product_XP)))
                for start in range(0, rows, shape.part_rows):
                    own = pl.ds(pl.multiple_of(g * rows, rows) + start, shape.part_rows)
                    state.add(h, own, pl.ds(start, shape.part_rows), v_PD, v_scale)

    pl.when(view.is_everything)(lambda: attend(lambda exponent_XP: exponent_XP))

    @pl.when(jnp.logical_not(view.is_everything))
    def _():
        clear_unseen(chunk_ref, scales_ref, item)
        attend(view.hide)


def _scales(token_scales_ref: Any, head_scales_ref: Any, h: Any, block_size: int) -> tuple[Any, Any]:
    """Scales of keys and of values of head `h`, to multiply with [1, X, P], or None."""
    if token_scales_ref is not None:
        return in_one_row(token_scales_ref[:, pl.ds(h, 1)], block_size)
    if head_scales_ref is not None:
        scales_12L = head_scales_ref[pl.ds(h, 1)]
        return scales_12L[:, :1, :1], scales_12L[:, 1:, :1]
    return None, None


@dataclasses.dataclass(frozen=True)
class _View:
    """Which queries of a tile, [first_query, end_query), see which slots of a chunk. `least`, `last`: the least and the
    greatest of their positions, which follow each other unless `position_QL` has them. A query sees what stands before
    it and itself, or up to what `end_QL` has."""

    item: Item
    first_query: jax.Array
    end_query: jax.Array
    least: jax.Array
    last: jax.Array
    position_QL: Any
    end_QL: Any
    num_queries: int
    num_slots: int
    window: int | None

    @staticmethod
    def of(shape: PrefillShape, operands: Operands, item: Item) -> "_View":
        z, segments = item.segment, operands.segments
        return _View(
            item,
            segments.first_query_Z[z],
            segments.end_query_Z[z],
            segments.least_Z[z],
            segments.last_Z[z],
            operands.position_YL,
            operands.end_YL,
            shape.query_tile,
            shape.fetch.item_slots,
            shape.window,
        )

    @property
    def is_everything(self) -> jax.Array:
        """Whether all queries of the tile see all slots of the chunk."""
        all_queries = (self.first_query == 0) & (self.end_query == self.num_queries)
        position = self.item.position
        all_slots = (position >= self.item.first) & (position + self.num_slots <= self.item.end)
        all_slots &= position + self.num_slots <= self.least + 1
        if self.window is not None:
            all_slots &= position > self.last - self.window
        return all_queries & all_slots

    def hide(self, exponent_XP: jax.Array) -> jax.Array:
        """Replace what a query does not see. Rows are (query head, query), and queries a power of two."""
        query_X1 = lax.broadcasted_iota(jnp.int32, (len(exponent_XP), 1), 0) & (self.num_queries - 1)
        position_1P = self.item.position + lax.broadcasted_iota(jnp.int32, (1, self.num_slots), 1)
        position_1P = jnp.where((position_1P >= self.item.first) & (position_1P < self.item.end), position_1P, NEVER)
        mine_X1 = (query_X1 >= self.first_query) & (query_X1 < self.end_query)
        own_X1 = jnp.where(mine_X1, self._positions(query_X1), -1)
        visible_XP = position_1P <= own_X1
        if self.end_QL is not None:
            visible_XP = position_1P < jnp.where(mine_X1, self._of_rows(self.end_QL, query_X1), 0)
        if self.window is not None:
            visible_XP &= position_1P > own_X1 - self.window
        return jnp.where(visible_XP, exponent_XP, 2 * LOWEST)

    def _positions(self, query_X1: jax.Array) -> jax.Array:
        if self.position_QL is None:
            return self.least - self.first_query + query_X1
        return self._of_rows(self.position_QL, query_X1)

    def _of_rows(self, x_QL: Any, query_X1: jax.Array) -> jax.Array:
        return jnp.concatenate([x_QL[:, :1]] * (len(query_X1) // self.num_queries))
