"""Which form weights of a quantised checkpoint have on a device: 16 bits, rows of 8 bits, or as they were stored.

One option says which, and what it wants is had where it can be (`formed_specs`). Left to itself, a CPU gets rows of
int8: its products of integers are the fastest that it has, and those of groups the slowest. Other devices get what was
stored where a kernel multiplies it, and rows elsewhere: int8 of whole numbers, 8-bit floats of floats.

Numbers of 4-bit floats have 4 bits only where `stored` is asked for: kernels look each one up, which takes a TPU
several times as long as to read 8 bits. Whole numbers of 4 bits lie two to a byte on a GPU (`PACKED`), as its kernel
for few rows takes them, where groups are of whole registers of these. Those of experts are `int4`.

Tables of the vocabulary, and what queries absorb of latents, are never in groups: they are read in other ways than by
one product. Experts have no zeros. Towers have 16 bits.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxpaged.params.formats.float4 import E2M1
from jaxpaged.params.quantized import BLOCK, BLOCKS, INT4, OF_TOWERS, PACKED, REFERENCE, Stored, in_words
from jaxpaged.params.quantized import GROUP as PACKED_TOGETHER
from jaxpaged.params.schemes.floats4 import Mxfp4
from jaxpaged.params.schemes.scheme import Numbers
from jaxpaged.params.sharding import MESH_AXES_OF
from jaxpaged.params.spec import Spec

AUTO, STORED, ROWS, SIXTEEN = FORMS = ("auto", "stored", "rows", "16bit")
"""What the option may say."""

POWERS = "bfloat16"
"""A type that has all powers of two that scales are."""

MXFP4 = Mxfp4().numbers
"""Rows of 8-bit floats have such numbers as they are, mostly, in fewer bytes than 8-bit floats in groups."""

OF_BLOCKS = Numbers("float8_e4m3fn", BLOCK)
"""What `fp8_per_block` makes of a model in 16 bits."""

NOT_QUANTISED = ("bfloat16", "float16", "float32")
"""Weights that have a scheme for their order only (`schemes/gguf.py`)."""

KernelFor = Callable[[Stored, int, int, bool], str | None]
"""Of a form, outputs, inputs, and whether the weights are those of experts: the kernel that multiplies what one device
has; None: there is none but the product that writes the weights to memory first."""


@dataclass(frozen=True)
class Device:
    """What forms depend on. `shards` says over how many devices a letter is split."""

    platform: str
    kernel_for: KernelFor
    shards: Mapping[str, int]


def formed_specs(specs: Any, wish: str, sizes: Mapping[str, int], device: Device) -> Any:
    """The specs with a form for every weight that has none yet: of a quantised checkpoint, and of those that are to be
    rounded in blocks. `sizes`: letter -> size in the checkpoint."""

    def formed(spec: Spec) -> Spec:
        if spec.quantized == BLOCKS:
            in_blocks = with_kernel(stored_form(spec, OF_BLOCKS, sizes, device), spec, sizes, device)
            return replace(spec, quantized=in_blocks or "float8_e4m3fn")
        if spec.scheme is None or spec.quantized or spec.dtype is not None or OF_TOWERS & set(spec.dims):
            return spec
        return replace(spec, quantized=form_of(spec, spec.scheme.numbers, wish, sizes, device))

    return jax.tree.map(formed, specs)


def form_of(spec: Spec, numbers: Numbers, wish: str, sizes: Mapping[str, int], device: Device) -> Any:
    """`Spec.quantized` of a weight; None: 16 bits."""
    if wish == SIXTEEN or numbers.values in NOT_QUANTISED:
        return None
    rows = rows_type(numbers, device.platform)
    if wish == ROWS or (wish == AUTO and device.platform == "cpu"):
        return rows
    form = stored_form(spec, numbers, sizes, device)
    if form is not None and wish == STORED and numbers.values == E2M1:
        form = replace(form, values=E2M1, scales=POWERS if numbers == MXFP4 else form.scales)
    form = with_kernel(form, spec, sizes, device)
    if form is None or (wish == AUTO and (numbers == MXFP4 or form.kernel == REFERENCE)):
        return rows
    return form


def with_kernel(form: Stored | None, spec: Spec, sizes: Mapping[str, int], device: Device) -> Stored | None:
    """A form with the kernel that multiplies what a device has of a weight, where there is one."""
    if form is None:
        return None
    inputs = math.prod(sizes[letter] for letter in spec.hf_dims.split(" ")[-1])
    outputs = math.prod(sizes[letter] for letter in spec.stored_dims) // inputs
    kernel = device.kernel_for(form, outputs, inputs, spec.dims.startswith("e"))
    return replace(form, kernel=kernel or REFERENCE)


def rows_type(numbers: Numbers, platform: str) -> str:
    """Of values with a scale for every output: integers for whole numbers, and on a CPU, which has no products of
    8-bit floats."""
    if platform == "cpu" or numbers.values.startswith("int"):
        return "int8"
    return numbers.values if numbers.values == "float8_e5m2" and numbers.group is None else "float8_e4m3fn"


def stored_form(spec: Spec, numbers: Numbers, sizes: Mapping[str, int], device: Device) -> Stored | None:
    """What a weight would be as it was stored; None where that cannot be, or is the same as rows."""
    *outputs, inputs = spec.hf_dims.split(" ")
    num_inputs = math.prod(sizes[letter] for letter in inputs)
    is_table, is_absorbed = bool(set(spec.dims) & set("VXY")), bool(spec.within)
    has_zeros, has_order = numbers.has_zeros, numbers.may_be_ordered
    group = num_inputs if numbers.group is None else numbers.group
    if is_table or is_absorbed or num_inputs % group or inputs[0] in "".join(outputs):
        return None
    if group == num_inputs and not numbers.values.startswith("int4"):
        return None
    shards = device.shards.get(inputs[0], 1)
    if shards > 1 and (has_order or num_inputs // group % shards):
        return None
    if spec.dims.startswith("e") and (has_zeros or has_order):
        return None
    values = "float8_e4m3fn" if numbers.values == E2M1 else numbers.values
    if values == INT4 and device.platform == "gpu" and can_be_bytes(spec, group, sizes):
        values = PACKED
    return Stored(values, group, has_zeros, has_order, REFERENCE)


def can_be_bytes(spec: Spec, group: int, sizes: Mapping[str, int]) -> bool:
    """Whether a device's part of a matrix is whole registers of `PACKED` values of its groups, and half of its last
    axis that of bytes."""
    last = spec.dims[-1]
    return group % PACKED_TOGETHER == 0 and sizes[last] % 2 == 0 and spec.dims.count(last) == 1 and spec.dims[0] != "e"


def shards_of(mesh_shape: Mapping[str, int]) -> dict[str, int]:
    """Letter -> over how many devices it is split."""
    axes = {letter: (names,) if isinstance(names, str) else names for letter, names in MESH_AXES_OF.items()}
    return {letter: math.prod(mesh_shape.get(name, 1) for name in names) for letter, names in axes.items()}


def forms_in_words(specs: Any) -> dict[str, int]:
    """`GPTQ of 4 bits in groups of 128 as rows of int8` -> how many parameters are so."""
    return Counter(
        f"{spec.scheme.title} as {in_words(spec.quantized)}" for spec in jax.tree.leaves(specs) if spec.scheme
    )
