"""Products of few rows in XLA: the definition.

Numerics: products of bfloat16 are exact in float32, and summed there; sums of int8 are exact; whole numbers of 16 bits
become float32. Weights with scales are dequantised in float32, and products with them summed there.

Knows nothing of backends.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import few_rows_matmul as op
from pallas_kernels.few_rows_matmul.scaled import ScaledWeight, dequantized


def cannot_take(x_TD: Any, weight_FD: Any) -> str | None:
    """It takes any operands."""
    return None


def few_rows_matmul(x_TD: jax.Array, weight_FD: Any, dtype: str) -> jax.Array:
    """See `few_rows_matmul.few_rows_matmul`."""
    if isinstance(weight_FD, ScaledWeight):
        x_TD, weight_FD = x_TD.astype(jnp.float32), dequantized(weight_FD)
        return jnp.einsum("TD,FD->TF", x_TD, weight_FD, precision=jax.lax.Precision.HIGHEST).astype(dtype)
    if x_TD.dtype == jnp.int16:
        x_TD, weight_FD = x_TD.astype(jnp.float32), weight_FD.astype(jnp.float32)
        return jnp.einsum("TD,FD->TF", x_TD, weight_FD, precision=jax.lax.Precision.HIGHEST)
    return jnp.einsum("TD,FD->TF", x_TD, weight_FD, preferred_element_type=dtype)


def two_plane_matmul(x_TD: jax.Array, weight_FD: jax.Array, scale_F: jax.Array, dtype: str) -> jax.Array:
    """See `few_rows_matmul.two_plane_matmul`."""
    planes_PD, step_T = in_planes(x_TD)
    return joined(few_rows_matmul(planes_PD, weight_FD, "int32"), step_T, scale_F, dtype)


def in_planes(x_TD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(rows of high numbers, then those of low ones, int8 [P, D] with P = 2 T; the rows' steps [T] in float32)."""
    steps_TD, step_T1 = in_steps(x_TD, op.LARGEST)
    high_TD = jnp.round(steps_TD)
    low_TD = jnp.round((steps_TD - high_TD) * op.LOW_STEPS)
    return jnp.concatenate([high_TD, low_TD]).astype(jnp.int8), step_T1[:, 0]


def joined(sums_PF: jax.Array, step_T: jax.Array, scale_F: jax.Array, dtype: str) -> jax.Array:
    """What sums of both planes' rows with a weight come to, [T, F] in `dtype`."""
    high_TF, low_TF = jnp.split(sums_PF.astype(jnp.float32), 2)
    return ((high_TF + low_TF / op.LOW_STEPS) * step_T[:, None] * scale_F).astype(dtype)


def in_steps(x_TD: jax.Array, largest: int) -> tuple[jax.Array, jax.Array]:
    """(x in steps of its row, the rows' steps [T, 1]), both float32: the largest number of a row is `largest` steps. A
    number that is not finite makes the row's step so."""
    x_TD = x_TD.astype(jnp.float32)
    # As whole numbers they are in the order of their sizes, NaN above all, which XLA:CPU's maximum of floats may lose.
    bits_TD = jax.lax.bitcast_convert_type(x_TD, jnp.int32) & jnp.int32(0x7FFFFFFF)
    step_T1 = jax.lax.bitcast_convert_type(jnp.max(bits_TD, axis=1, keepdims=True), jnp.float32) / largest
    return x_TD / jnp.where(step_T1 == 0, 1, step_T1), step_T1  # not a maximum: NaN must stay NaN
