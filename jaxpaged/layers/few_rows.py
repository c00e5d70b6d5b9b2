"""Products of a few rows with a weight, where a kernel is faster than XLA: on a CPU. Knows neither models nor scales.

Letters: I inputs and O outputs of a product, each all of its axes in one.
"""

from typing import Any

import jax

from pallas_kernels.few_rows_matmul import backends, choose_backend, few_rows_matmul

XLA = "reference"
"""The backend that is everywhere."""


def choose_few_rows(platform: str, num_devices: int, deterministic: bool) -> str:
    """The fastest backend. XLA where it must split products over devices, or where rows must have the same bits in
    larger batches, whose sums XLA orders otherwise than the kernels do."""
    return XLA if num_devices > 1 or deterministic else choose_backend("auto", platform)


def takes_one_row(backend: str, dtype: Any) -> bool:
    """Whether a single row of a model's type is multiplied as fast as two, with weights of any number of bits."""
    return backend != XLA and str(dtype) == "bfloat16"


def few_rows_product(x_TI: jax.Array, weight_OI: jax.Array, backend: str, dtype: Any = None) -> jax.Array | None:
    """Sums [T, O] of the products, in float32 or, of int8, in int32, or rounded to `dtype`; None where XLA is to
    multiply."""
    if backend == XLA or backends(backend, x_TI, weight_OI)[backend] is not None:
        return None
    return few_rows_matmul(x_TI, weight_OI, backend=backend, dtype=dtype)
