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
from pallas_kernels.int4_matmul import ZERO, unpack_values


def cannot_take(x_TD: Any, weight: Any) -> str | None:
    """It takes any operands."""
    return None


def quantized_matmul(x_TD: jax.Array, weight: Any, *, activations: Any, interpret: Any) -> jax.Array:
    """See `quantized_matmul.quantized_matmul`; there is nothing to interpret."""
    values_FD, scale_CF = values_of(weight), weight.scale_CF.astype(jnp.float32)
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


def values_of(weight: Any) -> jax.Array:
    """[F, D], one in each number, less what is zero where there are no zeros."""
    if not weight.is_packed:
        return weight.values_FD
    values_FD = unpack_values(weight.values_FD).astype(jnp.int8)
    return values_FD if weight.zero_CF is not None else values_FD - jnp.int8(ZERO)


def dequantize(weight: Any) -> jax.Array:
    """The weight [F, D] in float32."""
    (F, D), C = weight.shape, weight.scale_CF.shape[0]
    values_FC = values_of(weight).astype(jnp.float32).reshape(F, C, D // C)
    if weight.zero_CF is not None:
        values_FC = values_FC - weight.zero_CF.T[:, :, None]
    return (values_FC * weight.scale_CF.astype(jnp.float32).T[:, :, None]).reshape(F, D)


def _times_transposed(x_TD: jax.Array, y_FD: jax.Array, sum_type: Any) -> jax.Array:
    precision = lax.Precision.HIGHEST if x_TD.dtype == jnp.float32 else None
    over_inputs = (((1,), (1,)), ((), ()))
    return lax.dot_general(x_TD, y_FD, over_inputs, precision=precision, preferred_element_type=sum_type)
