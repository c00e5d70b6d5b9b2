"""The decode kernel: one new query per request, several pieces of any requests' contexts at a time.

This module knows nothing of where queries come from and of writing to the cache. Letters beside the package's:
Z requests that decode, X query rows of one kv head (its G query heads, padded to sublanes), P slots of an item, D lanes
of an operand, n items times heads.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention.tpu.fetch import Fetcher, FetchShape
from pallas_kernels.ragged_paged_attention.tpu.lanes import NUM_LANES, Lanes
from pallas_kernels.ragged_paged_attention.tpu.operands import UNCHECKED, Begun, Operands
from pallas_kernels.ragged_paged_attention.tpu.softmax import (
    LOWEST,
    ScoreRule,
    clear_unseen,
    in_one_row,
    query_key_products,
    visible_slots,
    weighted_values,
)


@dataclasses.dataclass(frozen=True)
class DecodeShape:
    """Everything static."""

    fetch: FetchShape
    lanes: Lanes
    rule: ScoreRule
    rows_per_block: int


def decode_attention(operands: Operands, shape: DecodeShape, *, vmem_limit_bytes: int, interpret: Any) -> jax.Array:
    """out_ZKXD in q's dtype: attention of each segment's query, q_ZKXD, over its piece of context, from the cache, and
    over what was begun."""
    Z, K, X, D = operands.q.shape
    rows, heads = shape.rows_per_block, shape.fetch.num_heads
    block, place = (rows, heads, X, D), lambda h, j, *_: (j, h, 0, 0)
    leaves, treedef = jax.tree.flatten(operands)
    call = pl.pallas_call(
        functools.partial(_kernel, shape, treedef),
        out_shape=jax.ShapeDtypeStruct(operands.q.shape, operands.q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=operands.num_scalars,
            grid=(K // heads, Z // rows),
            in_specs=operands.specs(block, place, heads),
            out_specs=pl.BlockSpec(block, place),
            scratch_shapes=[
                shape.fetch.scratch(operands.kv_BKSW.dtype),
                pltpu.VMEM((heads, X, D), jnp.float32),
                pltpu.VMEM((2, heads, X, NUM_LANES), jnp.float32),
                _Parts.scratch(shape, X, operands.q.dtype),
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
    out_ref, scratch, acc_ref, state_ref, parts = refs[treedef.num_leaves :]
    grid_block = pl.program_id(1)
    fetcher = Fetcher(shape.fetch, operands, pl.program_id(0) * shape.fetch.num_heads, scratch)
    state = _State(acc_ref, state_ref, operands.sinks)
    pl.when(grid_block == 0)(fetcher.begin)
    fetcher.run_steps(grid_block, functools.partial(_attend_items, shape, fetcher, state, parts, out_ref))


@dataclasses.dataclass(frozen=True)
class _State:
    """The softmax of the segment at hand, over what was seen of it so far."""

    acc_ref: Any  # [heads, X, D]
    top_total_ref: Any  # [2, heads, X, lanes], all lanes alike
    sinks_ref: Any  # [heads, X, lanes] or None

    def reset(self) -> None:
        """A sink is a weight with no value."""
        self.acc_ref[...] = jnp.zeros_like(self.acc_ref)
        if self.sinks_ref is None:
            self.top_total_ref[0] = jnp.full(self.top_total_ref.shape[1:], LOWEST, jnp.float32)
            self.top_total_ref[1] = jnp.zeros(self.top_total_ref.shape[1:], jnp.float32)
        else:
            self.top_total_ref[0] = self.sinks_ref[...]
            self.top_total_ref[1] = jnp.ones(self.top_total_ref.shape[1:], jnp.float32)

    def begin(self, begun: Begun, i: jax.Array) -> None:
        """Go on from what shared spans have left of query `i` of the grid block; sinks are in there."""
        self.acc_ref[...] = begun.out[i]
        self.top_total_ref[0] = begun.top[i]
        self.top_total_ref[1] = jnp.ones(self.top_total_ref.shape[1:], jnp.float32)

    def merge(self, top: jax.Array, total: jax.Array, out: jax.Array) -> None:
        """Add a part: top, total [heads, X, 1], out [heads, X, D]."""
        old_top, old_total = self.top_total_ref[0, :, :, :1], self.top_total_ref[1, :, :, :1]
        new_top = jnp.maximum(old_top, top)
        keep, add = jnp.exp2(old_top - new_top), jnp.exp2(top - new_top)
        self.acc_ref[...] = self.acc_ref[...] * keep + out * add
        whole = self.top_total_ref.shape[1:]
        self.top_total_ref[0] = jnp.broadcast_to(new_top, whole)
        self.top_total_ref[1] = jnp.broadcast_to(old_total * keep + total * add, whole)

    def result(self) -> jax.Array:
        return self.acc_ref[...] / self.top_total_ref[1, :, :, :1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Parts:
    """Operands and results of all items of one step, so that what is done per item is a loop and the rest is not."""

    q_ref: Any  # [items, heads, X, D]
    visible_ref: Any  # [items, 1, P], 1 or 0
    top_total_ref: Any  # [2, items, heads, X, lanes]
    out_ref: Any  # [items, heads, X, D]

    @staticmethod
    def scratch(shape: DecodeShape, X: int, q_dtype: Any) -> "_Parts":
        I, heads, D = shape.fetch.num_items, shape.fetch.num_heads, shape.lanes.operand
        return _Parts(
            q_ref=pltpu.VMEM((I, heads, X, D), q_dtype),
            visible_ref=pltpu.VMEM((I, 1, shape.fetch.item_slots), jnp.int32),
            top_total_ref=pltpu.VMEM((2, I, heads, X, NUM_LANES), jnp.float32),
            out_ref=pltpu.VMEM((I, heads, X, D), jnp.float32),
        )


def _attend_items(
    shape: DecodeShape, fetcher: Fetcher, state: _State, parts: _Parts, out_ref: Any, step: jax.Array
) -> None:
    """Attend to all items of a step at once, then add each to its segment, which may end there."""
    first_segment = pl.program_id(1) * shape.rows_per_block
    blocks_ref, scales_ref = fetcher.blocks(step), fetcher.token_scales(step)

    @pl.loop(0, shape.fetch.num_items)
    def _(i):
        item = fetcher.item(step, i)
        parts.q_ref[i] = fetcher.operands.q[jnp.maximum(item.segment - first_segment, 0)]
        parts.visible_ref[i] = visible_slots(item, (1, shape.fetch.item_slots), 1).astype(jnp.int32)
        clear_unseen(blocks_ref.at[i], None if scales_ref is None else scales_ref.at[i], item)

    _attend_parts(shape, blocks_ref, _scales(shape, fetcher, step), parts)

    @pl.loop(0, shape.fetch.num_items)
    def _(i):
        item = fetcher.item(step, i)
        begun, is_first = fetcher.operands.begun, item.in_use & item.is_first
        pl.when(is_first)(state.reset)
        if begun is not None:
            is_begun = is_first & (fetcher.segments.begun_Z[item.segment] > 0)
            pl.when(is_begun)(lambda: state.begin(begun, item.segment - first_segment))

        @pl.when(item.in_use)
        def _():
            state.merge(parts.top_total_ref[0, i, :, :, :1], parts.top_total_ref[1, i, :, :, :1], parts.out_ref[i])

        @pl.when(item.in_use & item.is_last)
        def _():
            out_ref[item.segment - first_segment] = state.result().astype(out_ref.dtype)


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


def _attend_parts(shape: DecodeShape, blocks_ref: Any, scales: tuple[Any, Any], parts: _Parts) -> None:
    """Softmax and weighted values of every item and head by itself."""
    I, heads, X, D = parts.q_ref.shape
    n, P = I * heads, shape.fetch.item_slots
    q_nXD = parts.q_ref[...].reshape(n, X, D)
    k_nPD, v_nPD = (
        blocks_ref[..., lanes].reshape(n, P, D).astype(q_nXD.dtype) for lanes in (shape.lanes.keys, shape.lanes.values)
    )
    exponent_nXP = shape.rule.exponents(query_key_products(q_nXD, k_nPD, scales[0]))
    visible_nXP = jnp.broadcast_to(parts.visible_ref[...][:, None], (I, heads, X, P)).reshape(n, X, P)
    exponent_nXP = jnp.where(visible_nXP != 0, exponent_nXP, LOWEST)
    top_nX1 = exponent_nXP.max(axis=-1, keepdims=True)
    weight_nXP = jnp.exp2(exponent_nXP - top_nX1)
    total_nX1 = weight_nXP.sum(axis=-1, keepdims=True)
    parts.out_ref[...] = weighted_values(weight_nXP, v_nPD, scales[1]).reshape(I, heads, X, D)
    for place, x_nX1 in enumerate((top_nX1, total_nX1)):
        parts.top_total_ref[place] = jnp.broadcast_to(x_nX1, (n, X, NUM_LANES)).reshape(I, heads, X, NUM_LANES)
