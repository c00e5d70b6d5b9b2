"""Weights in 8 and 4 bits: what they are, which parameters become so, and how they are made from the checkpoint's.

`--quantization` is a transformation of the tree of specs (`quantized_specs`); shapes and loading follow from the spec.
Vectors (norms, biases) stay as they are.

`int8`: a weight is rounded to 127 steps on either side of zero, with one float32 scale per output (per row of the
checkpoint's matrix): scale = largest |weight| of the row / 127, so |weight - value * scale| <= scale / 2.

`int4`: every 32 inputs of an output share a bfloat16 scale, as `pallas_kernels.int4_matmul` defines it: 4.5 bits a
weight. It is for what a product with all of it reads, which is most of a dense model. Tables of the vocabulary,
experts, classifiers, and what queries absorb of latents are read in other ways and get 8 bits, and so do matrices whose
last axis is no multiple of 64. Towers, which make embeddings of pictures, stay as they are: they are small, and their
products are those of thousands of rows.

A checkpoint that was quantised has weights in few bits already (`encoded.py`). What they are on a device is the same
8 bits with a scale per output, of whole numbers or of floats, or `Stored`: as they lie in the file.

This module does not know how products with such weights are computed.

Letters: C groups of inputs that have a scale in common.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxpaged.errors import ConfigError
from jaxpaged.params.spec import Spec

IN_8_BITS = frozenset("eVXY")
"""Letters of what is not read by a product with all of it: experts, tables, and classifiers."""

OF_TOWERS = frozenset("dmu")
"""Letters of which every matrix of a tower has one."""

GROUP, LAST_AXIS = 32, 64
"""Inputs that share a scale in 4 bits, and what the last axis of such a matrix is a multiple of."""

ZERO = 8
"""The value in 4 bits that stands for zero."""

LARGEST = 127
"""Values are in [-LARGEST, LARGEST]: -128 is left out, so that the range is symmetric."""

ROUNDED_AT_ONCE = 2**20
"""Weights that the host rounds at a time: their float32 copies stay in its caches."""


WHOLE_ROWS = "float8_e4m3fn of one scale"
"""Rows whose scales are those of all of a matrix."""
ROWS = {"int8": "int8", **{name: name for name in ("float8_e4m3fn", "float8_e5m2")}, WHOLE_ROWS: "float8_e4m3fn"}
"""Forms with a scale per output -> type of their values."""
BLOCKS, BLOCK = "fp8_per_block", 128
"""8-bit floats with a scale for every block of so many outputs and inputs: which weights can have them is known once
devices are (`forms.py`)."""
ROUNDED_TO = {
    "int8": "int8",
    "int4": "int4",
    "fp8_per_channel": "float8_e4m3fn",
    "fp8_per_tensor": WHOLE_ROWS,
    "fp8": WHOLE_ROWS,
    BLOCKS: BLOCKS,
}
"""What `--quantization` says of a model in 16 bits -> what its matrices become."""
LARGEST_FLOAT8 = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
REFERENCE = "reference"
INT4, PACKED = "int4", "uint8"
"""Types of values of 4 bits: each a number, or two to a byte, as `pallas_kernels.int4_matmul` has them."""


@dataclass(frozen=True)
class Stored:
    """What a weight is that a device has as it was stored: values of a type, `group` inputs of an output with a scale
    in common, and with a zero. `PACKED` values are from 0 on, and without zeros `ZERO` stands for zero. `has_order`:
    groups are of inputs from anywhere. `kernel` multiplies with it. `scales` are of this type."""

    values: str
    group: int
    has_zeros: bool = False
    has_order: bool = False
    kernel: str = REFERENCE
    scales: str = "float32"

    @property
    def is_packed(self) -> bool:
        return self.values == PACKED


def in_words(form: Any) -> str:
    """Of `Spec.quantized`: `rows of int8`, `int4 in groups of 128`, `16 bits`."""
    if form is None:
        return "16 bits"
    if not isinstance(form, Stored):
        return f"rows of {ROWS.get(form, form)}"
    return f"{INT4 if form.is_packed else form.values} in groups of {form.group}"


@struct.dataclass
class StoredArray:
    """A matrix [out..., in...]: `values` in its shape, less `zeros`, times `scales`, both [C, out...]; float32, or
    bfloat16 for scales that are powers of two. Values of type `PACKED` have half of the last axis.

    `order` int32 [in]: which input each place of the values' last axes is of; None: they are in order. `dtype` is the
    name of the type of the weights that it stands for. `split` says over which devices it is (`sharding.Split`); None:
    there is one, or a function of a single device has the weight.
    """

    values: jax.Array
    scales: jax.Array
    zeros: jax.Array | None
    order: jax.Array | None
    dtype: str = struct.field(pytree_node=False)
    kernel: str = struct.field(pytree_node=False, default=REFERENCE)
    split: Any = struct.field(pytree_node=False, default=None)

    @property
    def is_packed(self) -> bool:
        return self.values.dtype == PACKED

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.values.shape[:-1], self.values.shape[-1] * (1 + self.is_packed))

    @property
    def nbytes(self) -> int:
        return sum(array_bytes(part.shape, part.dtype) for part in jax.tree.leaves(self))


def array_bytes(shape: Iterable[int], dtype: Any) -> int:
    """Of an array on a device, where two numbers of 4 bits share a byte, which `nbytes` of jax does not know."""
    dtype = jnp.dtype(dtype)
    bits = 4 if dtype.name in FOUR_BITS else 8 * dtype.itemsize
    return -(-math.prod(shape) * bits // 8)


FOUR_BITS = ("int4", "uint4", "float4_e2m1fn")


@struct.dataclass
class QuantizedArray:
    """A matrix [out..., in...]: `values` (int8 or 8-bit floats, in its shape) times `scales` (float32, [out...]).

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


