"""A product with a weight, by letters, and an optional bias. Knows neither heads nor models."""

import math

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Linear:
    """`weight` is [out..., in...], as checkpoints store it; `bias` is [out...] or None."""

    weight: jax.Array
    bias: jax.Array | None = None


def apply_linear(letters: str, x: jax.Array, p: Linear) -> jax.Array:
    """`einsum(letters, x, weight) + bias` in the type of `x`; `letters` is like "TD,NHD->TNH" or "TNH,DNH->TD".

    The weight is contracted over its last axes: XLA:CPU runs that layout at the speed of memory, the transposed one
    2-4x slower. It is computed as a product of two matrices, since with three axes XLA:CPU falls back to a loop
    (8x slower at 2 tokens, 1.5x at 512); merging neighbouring axes costs nothing. bfloat16 products return
    bfloat16 and are accumulated in float32; float32 products use float32 throughout, on accelerators too.
    """
    x_letters, weight_letters, out_letters = letters.replace("->", ",").split(",")
    inputs = x_letters[1:]
    assert weight_letters == out_letters[1:] + inputs, f"{letters}: a weight is spelled outputs first, then inputs"
    out_shape = p.weight.shape[: -len(inputs)]
    num_tokens, num_in = x.shape[0], math.prod(x.shape[1:])
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    out = jnp.einsum(
        "ti,oi->to",
        x.reshape(num_tokens, num_in),
        p.weight.reshape(math.prod(out_shape), num_in),
        preferred_element_type=x.dtype,
        precision=precision,
    ).reshape(num_tokens, *out_shape)
    return out if p.bias is None else out + p.bias
