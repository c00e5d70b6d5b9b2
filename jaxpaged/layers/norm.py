"""Root-mean-square normalisation (arXiv 1910.07467), also of numbers less their mean (1607.06450), in float32 whatever
the weights are."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from jaxpaged.layers.linear import CPU, XLA
from pallas_kernels.rms_norm import How, backends
from pallas_kernels.rms_norm import rms_norm as own_norm


@dataclass(frozen=True)
class NormConfig:
    """How a model normalises. `eps` is added to the mean square.

    `is_offset`: the weight says how far the factor is from 1, as in Gemma, and only the product is rounded.
    `is_centred`: the mean is taken off first.
    `deterministic`: no bit of a result depends on the other rows. `backend`: of `pallas_kernels.rms_norm`, where it
    takes the rows.
    """

    eps: float
    is_offset: bool = False
    is_centred: bool = False
    deterministic: bool = False
    backend: str = XLA


@struct.dataclass
class Norm:
    """`weight` has the width of the normalised axis."""

    weight: jax.Array


@struct.dataclass
class LayerNorm:
    """`weight` and `bias` have the width of the normalised axis; `bias` is None where a model has none."""

    weight: jax.Array
    bias: jax.Array | None = None


def layer_norm(x: jax.Array, p: LayerNorm, eps: float) -> jax.Array:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis, computed in float32 and rounded once (arXiv
    1607.06450)."""
    unit = normalised(x, NormConfig(eps, is_centred=True)) * p.weight.astype(jnp.float32)
    return (unit if p.bias is None else unit + p.bias.astype(jnp.float32)).astype(x.dtype)


def rms_norm(x: jax.Array, p: Norm, config: NormConfig) -> jax.Array:
    """x / rms(x) * weight over the last axis, rounded to the type of `x` before the weight, as Llama's is.

    Where weights are offsets: x / rms(x) * (1 + weight), rounded once at the end.
    """
    x_TD = x.reshape(-1, x.shape[-1])
    if config.backend == CPU and backends(CPU, x_TD, p.weight)[CPU] is None:
        how = How(config.eps, config.is_offset, config.is_centred)
        return own_norm(x_TD, p.weight, how, backend=CPU).reshape(x.shape)
    unit = normalised(x, config)
    if config.is_offset:
        return (unit * (1.0 + p.weight.astype(jnp.float32))).astype(x.dtype)
    return unit.astype(x.dtype) * p.weight


def normalised(x: jax.Array, config: NormConfig) -> jax.Array:
    """Float32 x / sqrt(mean(x^2) + eps), of x less its mean if that is taken off."""
    mean = mean_by_product if config.deterministic else partial(jnp.mean, axis=-1, keepdims=True)
    x = x.astype(jnp.float32)
    if config.is_centred:
        x = x - mean(x)
    return x * jax.lax.rsqrt(mean(x * x) + config.eps)


def mean_by_product(x: jax.Array) -> jax.Array:
    """The mean over the last axis as a product with ones.

    XLA orders a reduction as suits the shape around it; an entry of a product of two or more rows and columns depends
    on its own row and column only.
    """
    ones = jnp.ones((2, x.shape[-1]), x.dtype)
    sums = jnp.einsum("ti,oi->to", x.reshape(-1, x.shape[-1]), ones, precision=jax.lax.Precision.HIGHEST)
    return sums[:, 0].reshape(*x.shape[:-1], 1) / x.shape[-1]
