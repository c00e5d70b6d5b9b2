"""Products with 8-bit weights. Knows neither models nor how the weights were made.

On a CPU the activations are split into two planes of 8 bits, so that both factors are integers (AVX512 VNNI, AMX):
x = step * (high + low / 254), step = largest |x| of the row / 127, |x - its planes| <= step / 508. That is as close
as rounding to 16 bits, and the sums are exact, so the result is that of weights in 8 bits alone, in any batch.
It is 1.7 to 2 times as fast as bfloat16 weights on AVX512 VNNI; converting the weights inside of the product, which
XLA:CPU does not fuse, is 2 to 10 times slower than those for few rows (scripts/bench_products.py). Where the kernels of
`few_rows_matmul` take rows of 16 bits, which they do where VNNI is not, one plane has them; where it is, they make the
planes and join their sums themselves.

Elsewhere the weights are converted to the type of x inside of the product, which reads half the bytes.

Letters: I inputs and O outputs of a product, each all of its axes in one.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged.layers.few_rows import XLA, few_rows_product
from jaxpaged.params.quantized import QuantizedArray
from pallas_kernels.few_rows_matmul import most_of_int16, two_plane_matmul
from pallas_kernels.few_rows_matmul.reference import in_steps


def int8_product(x_TI: jax.Array, weight: QuantizedArray, dtype: Any, few_rows: str = XLA) -> jax.Array:
    """x_TI times the weight, whose axes are merged to [O, I] -> [T, O] in `dtype`."""
    value_OI, scale_O = weight.values.reshape(-1, x_TI.shape[1]), weight.scales.reshape(-1)
    on_cpu = partial(whole_product, dtype=dtype, few_rows=few_rows)
    default = lambda x_TI, value_OI, scale_O: (converted_product(x_TI, value_OI) * scale_O).astype(dtype)
    return jax.lax.platform_dependent(x_TI, value_OI, scale_O, cpu=on_cpu, default=default)


def whole_product(
    x_TI: jax.Array, value_OI: jax.Array, scale_O: jax.Array, dtype: Any, few_rows: str = XLA
) -> jax.Array:
    """[T, O] in `dtype` from one product of integers, with one plane of x or two."""
    steps_TI, step_T1 = in_steps(x_TI, most_of_int16(x_TI.shape[1]))
    # A NaN makes the whole row's step NaN, whatever it is as a whole number.
    sums_TO = few_rows_product(jnp.round(steps_TI).astype(jnp.int16), value_OI, few_rows)
    if sums_TO is not None:
        return (sums_TO * step_T1 * scale_O).astype(dtype)
    return two_plane_matmul(x_TI, value_OI, scale_O, dtype=dtype, backend=few_rows)


def converted_product(x_TI: jax.Array, value_OI: jax.Array) -> jax.Array:
    """Float32 [T, O]; whole numbers up to 127 are exact in every type of x."""
    precision = jax.lax.Precision.HIGHEST if x_TI.dtype == jnp.float32 else None
    return jnp.einsum(
        "TI,OI->TO", x_TI, value_OI.astype(x_TI.dtype), preferred_element_type=jnp.float32, precision=precision
    )
