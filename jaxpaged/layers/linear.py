"""A product with a weight, by letters, and an optional bias. Knows neither heads nor models."""

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Linear:
    """`weight` is [out..., in...], as checkpoints store it; `bias` is [out...] or None."""

    weight: jax.Array
    bias: jax.Array | None = None


def apply_linear(letters: str, x: jax.Array, p: Linear) -> jax.Array:
    """`einsum(letters, x, weight) + bias` in the type of `x`.

    The weight is contracted over its last axes: XLA:CPU runs that layout at the speed of memory, and the
    transposed one 2-4x slower. bfloat16 products return bfloat16 (faster than float32 out, and accumulated in
    float32 either way); float32 products use float32 throughout, on accelerators too.
    """
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    out = jnp.einsum(letters, x, p.weight, preferred_element_type=x.dtype, precision=precision)
    return out if p.bias is None else out + p.bias
