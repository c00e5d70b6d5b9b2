"""Weights in 8 bits: what they are, which parameters become so, and how they are made from the checkpoint's.

`--quantization int8` is a transformation of the tree of specs (`quantized_specs`); shapes and loading follow from the
spec. A weight is rounded to 127 steps on either side of zero, with one float32 scale per output (per row of the
checkpoint's matrix): scale = largest |weight| of the row / 127, so |weight - value * scale| <= scale / 2. Vectors
(norms, biases) stay as they are. This module does not know how products with such weights are computed.
"""

import math
from dataclasses import replace
from types import ModuleType
from typing import Any

import jax
import numpy as np
from flax import struct

from jaxpaged.params.spec import Spec

LARGEST = 127
"""Values are in [-LARGEST, LARGEST]: -128 is left out, so that the range is symmetric."""

ROUNDED_AT_ONCE = 2**20
"""Weights that the host rounds at a time: their float32 copies stay in its caches."""


@struct.dataclass
class QuantizedArray:
    """A matrix [out..., in...]: `values` (int8, in its shape) times `scales` (float32, [out...]).

    `dtype` is the name of the type of the weights that it stands for.
    """

    values: jax.Array
    scales: jax.Array
    dtype: str = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes


def quantized_specs(specs: Any, method: str | None) -> Any:
    """The specs with every matrix marked to be quantized that has no type of its own; `method` is "int8", or None to
    change nothing."""
    if method is None:
        return specs
    assert method == "int8", f"unknown quantization {method}: config.py lets pass what is not implemented"
    return jax.tree.map(lambda spec: replace(spec, quantized=is_matrix(spec) and spec.dtype is None), specs)


def is_quantized(leaf: Any) -> bool:
    """For `is_leaf`, where a pytree of parameters goes by parameters and not by arrays."""
    return isinstance(leaf, QuantizedArray)


def is_matrix(spec: Spec) -> bool:
    """Whether the checkpoint stores outputs times inputs: projections and tables do, norms and biases do not."""
    return " " in spec.hf_dims


def scales_spec(spec: Spec) -> Spec:
    """The spec of a quantized matrix's scales: its output axes."""
    outputs = "".join(spec.hf_dims.split(" ")[:-1])
    return Spec(spec.dims[: len(outputs)], outputs, spec.hf_name.format("*"))


def quantize(weight: np.ndarray, num_out_axes: int) -> tuple[np.ndarray, np.ndarray]:
    """(int8 values, float32 scales) of [out..., in...], on the host and a few rows at a time."""
    out_shape = weight.shape[:num_out_axes]
    rows = weight.reshape(math.prod(out_shape), -1)
    values, scales = np.empty(rows.shape, np.int8), np.empty(len(rows), np.float32)
    step = max(1, ROUNDED_AT_ONCE // rows.shape[1])
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        values[part], scales[part] = rounded_rows(rows[part].astype(np.float32), np)
    return values.reshape(weight.shape), scales.reshape(out_shape)


def rounded_rows(weight: Any, xp: ModuleType) -> tuple[Any, Any]:
    """(whole numbers, scales) of [rows, in], all float32; a row of zeros has scale 0. `xp` is numpy or jax.numpy."""
    scales = xp.abs(weight).max(axis=1) / np.float32(LARGEST)
    return xp.rint(weight / xp.where(scales > 0, scales, np.float32(1))[:, None]), scales
