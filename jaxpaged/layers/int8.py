"""Products with 8-bit weights. Knows neither models nor how the weights were made.

On a CPU the activations are split into two planes of 8 bits, so that both factors are integers (AVX512 VNNI, AMX):
x = step * (high + low / 254), step = largest |x| of the row / 127, |x - its planes| <= step / 508. That is as close
as rounding to 16 bits, and the sums are exact, so the result is that of weights in 8 bits alone, in any batch.
It is 1.7 to 2 times as fast as bfloat16 weights on AVX512 VNNI; converting the weights inside of the product, which
XLA:CPU does not fuse, is 2 to 10 times slower than those for few rows (scripts/bench_products.py). Where the kernels of
`few_rows_matmul` take rows of 16 bits, which they do where VNNI is not, one plane has them.

Elsewhere the weights are converted to the type of x inside of the product, which reads half the bytes.

Letters: I inputs and O outputs of a product, each all of its axes in one; P rows of both planes, 2 T.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged.layers.few_rows import XLA, few_rows_product
from jaxpaged.params.quantized import LARGEST, QuantizedArray
from pallas_kernels.few_rows_matmul import most_of_int16

LOW_STEPS = 2 * LARGEST
"""Steps of the low plane in one of the high plane: what rounding leaves is at most half a high step."""


def int8_product(x_TI: jax.Array, weight: QuantizedArray, dtype: Any, few_rows: str = XLA) -> jax.Array:
    """x_TI times the weight, whose axes are merged to [O, I] -> [T, O] in `dtype`."""
    value_OI, scale_O = weight.values.reshape(-1, x_TI.shape[1]), weight.scales.reshape(-1)
    on_cpu = partial(whole_product, few_rows=few_rows)
    sums_TO = jax.lax.platform_dependent(x_TI, value_OI, cpu=on_cpu, default=converted_product)
    return (sums_TO * scale_O).astype(dtype)


def whole_product(x_TI: jax.Array, value_OI: jax.Array, few_rows: str = XLA) -> jax.Array:
    """Float32 [T, O] from one product of integers, with one plane of x or two."""
    largest = most_of_int16(x_TI.shape[1])
    steps_TI, step_T1 = in_steps(x_TI, largest)
    # A NaN makes the whole row's step NaN, whatever it is as a whole number.
    sums_TO = few_rows_product(jnp.round(steps_TI).astype(jnp.int16), value_OI, few_rows)
    return two_plane_product(x_TI, value_OI, few_rows) if sums_TO is None else sums_TO * step_T1


def in_steps(x_TI: jax.Array, largest: int) -> tuple[jax.Array, jax.Array]:
    """(x in steps of its row, the rows' steps [T, 1]), both float32: the largest number of a row is `largest` steps."""
    x_TI = x_TI.astype(jnp.float32)
    step_T1 = jnp.max(jnp.abs(x_TI), axis=1, keepdims=True) / largest
    return x_TI / jnp.where(step_T1 == 0, 1, step_T1), step_T1  # not a maximum: NaN must stay NaN


def two_plane_product(x_TI: jax.Array, value_OI: jax.Array, few_rows: str = XLA) -> jax.Array:
    """Float32 [T, O] from one product of integers, with the planes as 2 T rows."""
    num_tokens = x_TI.shape[0]
    steps_TI, step_T1 = in_steps(x_TI, LARGEST)
    high_TI = jnp.round(steps_TI)
    low_TI = jnp.round((steps_TI - high_TI) * LOW_STEPS)
    planes_PI = jnp.concatenate([high_TI, low_TI]).astype(jnp.int8)
    sums_PO = few_rows_product(planes_PI, value_OI, few_rows)
    if sums_PO is None:
        sums_PO = jnp.einsum("PI,OI->PO", planes_PI, value_OI, preferred_element_type=jnp.int32)
    sums_PO = sums_PO.astype(jnp.float32)
    return (sums_PO[:num_tokens] + sums_PO[num_tokens:] / LOW_STEPS) * step_T1


def converted_product(x_TI: jax.Array, value_OI: jax.Array) -> jax.Array:
    """Float32 [T, O]; whole numbers up to 127 are exact in every type of x."""
    precision = jax.lax.Precision.HIGHEST if x_TI.dtype == jnp.float32 else None
    return jnp.einsum(
        "TI,OI->TO", x_TI, value_OI.astype(x_TI.dtype), preferred_element_type=jnp.float32, precision=precision
    )
