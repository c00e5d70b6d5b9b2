"""Root-mean-square normalisation (arXiv 1910.07467), in float32 whatever the weights are."""

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Norm:
    """`weight` has the width of the normalised axis."""

    weight: jax.Array


def rms_norm(x: jax.Array, p: Norm, eps: float) -> jax.Array:
    """x / rms(x) * weight over the last axis. Like Llama's, it rounds to the type of `x` before the weight."""
    return normalised(x, eps).astype(x.dtype) * p.weight


def gemma_rms_norm(x: jax.Array, p: Norm, eps: float) -> jax.Array:
    """x / rms(x) * (1 + weight) over the last axis, rounded once at the end: the weights of Gemma are offsets."""
    return (normalised(x, eps) * (1.0 + p.weight.astype(jnp.float32))).astype(x.dtype)


def normalised(x: jax.Array, eps: float) -> jax.Array:
    """Float32 x / sqrt(mean(x^2) + eps)."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
