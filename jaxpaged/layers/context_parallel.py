"""Attention where a group of devices holds the tokens of each context, a part each (decode context parallelism).

The devices of a group have the same key-value head, or the same latents. Each writes those of the new tokens that are
its own, and lets the query heads of the whole group attend to what it holds. The parts are merged by their log-sum-exp:
every device gets back the sums of its own heads. So a step exchanges queries and results, whatever the length of a
context. Knows neither kernels nor how a cache lies.

Letters: P a head's weighted values, sum of weights and highest score, one after the other.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged.params.sharding import CONTEXT_AXIS
from pallas_kernels.context_share import ContextShare
from pallas_kernels.ragged_paged_attention.numerics import unpacked


def share_here(count: int, slots: int) -> ContextShare | None:
    """What this device, one of `count` that have `slots` of each block, holds of a context; None: all."""
    return ContextShare(jax.lax.axis_index(CONTEXT_AXIS), count, slots) if count > 1 else None


def heads_of_group(x_TNH: jax.Array) -> jax.Array:
    """The query heads of all devices of the group."""
    return jax.lax.all_gather(x_TNH, CONTEXT_AXIS, axis=1, tiled=True)


def merged(part_TNP: jax.Array, sinks_N: jax.Array | None, dtype: Any) -> jax.Array:
    """Attention of this device's heads to whole contexts, from what the devices of the group have of all heads; zeros
    where nothing is seen. `sinks_N`: those of this device's heads."""
    part_TN = unpacked(part_TNP)
    top_TN = jax.lax.pmax(part_TN.top, CONTEXT_AXIS)
    # Fused with what made it, a top may be rounded otherwise than the largest one: by 1e22 where nothing is seen.
    weight_TN = jnp.exp(jnp.minimum(part_TN.top - top_TN, 0))
    sums_TNP = jnp.concatenate([part_TN.out, part_TN.total[..., None]], axis=-1) * weight_TN[..., None]
    sums_TNP = jax.lax.psum_scatter(sums_TNP, CONTEXT_AXIS, scatter_dimension=1, tiled=True)
    total_TN = sums_TNP[..., -1]
    if sinks_N is not None:
        num_heads = total_TN.shape[1]
        first = jax.lax.axis_index(CONTEXT_AXIS) * num_heads
        own_TN = jax.lax.dynamic_slice_in_dim(top_TN, first, num_heads, axis=1)
        highest_TN = jnp.maximum(own_TN, sinks_N)
        fade_TN = jnp.exp(own_TN - highest_TN)
        sums_TNP, total_TN = sums_TNP * fade_TN[..., None], total_TN * fade_TN + jnp.exp(sinks_N - highest_TN)
    return (sums_TNP[..., :-1] / jnp.where(total_TN == 0, 1, total_TN)[..., None]).astype(dtype)
