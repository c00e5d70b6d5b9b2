"""Products with weights in 4 bits in XLA: the definition.

Numerics: weights are rounded to x's type, products summed in float32.

Knows nothing of backends.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import int4_matmul as op


def cannot_take(x_TD: Any, packed_FB: Any, scale_FC: Any) -> str | None:
    """It takes any operands."""
    return None


def int4_matmul(x_TD: jax.Array, packed_FB: jax.Array, scale_FC: jax.Array) -> jax.Array:
    """See `int4_matmul.int4_matmul`."""
    return product(x_TD, op.unpack(packed_FB, scale_FC).astype(x_TD.dtype))


def product(x_TD: jax.Array, weight_FD: jax.Array) -> jax.Array:
    """Float32 [T, F]."""
    precision = jax.lax.Precision.HIGHEST if x_TD.dtype == jnp.float32 else None
    return jnp.einsum("TD,FD->TF", x_TD, weight_FD, preferred_element_type=jnp.float32, precision=precision)
