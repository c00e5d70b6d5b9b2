"""Products with quantised weights in XLA: the definition, and the best there is for one scale per output channel.

Numerics: values are exact in every float type that x may have, so weights per channel are multiplied unscaled and
the sum is scaled, in float32. Group-wise weights are dequantised in float32 and rounded to x's type. Knows nothing
of backends.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import quantized_matmul as op


def cannot_take(x_TD: Any, weight: Any) -> str | None:
    """It takes any operands."""
    return None


def quantized_matmul(x_TD: jax.Array, weight: Any, *, activations: Any, interpret: Any) -> jax.Array:
    """See `quantized_matmul.quantized_matmul`; there is nothing to interpret."""
    values_FD, scale_CF = weight.values_FD, weight.scale_CF.astype(jnp.float32)
    if activations is not None:
        values_TD, scale_T = op.quantize_last_axis(x_TD, activations)
        sum_type = jnp.int32 if jnp.issubdtype(activations, jnp.integer) else jnp.float32
        out_TF = _times_transposed(values_TD, values_FD, sum_type).astype(jnp.float32)
        return (out_TF * scale_T[:, None] * scale_CF).astype(x_TD.dtype)
    if scale_CF.shape[0] == 1 and weight.zero_CF is None:
        out_TF = _times_transposed(x_TD, values_FD.astype(x_TD.dtype), jnp.float32) * scale_CF
    else:
        out_TF = _times_transposed(x_TD, dequantize(weight).astype(x_TD.dtype), jnp.float32)
    return out_TF.astype(x_TD.dtype)


def dequantize(weight: Any) -> jax.Array:
    """The weight [F, D] in float32."""
    (F, D), C = weight.values_FD.shape, weight.scale_CF.shape[0]
    values_FC = weight.values_FD.astype(jnp.float32).reshape(F, C, D // C)
    if weight.zero_CF is not None:
        values_FC = values_FC - weight.zero_CF.T[:, :, None]
    return (values_FC * weight.scale_CF.astype(jnp.float32).T[:, :, None]).reshape(F, D)


def _times_transposed(x_TD: jax.Array, y_FD: jax.Array, sum_type: Any) -> jax.Array:
    precision = lax.Precision.HIGHEST if x_TD.dtype == jnp.float32 else None
    over_inputs = (((1,), (1,)), ((), ()))
    return lax.dot_general(x_TD, y_FD, over_inputs, precision=precision, preferred_element_type=sum_type)
