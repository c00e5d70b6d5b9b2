"""The least logit that may be drawn, by sorting: the definition. Knows nothing of backends."""

from typing import Any

import jax
import jax.numpy as jnp


def cannot_take(logits_SV: Any) -> str | None:
    """It takes any logits."""
    return None


def least_logits(
    logits_SV: jax.Array,
    top_k_S: jax.Array,
    top_p_S: jax.Array,
    min_p_S: jax.Array,
    temperature_S: jax.Array,
    *,
    interpret: Any,
) -> jax.Array:
    """See `top_k_top_p.least_logits`; there is nothing to interpret."""
    num_tokens = logits_SV.shape[1]
    sorted_SV = jnp.sort(logits_SV, axis=1, descending=True)
    kth_S = jnp.take_along_axis(sorted_SV, jnp.clip(top_k_S - 1, 0, num_tokens - 1)[:, None], axis=1)[:, 0]
    cuts_S = (top_k_S > 0) & (top_k_S < num_tokens)
    floor_S = jnp.where(cuts_S, kth_S, -jnp.inf)
    floor_S = jnp.maximum(floor_S, sorted_SV[:, 0] + jnp.log(min_p_S) * temperature_S)
    weight_SV = jnp.exp((sorted_SV - sorted_SV[:, :1]) / temperature_S[:, None])
    weight_SV = jnp.where(sorted_SV >= floor_S[:, None], weight_SV, 0.0)
    above_SV = jnp.cumsum(weight_SV, axis=1) - weight_SV
    stays_SV = above_SV < (top_p_S * jnp.sum(weight_SV, axis=1))[:, None]
    nucleus_S = jnp.min(jnp.where(stays_SV, sorted_SV, jnp.inf), axis=1)
    return jnp.where(top_p_S < 1.0, jnp.maximum(floor_S, nucleus_S), floor_S)
