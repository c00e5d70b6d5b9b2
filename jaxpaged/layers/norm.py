"""Root-mean-square normalisation (arXiv 1910.07467), in float32 whatever the weights are."""

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Norm:
    """`weight` has the width of the normalised axis."""

    weight: jax.Array


def rms_norm(x: jax.Array, p: Norm, eps: float, deterministic: bool = False) -> jax.Array:
    """x / rms(x) * weight over the last axis. Like Llama's, it rounds to the type of `x` before the weight."""
    return normalised(x, eps, deterministic).astype(x.dtype) * p.weight


def gemma_rms_norm(x: jax.Array, p: Norm, eps: float, deterministic: bool = False) -> jax.Array:
    """x / rms(x) * (1 + weight) over the last axis, rounded once at the end: the weights of Gemma are offsets."""
    return (normalised(x, eps, deterministic) * (1.0 + p.weight.astype(jnp.float32))).astype(x.dtype)


def normalised(x: jax.Array, eps: float, deterministic: bool) -> jax.Array:
    """Float32 x / sqrt(mean(x^2) + eps); `deterministic`: no bit of it depends on the other rows."""
    x = x.astype(jnp.float32)
    mean = mean_by_product(x * x) if deterministic else jnp.mean(x * x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean + eps)


def mean_by_product(x: jax.Array) -> jax.Array:
    """The mean over the last axis as a product with ones.

    XLA orders a reduction as suits the shape around it; an entry of a product of two or more rows and columns depends
    on its own row and column only.
    """
    ones = jnp.ones((2, x.shape[-1]), x.dtype)
    sums = jnp.einsum("ti,oi->to", x.reshape(-1, x.shape[-1]), ones, precision=jax.lax.Precision.HIGHEST)
    return sums[:, 0].reshape(*x.shape[:-1], 1) / x.shape[-1]
