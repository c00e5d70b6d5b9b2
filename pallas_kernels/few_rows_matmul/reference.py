"""Products of few rows in XLA: the definition.

Numerics: products of bfloat16 are exact in float32, and summed there; sums of int8 are exact; whole numbers of 16 bits
become float32.

Knows nothing of backends.
"""

from typing import Any

import jax
import jax.numpy as jnp


def cannot_take(x_TD: Any, weight_FD: Any) -> str | None:
    """It takes any operands."""
    return None


def few_rows_matmul(x_TD: jax.Array, weight_FD: jax.Array, dtype: str) -> jax.Array:
    """See `few_rows_matmul.few_rows_matmul`."""
    if x_TD.dtype == jnp.int16:
        x_TD, weight_FD = x_TD.astype(jnp.float32), weight_FD.astype(jnp.float32)
        return jnp.einsum("TD,FD->TF", x_TD, weight_FD, precision=jax.lax.Precision.HIGHEST)
    return jnp.einsum("TD,FD->TF", x_TD, weight_FD, preferred_element_type=dtype)
