"""The prefill kernel: tiles of neighbouring queries, each against its requests' contexts, chunk by chunk.

This module knows nothing of where queries come from and of writing to the cache. Letters beside the package's:
Y tokens, padded to whole tiles, Q queries of a tile, X = G * Q query rows of one kv head, P slots of a chunk, D lanes
of an operand.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention.tpu.fetch import Fetcher, FetchShape
from pallas_kernels.ragged_paged_attention.tpu.lanes import NUM_LANES, Lanes
from pallas_kernels.ragged_paged_attention.tpu.plan import Segments
from pallas_kernels.ragged_paged_attention.tpu.softmax import (
    LOWEST,
    ScoreRule,
    clear_unseen,
    query_key_products,
    weighted_values,
)


@dataclasses.dataclass(frozen=True)
class PrefillShape:
    """Everything static. `fetch` has one item in a step."""

    fetch: FetchShape
    lanes: Lanes
    rule: ScoreRule
    query_tile: int
    groups_at_once: int


def prefill_attention(
    q_KGYD: jax.Array,
    sinks_KGL: jax.Array | None,
    kv_BKSW: jax.Array,
    tables: jax.Array,
    segments: Segments,
    shape: PrefillShape,
    *,
    vmem_limit_bytes: int,
    interpret: Any,
) -> jax.Array:
    """out_KGYD in q's dtype: attention of the queries of all segments, zeros for other tokens."""
    K, G, Y, D = q_KGYD.shape
    heads, Q = shape.fetch.num_heads, shape.query_tile
    per_tile = pl.BlockSpec((heads, G, Q, D), lambda h, j, *_: (h, 0, j, 0))
    per_head = pl.BlockSpec((heads, G, NUM_LANES), lambda h, j, *_: (h, 0, 0))
    whole = pl.BlockSpec(memory_space=pl.ANY)
    sinks = () if sinks_KGL is None else (sinks_KGL,)
    call = pl.pallas_call(
        functools.partial(_kernel, shape, bool(sinks)),
        out_shape=jax.ShapeDtypeStruct(q_KGYD.shape, q_KGYD.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(jax.tree.leaves(segments)),
            grid=(K // heads, Y // Q),
            in_specs=[per_tile, *[per_head for _ in sinks], whole, whole],
            out_specs=per_tile,
            scratch_shapes=[
                shape.fetch.scratch(kv_BKSW.dtype),
                pltpu.VMEM((heads, G * Q, D), jnp.float32),
                pltpu.VMEM((2, heads, G * Q, NUM_LANES), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem_limit_bytes
        ),
        interpret=interpret,
        name="paged_attention_prefill",
    )
    return call(*jax.tree.leaves(segments), q_KGYD, *sinks, tables, kv_BKSW)


def _kernel(shape: PrefillShape, has_sinks: bool, *refs: Any) -> None:
    num = len(dataclasses.fields(Segments))
    segments, q_ref = Segments(*refs[:num]), refs[num]
    sinks_ref = refs[num + 1] if has_sinks else None
    tables_hbm, kv_hbm, out_ref, scratch, acc_ref, top_total_ref = refs[num + 1 + has_sinks :]
    tile = pl.program_id(1)
    head = pl.program_id(0) * shape.fetch.num_heads
    fetcher = Fetcher(shape.fetch, segments, tables_hbm, kv_hbm, head, scratch)
    pl.when(tile == 0)(fetcher.begin)
    state = _State(acc_ref, top_total_ref)
    state.reset(sinks_ref, shape.query_tile)
    fetcher.run_steps(tile, functools.partial(_attend_chunk, shape, fetcher, state, q_ref))
    out_KXD = state.result().astype(out_ref.dtype)
    out_ref[...] = out_KXD.reshape(out_ref.shape)


@dataclasses.dataclass(frozen=True)
class _State:
    """The softmax of every query of a tile, over what was seen so far."""

    acc_ref: Any  # [heads, X, D]
    top_total_ref: Any  # [2, heads, X, lanes], all lanes alike

    def reset(self, sinks_ref: Any, queries: int) -> None:
        """A sink is a weight with no value."""
        _, heads, X, L = self.top_total_ref.shape
        self.acc_ref[...] = jnp.zeros_like(self.acc_ref)
        if sinks_ref is None:
            self.top_total_ref[0] = jnp.full((heads, X, L), LOWEST, jnp.float32)
            self.top_total_ref[1] = jnp.zeros((heads, X, L), jnp.float32)
            return
        for g in range(X // queries):
            sink_K1L = sinks_ref[:, g : g + 1, :]
            self.top_total_ref[0, :, g * queries : (g + 1) * queries] = jnp.broadcast_to(sink_K1L, (heads, queries, L))
        self.top_total_ref[1] = jnp.ones((heads, X, L), jnp.float32)

    def add(self, h: Any, rows: Any, exponent_XP: jax.Array, v_PD: jax.Array) -> None:
        """Add a chunk for some rows of head `h`; exponents of what a query may not see are so low that they vanish."""
        old_top = self.top_total_ref[0, h, rows, :1]
        top = jnp.maximum(old_top, exponent_XP.max(axis=-1, keepdims=True))
        keep = jnp.exp2(old_top - top)
        weight_XP = jnp.exp2(exponent_XP - top)
        total = self.top_total_ref[1, h, rows, :1] * keep + weight_XP.sum(axis=-1, keepdims=True)
        self.acc_ref[h, rows] = self.acc_ref[h, rows] * keep + weighted_values(weight_XP[None], v_PD[None])[0]
        whole = (len(exponent_XP), NUM_LANES)
        self.top_total_ref[0, h, rows] = jnp.broadcast_to(top, whole)
        self.top_total_ref[1, h, rows] = jnp.broadcast_to(total, whole)

    def result(self) -> jax.Array:
        """Zeros for queries that saw nothing."""
        total = self.top_total_ref[1, :, :, :1]
        return self.acc_ref[...] / jnp.where(total == 0, 1, total)


def _attend_chunk(shape: PrefillShape, fetcher: Fetcher, state: _State, q_ref: Any, step: jax.Array) -> None:
    """Every query of the tile that belongs to the item's segment sees what it may of one chunk."""
    item = fetcher.item(step, 0)
    segments, z = fetcher.segments, item.segment
    first_query, end_query, offset = segments.first_query_Z[z], segments.end_query_Z[z], segments.offset_Z[z]
    chunk_ref = fetcher.blocks(step).at[0]
    P, Q, window = shape.fetch.item_slots, shape.query_tile, shape.fetch.window
    everybody = (first_query == 0) & (end_query == Q) & (item.position + P <= offset + 1)
    if window is not None:
        everybody &= item.position > offset + Q - 1 - window

    def attend(mask: Any) -> None:
        rows = shape.groups_at_once * Q

        @pl.loop(0, shape.fetch.num_heads)
        def _(h):
            @pl.loop(0, q_ref.shape[1] // shape.groups_at_once)
            def _(g):
                q_XD = q_ref[h, pl.ds(g * shape.groups_at_once, shape.groups_at_once)].reshape(rows, -1)
                k_PD, v_PD = (
                    chunk_ref[h, :, lanes].astype(q_XD.dtype) for lanes in (shape.lanes.keys, shape.lanes.values)
                )
                exponent_XP = shape.rule.exponents(query_key_products(q_XD[None], k_PD[None])[0])
                state.add(h, pl.ds(pl.multiple_of(g * rows, rows), rows), mask(exponent_XP), v_PD)

    def visible_only(exponent_XP: jax.Array) -> jax.Array:
        query_X1 = lax.broadcasted_iota(jnp.int32, (exponent_XP.shape[0], 1), 0) & (Q - 1)
        position_1P = item.position + lax.broadcasted_iota(jnp.int32, (1, P), 1)
        mine_X1 = (query_X1 >= first_query) & (query_X1 < end_query)
        last_X1 = jnp.where(mine_X1, offset + query_X1, -1)
        visible_XP = position_1P <= last_X1
        if window is not None:
            visible_XP &= position_1P > last_X1 - window
        return jnp.where(visible_XP, exponent_XP, 2 * LOWEST)

    pl.when(everybody)(lambda: attend(lambda exponent_XP: exponent_XP))

    @pl.when(jnp.logical_not(everybody))
    def _():
        clear_unseen(chunk_ref, item)
        attend(visible_only)
