"""A short causal convolution of every channel by itself (LFM2), over the tokens of a step and those before them.

Its state is its inputs of the last few tokens. In a row these lie in a ring: position p at p modulo its length,
which leaves room for tokens that are taken back. Channels are split over all devices. This module knows neither models
nor requests.

Letters: J inputs before a token that it sees, C entries of a ring, P places behind which snapshots may be taken.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from jaxpaged.layers.dense_attention import DenseBatch, positions_in
from jaxpaged.layers.ranks import over_model_axes
from jaxpaged.layers.recurrence import chosen
from jaxpaged.layers.state import StateBatch, StateMetadata, StateTensor
from jaxpaged.params.sharding import MODEL_AXES


@struct.dataclass
class Filter:
    """`weight` [channels, J + 1], that of the token itself last; `bias` [channels] or None."""

    weight: jax.Array
    bias: jax.Array | None = None


def short_convolution(
    x_TD: jax.Array, p: Filter, state: StateTensor, batch: StateBatch | DenseBatch, deterministic: bool = False
) -> tuple[jax.Array, StateTensor]:
    """([T, D] in the type of `x_TD`, the state behind these tokens): y of a token is the sum of its x and those of the
    J tokens before it, each times a weight, in float32. Before a request's first token there are zeros. Whole texts
    have no state and leave none."""
    if isinstance(batch, DenseBatch):
        return weighed_sum([x_TD, *earlier_of_texts(x_TD, batch, p.weight.shape[1] - 1)], p, deterministic), state
    by_channel, last = PartitionSpec(None, MODEL_AXES), PartitionSpec(None, None, MODEL_AXES)
    (ring,), (blocks,) = state.rows, state.blocks
    convolve = chosen(batch.context, "short_conv", partial(on_device, deterministic=deterministic))

    def of_filter(x_TD, p, ring, blocks, metadata):
        return convolve(x_TD, p.weight, p.bias, ring, blocks, metadata)

    in_specs = (by_channel, PartitionSpec(MODEL_AXES), last, last, PartitionSpec())
    sharded = over_model_axes(batch.context.mesh, of_filter, in_specs, (by_channel, last, last))
    y_TD, ring, blocks = sharded(x_TD, p, ring, blocks, batch.metadata)
    return y_TD, StateTensor([ring], [blocks])


def on_device(
    x_TD: jax.Array,
    weight_DJ: jax.Array,
    bias_D: jax.Array | None,
    ring: jax.Array,
    blocks: jax.Array,
    metadata: StateMetadata,
    deterministic: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(y_TD, ring, blocks) of the channels of one device; see `RecurrenceBackend.short_conv`."""
    before_RJD = inputs_before(ring, blocks, metadata)
    seen = [x_TD, *earlier_inputs(x_TD, before_RJD, metadata)]
    y_TD = weighed_sum(seen, Filter(weight_DJ, bias_D), deterministic)
    ring = ring.at[metadata.row_R].set(ring_behind(x_TD, before_RJD, metadata, ring.shape[1]), mode="drop")
    newest_PJD = jnp.stack([each[metadata.border_P] for each in seen[-2::-1]], axis=1)
    return y_TD, ring, blocks.at[metadata.block_P].set(newest_PJD, mode="drop")


def inputs_before(ring: jax.Array, blocks: jax.Array, metadata: StateMetadata) -> jax.Array:
    """[R, J, D]: what each request's last tokens before the step gave, the oldest first."""
    num_seen, length = blocks.shape[1], ring.shape[1]
    position_RJ = metadata.num_before_R[:, None] - num_seen + jnp.arange(num_seen)
    row_R1 = jnp.minimum(metadata.row_R, len(ring) - 1)[:, None]
    own_RJD, snapshot_RJD = ring[row_R1, position_RJ % length], blocks[metadata.snapshot_R]
    found_RJD = jnp.where(metadata.snapshot_R[:, None, None] > 0, snapshot_RJD, own_RJD)
    return jnp.where(position_RJ[:, :, None] >= 0, found_RJD, 0)


def earlier_inputs(x_TD: jax.Array, before_RJD: jax.Array, metadata: StateMetadata) -> list[jax.Array]:
    """For each distance from 1 to J the input [T, D] so far before each token: of this step, or before it."""
    num_seen = before_RJD.shape[1]
    flat = before_RJD.reshape(-1, before_RJD.shape[2])
    result = []
    for distance in range(1, num_seen + 1):
        place_T = jnp.clip(num_seen - distance + metadata.nth_T, 0, num_seen - 1)
        before_TD = flat[metadata.seq_T * num_seen + place_T]
        result.append(jnp.where(metadata.nth_T[:, None] >= distance, shifted(x_TD, distance), before_TD))
    return result


def earlier_of_texts(x_TD: jax.Array, batch: DenseBatch, num_seen: int) -> list[jax.Array]:
    """The same within texts."""
    nth_T1 = positions_in(batch.segments_RC).reshape(-1, 1)
    return [jnp.where(nth_T1 >= distance, shifted(x_TD, distance), 0) for distance in range(1, num_seen + 1)]


def shifted(x_TD: jax.Array, distance: int) -> jax.Array:
    """Of each token what was so far before it in the step, and zeros."""
    return jnp.pad(x_TD, ((distance, 0), (0, 0)))[: len(x_TD)]


def weighed_sum(seen: list[jax.Array], p: Filter, deterministic: bool) -> jax.Array:
    """The sum of inputs, the newest first, times their weights. If `deterministic`, no product may go unrounded into a
    multiply-add, which programs around it decide."""
    products: Any = [x_TD.astype(jnp.float32) * p.weight[:, -1 - j] for j, x_TD in enumerate(seen)]
    if deterministic:
        products = jax.lax.optimization_barrier(products)
    y_TD = sum(products[1:], products[0])
    return (y_TD if p.bias is None else y_TD + p.bias).astype(seen[0].dtype)


def ring_behind(x_TD: jax.Array, before_RJD: jax.Array, metadata: StateMetadata, length: int) -> jax.Array:
    """[R, C, D]: the rings behind the step, of requests that have tokens in it. What lies further back than J tokens
    before it is never asked for again, since a step takes back fewer tokens than it computes."""
    num_seen = before_RJD.shape[1]
    begin_R1 = metadata.num_before_R[:, None]
    first_R1 = metadata.query_start_loc_R1[:-1, None]
    newest_R1 = begin_R1 + metadata.query_start_loc_R1[1:, None] - first_R1 - 1
    position_RC = newest_R1 - (newest_R1 - jnp.arange(length)) % length
    nth_RC = position_RC - begin_R1
    new_RCD = x_TD[jnp.clip(first_R1 + nth_RC, 0, len(x_TD) - 1)]
    place_RC = jnp.clip(nth_RC + num_seen, 0, num_seen - 1)
    old_RCD = jnp.take_along_axis(before_RJD, place_RC[:, :, None], axis=1)
    old_RCD = jnp.where(nth_RC[:, :, None] >= -num_seen, old_RCD, 0)
    return jnp.where(nth_RC[:, :, None] >= 0, new_RCD, old_RCD)