@struct.dataclass
class PackedArray:
    """A matrix [out..., in...]: `packed` (uint8, the last axis halved) and `scales` (bfloat16, a 32nd of it), as
    `pallas_kernels.int4_matmul` reads them.

    `dtype` is the name of the type of the weights that it stands for.
    """

    packed: jax.Array
    scales: jax.Array
    dtype: str = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.packed.shape[:-1], 2 * self.packed.shape[-1])

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales.nbytes


def quantized_specs(specs: Any, method: str | None, sizes: Mapping[str, int]) -> Any:
    """The specs with every matrix marked to be quantized that has no type of its own; `method` is one of `ROUNDED_TO`,
    or None to change nothing. `sizes`: letter -> size in the checkpoint.

    Raises ConfigError where 4 bits are asked for and no matrix can have them.
    """
    if method is None:
        return specs

    def marked(spec: Spec) -> Spec:
        if not is_matrix(spec) or spec.dtype is not None or OF_TOWERS & set(spec.dims):
            return spec
        form = "int8" if method == "int4" and not can_be_packed(spec, sizes) else ROUNDED_TO[method]
        return replace(spec, quantized=form)

    result = jax.tree.map(marked, specs)
    if method == "int4" and not any(spec.quantized == "int4" for spec in jax.tree.leaves(result)):
        raise ConfigError(
            "quantization is 'int4', but no matrix of this model has a last axis that is a multiple of "
            f"{LAST_AXIS}. Choose 'int8'."
        )
    return result


def can_be_packed(spec: Spec, sizes: Mapping[str, int]) -> bool:
    """Whether a matrix can have 4 bits; see the beginning."""
    last = spec.dims[-1]
    is_read_whole = not IN_8_BITS & set(spec.dims) and not spec.within and spec.dims.count(last) == 1
    return is_read_whole and sizes[last] % LAST_AXIS == 0


def values_sizes(spec: Spec, sizes: Mapping[str, int]) -> Mapping[str, int]:
    """Sizes with which `spec` is that of the values of its form."""
    is_packed = isinstance(spec.quantized, Stored) and spec.quantized.is_packed
    return packed_sizes(spec, sizes)[0] if is_packed else sizes


