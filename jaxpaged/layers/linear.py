"""A product with a weight, by letters, and an optional bias: of plain weights, and of weights of 8 and 4 bits.

A `Linear` says which kernel multiplies (`backend`), so no layer of a model needs to know it. On a CPU our own kernels
are faster than XLA. On a GPU ours multiplies where it was timed and found faster, and reads weights of 8 and 4 bits as
they are. Elsewhere XLA multiplies.

With 8-bit weights on a CPU the activations are split into two planes of 8 bits, so that both factors are integers
(AVX512 VNNI, AMX): x = step * (high + low / 254), step = largest |x| of the row / 127, |x - its planes| <= step / 508.
That is as close as rounding to 16 bits. The sums are exact, so the result is that of weights in 8 bits alone, in any
batch. It is 1.7 to 2 times as fast as bfloat16 weights on AVX512 VNNI. Converting the weights inside of the product,
which XLA:CPU does not fuse, is 2 to 10 times slower than planes of a few rows (scripts/bench_products.py). Without
VNNI the kernels of `few_rows_matmul` take rows of 16 bits, and one plane has them. With VNNI they make the two planes
and join their sums. Elsewhere the weights are converted to the type of x inside of the product, which reads half the
bytes.

This module knows neither heads nor models, nor how weights were quantized.

Letters: I inputs and O outputs of a product, each all of its axes in one.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from jaxpaged.layers.lora import BoundLora, grown_TO
from jaxpaged.layers.ranks import over_model_axes
from jaxpaged.params.quantized import PackedArray, QuantizedArray, Stored, StoredArray
from pallas_kernels.few_rows_matmul import (
    added_matmul,
    adds,
    backends,
    choose_backend,
    few_rows_matmul,
    gated_matmul,
    gates,
    most_of_int16,
    two_plane_matmul,
)
from pallas_kernels.few_rows_matmul.reference import in_steps
from pallas_kernels.few_rows_matmul.scaled import BITS, SCALES, ScaledWeight
from pallas_kernels.int4_matmul import GROUP, int4_matmul
from pallas_kernels.int4_matmul import backends as int4_backends
from pallas_kernels.lora_matmul import choose_backend as choose_lora_matmul
from pallas_kernels.lora_matmul import lora_matmul
from pallas_kernels.quantized_matmul import QuantizedWeight, quantized_matmul
from pallas_kernels.quantized_matmul import choose_backend as choose_stored

XLA, CPU, GPU = "reference", "cpu", "gpu"
"""The backend that is everywhere, and those for weights of any number of bits."""


def choose_matmul_backend(platform: str, num_devices: int, deterministic: bool) -> str:
    """The fastest backend. XLA where it must split products over devices, or where rows must have the same bits in
    larger batches, whose sums XLA orders otherwise than the kernels do."""
    return XLA if num_devices > 1 or deterministic else choose_backend("auto", platform)


def takes_one_row(backend: str, dtype: Any) -> bool:
    """Whether a single row of a model's type is multiplied as fast as two, with weights of any number of bits."""
    return backend == CPU and str(dtype) == "bfloat16"


@struct.dataclass
class Linear:
    """`weight` is [out..., in...], as checkpoints store it, or quantized; `bias` is [out...] or None. `backend` is the
    kernel that multiplies, where it takes the rows (`choose_matmul_backend`). `lora`: what adapters add, within the
    programs of an engine that has them."""

    weight: jax.Array | QuantizedArray | PackedArray | StoredArray
    bias: jax.Array | None = None
    backend: str = struct.field(pytree_node=False, default=XLA)
    lora: BoundLora | None = None


def with_backend[T](specs: T, backend: str) -> T:
    """Specs of parameters whose linears multiply with `backend`. Those of weights that stay float32, such as routers,
    are XLA's."""
    is_linear = lambda node: isinstance(node, Linear)
    bound = lambda p: p.replace(backend=backend) if is_linear(p) and p.weight.dtype != "float32" else p
    return jax.tree.map(bound, specs, is_leaf=is_linear)


