"""Normalised rows in XLA: the definition. Knows nothing of backends."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.rms_norm import How


def cannot_take(x_TD: Any, weight_D: Any) -> str | None:
    """It takes any operands."""
    return None


def rms_norm(x_TD: jax.Array, weight_D: jax.Array, how: How) -> jax.Array:
    """See `rms_norm.rms_norm`."""
    x, weight = (each.astype(jnp.float32) for each in (x_TD, weight_D))
    if how.is_centred:
        x = x - x.mean(-1, keepdims=True)
    unit = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + how.eps)
    if how.is_offset:
        return (unit * (1.0 + weight)).astype(x_TD.dtype)
    return unit.astype(x_TD.dtype) * weight_D
