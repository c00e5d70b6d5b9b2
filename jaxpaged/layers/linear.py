"""A product with a weight, by letters, and an optional bias. Knows neither heads nor models.

Letters: I inputs and O outputs of a product, each all of its axes in one.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxpaged.layers.few_rows import XLA, few_rows_product
from jaxpaged.layers.int8 import int8_product
from jaxpaged.params.quantized import PackedArray, QuantizedArray
from pallas_kernels.int4_matmul import GROUP, backends, int4_matmul


@struct.dataclass
class Linear:
    """`weight` is [out..., in...], as checkpoints store it, or quantized; `bias` is [out...] or None."""

    weight: jax.Array | QuantizedArray | PackedArray
    bias: jax.Array | None = None


def apply_linear(letters: str, x: jax.Array, p: Linear, few_rows: str = XLA) -> jax.Array:
    """`einsum(letters, x, weight) + bias` in the type of `x`; `letters` is like "TD,NHD->TNH" or "TNH,DNH->TD".
    `few_rows` is the backend of products of few rows.

    The weight is contracted over its last axes: XLA:CPU runs that layout at the speed of memory, the transposed one
    2-4x slower. It is computed as a product of two matrices, since with three axes XLA:CPU falls back to a loop
    (8x slower at 2 tokens, 1.5x at 512); merging neighbouring axes costs nothing. bfloat16 products return
    bfloat16 and are accumulated in float32; float32 products use float32 throughout, on accelerators too.
    """
    x_letters, weight_letters, out_letters = letters.replace("->", ",").split(",")
    inputs = x_letters[1:]
    assert weight_letters == out_letters[1:] + inputs, f"{letters}: a weight is spelled outputs first, then inputs"
    out_shape = p.weight.shape[: -len(inputs)]
    x_TI = x.reshape(x.shape[0], math.prod(x.shape[1:]))
    product = PRODUCTS.get(type(p.weight), matrix_product)
    out = product(x_TI, p.weight, x.dtype, few_rows).reshape(x.shape[0], *out_shape)
    return out if p.bias is None else out + p.bias


def matrix_product(x_TI: jax.Array, weight: jax.Array, dtype: Any, few_rows: str = XLA) -> jax.Array:
    """x_TI times the weight, whose axes are merged to [O, I] -> [T, O] in `dtype`."""
    weight_OI = weight.reshape(-1, x_TI.shape[1])
    sums_TO = few_rows_product(x_TI, weight_OI, few_rows, dtype)
    if sums_TO is not None:
        return sums_TO
    precision = jax.lax.Precision.HIGHEST if x_TI.dtype == jnp.float32 else None
    return jnp.einsum("ti,oi->to", x_TI, weight_OI, preferred_element_type=dtype, precision=precision)


def int4_product(x_TI: jax.Array, weight: PackedArray, dtype: Any, few_rows: str = XLA) -> jax.Array:
    """x_TI times the weight, whose axes are merged to [O, I] -> [T, O] in `dtype`."""
    num_inputs = x_TI.shape[1]
    packed_OB, scale_OC = weight.packed.reshape(-1, num_inputs // 2), weight.scales.reshape(-1, num_inputs // GROUP)
    backend = XLA if backends(few_rows, x_TI, packed_OB, scale_OC)[few_rows] else few_rows
    return int4_matmul(x_TI, packed_OB, scale_OC, backend=backend).astype(dtype)


PRODUCTS = {QuantizedArray: int8_product, PackedArray: int4_product}
"""Of weights that are no plain arrays."""