def apply_linear(letters: str, x: jax.Array, p: Linear, added: jax.Array | None = None) -> jax.Array:
    """`einsum(letters, x, weight) + bias` in the type of `x`, and `added` more; `letters` is like "TD,NHD->TNH" or
    "TNH,DNH->TD".

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
    if p.lora is not None:
        out = adapted_product(x_TI, p, p.lora, x.dtype).reshape(x.shape[0], *out_shape)
    else:
        if added is not None and p.bias is None and (sum_TO := sum_with_product(x_TI, p, added)) is not None:
            return sum_TO.reshape(x.shape[0], *out_shape)
        out = product(x_TI, p.weight, x.dtype, p.backend).reshape(x.shape[0], *out_shape)
    out = out if p.bias is None else out + p.bias
    return out if added is None else added + out


def product(x_TI: jax.Array, weight: Any, dtype: Any, backend: str) -> jax.Array:
    """x_TI times a weight of any form -> [T, O] in `dtype`."""
    return PRODUCTS.get(type(weight), matrix_product)(x_TI, weight, dtype, backend)


def sum_with_product(x_TI: jax.Array, p: Linear, added: jax.Array) -> jax.Array | None:
    """added + x_TI times the weight [T, O] as one kernel; None where there is none for it."""
    if p.backend != GPU:
        return None
    weight_OI = few_rows_weight(p.weight, -1, x_TI.shape[1])
    if weight_OI is None or not adds(p.backend, x_TI, weight_OI):
        return None
    return added_matmul(in_stored_order(x_TI, p.weight), weight_OI, added.reshape(len(x_TI), -1), backend=p.backend)


def matrix_product(x_TI: jax.Array, weight: jax.Array, dtype: Any, backend: str = XLA) -> jax.Array:
    """x_TI times the weight, whose axes are merged to [O, I] -> [T, O] in `dtype`."""
    weight_OI = weight.reshape(-1, x_TI.shape[1])
    sums_TO = few_rows_product(x_TI, weight_OI, backend, dtype)
    if sums_TO is not None:
        return sums_TO
    precision = jax.lax.Precision.HIGHEST if x_TI.dtype == jnp.float32 else None
    return jnp.einsum("ti,oi->to", x_TI, weight_OI, preferred_element_type=dtype, precision=precision)


def few_rows_weight(weight: Any, *shape: int) -> jax.Array | ScaledWeight | None:
    """A weight whose axes are merged to `shape`, as `few_rows_matmul` takes it; None where it does not."""
    *outputs, num_inputs = shape
    if isinstance(weight, QuantizedArray):
        return ScaledWeight(weight.values.reshape(shape), weight.scales.reshape(*outputs, 1))
    if isinstance(weight, PackedArray):
        packed = weight.packed.reshape(*outputs, num_inputs // 2)
        return ScaledWeight(packed, weight.scales.reshape(*outputs, num_inputs // GROUP))
    if isinstance(weight, StoredArray):
        values = weight.values.reshape(*outputs, num_inputs // (1 + weight.is_packed))
        of_groups = (x if x is None else x.reshape(len(x), *outputs) for x in (weight.scales, weight.zeros))
        return None if weight.kernel != GPU or weight.split else in_groups(values, *of_groups)
    return weight.reshape(shape)


def in_groups(values: jax.Array, scales: jax.Array, zeros: jax.Array | None) -> ScaledWeight | None:
    """A weight with scales and zeros [C, outputs] of groups of inputs; None: `few_rows_matmul` does not take it."""
    is_known = str(values.dtype) in BITS and str(scales.dtype) in SCALES
    return ScaledWeight(values, scales, zeros, groups_first=True) if is_known else None


def few_rows_product(
    x_TI: jax.Array, weight_OI: jax.Array | ScaledWeight, backend: str, dtype: Any = None
) -> jax.Array | None:
    """Sums [T, O] of the products, in float32 or, of int8, in int32, or rounded to `dtype`; None where XLA is to
    multiply."""
    if backend == XLA or backends(backend, x_TI, weight_OI)[backend] is not None:
        return None
    return few_rows_matmul(x_TI, weight_OI, backend=backend, dtype=dtype)


def silu_product(x_TI: jax.Array, p: Linear) -> jax.Array | None:
    """silu(gate) * up [T, O] of a weight [O, 2, I] that has both, as one kernel; None where there is none for it."""
    if p.bias is not None or p.lora is not None or p.backend != GPU:
        return None
    weight_O2I = few_rows_weight(p.weight, -1, 2, x_TI.shape[1])
    if weight_O2I is None or not gates(p.backend, x_TI, weight_O2I):
        return None
    return gated_matmul(in_stored_order(x_TI, p.weight), weight_O2I, backend=p.backend)


def adapted_product(x_TI: jax.Array, p: Linear, lora: BoundLora, dtype: Any) -> jax.Array:
    """x_TI times the weight, and what each token's adapter adds -> [T, O] in `dtype`.

    Where inputs are split over devices, each adds up what its own make of both, so there is one sum over devices as
    without adapters.
    """
    if (split := lora.split) is None or (split.inputs is None and split.outputs is None):
        summed = jnp.float32 if p.backend == CPU else dtype  # as its kernels take and give sums
        return with_adapters(x_TI, product(x_TI, p.weight, summed, p.backend), p, lora, dtype)
    whole, parts = PartitionSpec(), lora_parts(lora, split)
    if split.inputs is None:
        base_TO = product(x_TI, p.weight, dtype, p.backend)
        on_device = lambda x_TI, base_TO, lora: with_adapters(x_TI, base_TO, p, lora, dtype)
        out_specs = PartitionSpec(None, split.outputs)
        return over_model_axes(split.mesh, on_device, (whole, out_specs, parts), out_specs)(x_TI, base_TO, lora)
    ordered_TI, weight = in_stored_order(x_TI, p.weight), p.weight
    if isinstance(weight, StoredArray):
        weight = weight.replace(order=None, split=None)

    def sum_of_devices(x_TI: jax.Array, ordered_TI: jax.Array, weight: Any, lora: BoundLora) -> jax.Array:
        base_TO = product(ordered_TI, weight, dtype, p.backend)
        return jax.lax.psum(with_adapters(x_TI, base_TO, p, lora, dtype), split.inputs)

    of_inputs, of_weight = PartitionSpec(None, split.inputs), parts_by_inputs(weight, out_axes(p), split.inputs)
    in_specs = (of_inputs, of_inputs, of_weight, parts)
    return over_model_axes(split.mesh, sum_of_devices, in_specs, whole)(x_TI, ordered_TI, weight, lora)


def with_adapters(x_TI: jax.Array, base_TO: jax.Array, p: Linear, lora: BoundLora, dtype: Any) -> jax.Array:
    """[T, O] in `dtype`: what the weight made of x, and what the adapters add, on one device.

    On a GPU sums are in the type of x, unless DoRA scales them: a product adds to them there, and nothing need convert
    what it gives.
    """
    is_added = p.backend == GPU and lora.stacks.growth is None
    sum_TO = base_TO.astype(dtype) if is_added else grown_TO(base_TO, lora.stacks.growth, lora.slots)
    for part in lora.stacks.parts:
        a_SrI, b_SrO = (each.reshape(*each.shape[:2], -1) for each in (part.a, part.b))
        x, kind = x_TI.astype(a_SrI.dtype), dtype if part is lora.stacks.parts[-1] else sum_TO.dtype
        backend = choose_lora_matmul("auto", p.backend, x, a_SrI)
        sum_TO = lora_matmul(x, a_SrI, b_SrO, lora.slots.place_T, sum_TO, dtype=kind, backend=backend)
    return sum_TO


def lora_parts(lora: BoundLora, split: Any) -> Any:
    """How the stacks of a layer lie that is split so."""
    inputs, outputs = PartitionSpec(None, None, split.inputs), PartitionSpec(None, None, split.outputs)
    stacks = lora.stacks
    return lora.replace(
        slots=jax.tree.map(lambda _: PartitionSpec(), lora.slots),
        stacks=stacks.replace(
            parts=tuple(part.replace(a=inputs, b=outputs) for part in stacks.parts),
            growth=None if stacks.growth is None else PartitionSpec(None, split.outputs),
        ),
    )


def out_axes(p: Linear) -> int:
    """How many axes of its weight are outputs."""
    return p.lora.stacks.parts[0].b.ndim - 2


def parts_by_inputs(weight: Any, num_out_axes: int, inputs: Any) -> Any:
    """How the arrays of a weight lie whose first input axis is split: scales of outputs are whole, those of groups have
    their groups first."""
    split = PartitionSpec(*(None,) * num_out_axes, inputs)
    if isinstance(weight, QuantizedArray):
        return weight.replace(values=split, scales=PartitionSpec())
    if isinstance(weight, PackedArray):
        return weight.replace(packed=split, scales=split)
    if isinstance(weight, StoredArray):
        groups = PartitionSpec(inputs)
        return weight.replace(values=split, scales=groups, zeros=None if weight.zeros is None else groups)
    return split


def scaled_product(x_TI: jax.Array, weight: Any, dtype: Any, backend: str) -> jax.Array | None:
    """[T, O] in `dtype` of a weight of 8 or 4 bits, read as it is; None where there is no kernel for that."""
    if backend != GPU:
        return None
    return few_rows_product(x_TI, few_rows_weight(weight, -1, x_TI.shape[1]), backend, dtype)


def rows_product(x_TI: jax.Array, weight: QuantizedArray, dtype: Any, backend: str = XLA) -> jax.Array:
    """x_TI times the weight, whose axes are merged to [O, I] -> [T, O] in `dtype`."""
    if (sums_TO := scaled_product(x_TI, weight, dtype, backend)) is not None:
        return sums_TO
    value_OI, scale_O = weight.values.reshape(-1, x_TI.shape[1]), weight.scales.reshape(-1)
    default = lambda x_TI, value_OI, scale_O: (converted_product(x_TI, value_OI) * scale_O).astype(dtype)
    if value_OI.dtype != jnp.int8:
        return default(x_TI, value_OI, scale_O)
    on_cpu = partial(whole_product, dtype=dtype, backend=CPU if backend == CPU else XLA)
    return jax.lax.platform_dependent(x_TI, value_OI, scale_O, cpu=on_cpu, default=default)


def whole_product(
    x_TI: jax.Array, value_OI: jax.Array, scale_O: jax.Array, dtype: Any, backend: str = XLA
) -> jax.Array:
    """[T, O] in `dtype` from one product of integers, with one plane of x or two."""
    steps_TI, step_T1 = in_steps(x_TI, most_of_int16(x_TI.shape[1]))
    # A NaN makes the whole row's step NaN, whatever it is as a whole number.
    sums_TO = few_rows_product(jnp.round(steps_TI).astype(jnp.int16), value_OI, backend)
    if sums_TO is not None:
        return (sums_TO * step_T1 * scale_O).astype(dtype)
    return two_plane_matmul(x_TI, value_OI, scale_O, dtype=dtype, backend=backend)


def converted_product(x_TI: jax.Array, value_OI: jax.Array) -> jax.Array:
    """Float32 [T, O]; whole numbers up to 127 and 8-bit floats are exact in every type of x."""
    precision = jax.lax.Precision.HIGHEST if x_TI.dtype == jnp.float32 else None
    return jnp.einsum(
        "TI,OI->TO", x_TI, value_OI.astype(x_TI.dtype), preferred_element_type=jnp.float32, precision=precision
    )


def int4_product(x_TI: jax.Array, weight: PackedArray, dtype: Any, backend: str = XLA) -> jax.Array:
    """x_TI times the weight, whose axes are merged to [O, I] -> [T, O] in `dtype`."""
    if (sums_TO := scaled_product(x_TI, weight, dtype, backend)) is not None:
        return sums_TO
    num_inputs = x_TI.shape[1]
    packed_OB, scale_OC = weight.packed.reshape(-1, num_inputs // 2), weight.scales.reshape(-1, num_inputs // GROUP)
    takes = backend == CPU and int4_backends(backend, x_TI, packed_OB, scale_OC)[backend] is None
    return int4_matmul(x_TI, packed_OB, scale_OC, backend=backend if takes else XLA).astype(dtype)


def stored_product(x_TI: jax.Array, weight: StoredArray, dtype: Any, backend: str = XLA) -> jax.Array:
    """x_TI times the weight, whose axes are merged to [O, I] -> [T, O] in `dtype`. Its own kernel multiplies, and few
    rows on a GPU that of `few_rows_matmul`."""
    x_TI = in_stored_order(x_TI, weight)
    of_groups = [part if part is None else part.reshape(part.shape[0], -1) for part in (weight.scales, weight.zeros)]
    values_OI = weight.values.reshape(-1, x_TI.shape[1] // (1 + weight.is_packed))
    operand, split = QuantizedWeight(values_OI, *of_groups), weight.split

    def whole(x_TI: jax.Array, operand: QuantizedWeight) -> jax.Array:
        if weight.kernel == GPU:
            scaled = in_groups(operand.values_FD, operand.scale_CF, operand.zero_CF)
            if scaled is not None and (few_TO := few_rows_product(x_TI, scaled, GPU, dtype)) is not None:
                return few_TO
        return quantized_matmul(x_TI, operand, backend=weight.kernel).astype(dtype)

    if split is None:
        return whole(x_TI, operand)

    def on_device(x_TI: jax.Array, operand: QuantizedWeight) -> jax.Array:
        out_TO = whole(x_TI, operand)
        return out_TO if split.inputs is None else jax.lax.psum(out_TO, split.inputs)

    groups = PartitionSpec(split.inputs, split.outputs)
    parts = QuantizedWeight(
        PartitionSpec(split.outputs, split.inputs), *(part if part is None else groups for part in of_groups)
    )
    in_specs = (PartitionSpec(None, split.inputs), parts)
    return over_model_axes(split.mesh, on_device, in_specs, PartitionSpec(None, split.outputs))(x_TI, operand)


def in_stored_order(x_TI: jax.Array, weight: Any) -> jax.Array:
    """Inputs as a weight has them, which may be sorted by their groups."""
    is_sorted = isinstance(weight, StoredArray) and weight.order is not None
    return jnp.take(x_TI, weight.order, axis=1) if is_sorted else x_TI


def stored_kernel(platform: str, dtype: Any, form: Stored, outputs: int, inputs: int) -> str | None:
    """The kernel that multiplies with a weight of a form; None: only XLA does, which writes it to memory first."""
    struct = jax.ShapeDtypeStruct
    scales, zeros = (struct((inputs // form.group, outputs), jnp.dtype(kind)) for kind in (form.scales, "float32"))
    values = struct((outputs, inputs // (1 + form.is_packed)), jnp.dtype(form.values))
    weight = QuantizedWeight(values, scales, zeros if form.has_zeros else None)
    name = choose_stored("auto", platform, struct((LEAST_ROWS, inputs), jnp.dtype(dtype)), weight)
    return None if name == XLA else name


LEAST_ROWS = 8
"""Of a product, as one is that asks whether there is a kernel."""
PRODUCTS = {QuantizedArray: rows_product, PackedArray: int4_product, StoredArray: stored_product}
"""Of weights that are no plain arrays."""