def packed_sizes(spec: Spec, sizes: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Sizes with which `spec` is the spec of a packed matrix's bytes, and of its scales."""
    last = spec.dims[-1]
    return {**sizes, last: sizes[last] // 2}, {**sizes, last: sizes[last] // GROUP}


def groups_spec(spec: Spec, sizes: Mapping[str, int]) -> tuple[Spec, dict[str, int]]:
    """The spec of scales of groups of inputs, [C, out...], and sizes with which it is: C is split as the first of the
    inputs' letters is, and goes by that. An expert's are [e, C, out]."""
    assert isinstance(spec.quantized, Stored)
    inputs = spec.hf_dims.split(" ")[-1]
    outputs = spec.dims[: len(spec.dims) - len(inputs)]
    experts = outputs[:1] if outputs.startswith("e") else ""
    dims = experts + inputs[0] + outputs[len(experts) :]
    groups = math.prod(sizes[letter] for letter in inputs) // spec.quantized.group
    return Spec(dims, " ".join(dims.replace("e", "E")), spec.hf_name.format("*")), {**sizes, inputs[0]: groups}


def is_quantized(leaf: Any) -> bool:
    """For `is_leaf`, where a pytree of parameters goes by parameters and not by arrays."""
    return isinstance(leaf, QuantizedArray | PackedArray | StoredArray)


def is_matrix(spec: Spec) -> bool:
    """Whether the checkpoint stores outputs times inputs: projections and tables do, norms and biases do not."""
    return " " in spec.hf_dims


def scales_spec(spec: Spec) -> Spec:
    """The spec of a quantized matrix's scales: its output axes."""
    outputs = "".join(spec.hf_dims.split(" ")[:-1])
    return Spec(spec.dims[: len(outputs)], outputs, spec.hf_name.format("*"))


def quantize(weight: np.ndarray, num_out_axes: int, form: str = "int8") -> tuple[np.ndarray, np.ndarray]:
    """(values, float32 scales) of [out..., in...] in one of `ROWS`, on the host and a few rows at a time."""
    out_shape = weight.shape[:num_out_axes]
    rows = weight.reshape(math.prod(out_shape), -1)
    values, scales = np.empty(rows.shape, ROWS[form]), np.empty(len(rows), np.float32)
    step = max(1, ROUNDED_AT_ONCE // rows.shape[1])
    whole = None
    if form == WHOLE_ROWS:
        whole = max(float(np.abs(rows[start : start + step]).max()) for start in range(0, len(rows), step))
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        some = rows[part].astype(np.float32)
        values[part], scales[part] = rounded_rows(some, np) if form == "int8" else float_rows(some, ROWS[form], whole)
    return values.reshape(weight.shape), scales.reshape(out_shape)


def float_rows(weight: np.ndarray, dtype: str, whole: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(8-bit floats, scales) of [rows, in], all float32. Scales are powers of two, so that numbers of few bits times
    such powers stay as they are, unless they are much smaller than the row's largest. `whole`: the largest magnitude of
    all rows, to whose scale all are rounded, as it is."""
    largest = np.float32(LARGEST_FLOAT8[dtype])
    if whole is not None:
        scales = np.full(len(weight), (whole or 1.0) / largest, np.float32)
    else:
        top = np.abs(weight).max(axis=1)
        exponent = np.frexp(np.where(top > 0, top, 1) / largest)[1]
        scales = np.ldexp(np.float32(1), exponent)
        scales = np.where(top <= largest * scales / 2, scales / 2, scales).astype(np.float32)
    return np.clip(weight / scales[:, None], -largest, largest).astype(dtype), scales


def float_blocks(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(8-bit floats [O, I], float32 scales [O, I / BLOCK]) of a matrix, whose last block of outputs may be smaller."""
    values = np.empty(weight.shape, "float8_e4m3fn")
    scales = np.empty((len(weight), weight.shape[1] // BLOCK), np.float32)
    for start in range(0, len(weight), BLOCK):
        part = slice(start, start + BLOCK)
        groups = weight[part].astype(np.float32).reshape(-1, scales.shape[1], BLOCK)
        top = np.abs(groups).max(axis=(0, 2))
        scales[part] = np.where(top > 0, top, 1) / np.float32(LARGEST_FLOAT8["float8_e4m3fn"])
        values[part] = (groups / scales[part][..., None]).reshape(-1, weight.shape[1])
    return values, scales


def pack(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(bytes, bfloat16 scales) of [..., in], on the host and a few rows at a time."""
    width = weight.shape[-1]
    rows = weight.reshape(-1, width)
    packed = np.empty((len(rows), width // 2), np.uint8)
    scales = np.empty((len(rows), width // GROUP), jnp.bfloat16)
    step = max(1, ROUNDED_AT_ONCE // width)
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        packed[part], scales[part] = packed_rows(rows[part].astype(np.float32), np)
    return packed.reshape(*weight.shape[:-1], -1), scales.reshape(*weight.shape[:-1], -1)


def rounded_rows(weight: Any, xp: ModuleType) -> tuple[Any, Any]:
    """(whole numbers, scales) of [rows, in], all float32; a row of zeros has scale 0. `xp` is numpy or jax.numpy."""
    scales = xp.abs(weight).max(axis=1) / np.float32(LARGEST)
    return xp.rint(weight / xp.where(scales > 0, scales, np.float32(1))[:, None]), scales


def packed_rows(weight: Any, xp: ModuleType) -> tuple[Any, Any]:
    """(bytes, float32 scales that bfloat16 has) of [rows, in], all float32. `xp` is numpy or jax.numpy.

    The largest magnitude of a group becomes value 0, which is -8 scales, so scales may be negative; others are rounded
    to nearest. A weight is off by half a scale at most, and by a whole one where it is as large, with the other sign.
    The lower four bits of a byte are a value of the group's first half, the upper four the value 16 inputs later.
    """
    num_rows, width = weight.shape
    groups = weight.reshape(num_rows, width // GROUP, GROUP)
    low, high = groups.min(axis=-1), groups.max(axis=-1)
    scales = (xp.where(-low > high, low, high) / -ZERO).astype(jnp.bfloat16).astype(xp.float32)
    steps = groups / xp.where(scales == 0, xp.float32(1), scales)[..., None]
    return in_bytes(xp.clip(xp.rint(steps) + ZERO, 0, 15).astype(xp.uint8)).reshape(num_rows, width // 2), scales


def in_bytes(values: Any) -> Any:
    """Numbers of 4 bits, uint8 [..., in], two to a byte, [..., in / 2]: see `packed_rows`."""
    groups = values.reshape(*values.shape[:-1], -1, GROUP)
    packed = groups[..., : GROUP // 2] | (groups[..., GROUP // 2 :] << 4)
    return packed.reshape(*values.shape[:-1], -1)
