"""Which letters are split over which axes of the mesh, and how large an axis is once it is split.

The only place that names mesh axes and maps letters to them. It knows neither models nor checkpoints.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpaged.errors import ConfigError
from jaxpaged.params.quantized import (
    GROUP,
    ROWS,
    PackedArray,
    QuantizedArray,
    Stored,
    StoredArray,
    array_bytes,
    groups_spec,
    packed_sizes,
    scales_spec,
    values_sizes,
)
from jaxpaged.params.spec import Spec

EXPERT_AXIS, TENSOR_AXIS = MODEL_AXES = ("expert", "tensor")
"""The axes of the mesh: whole experts are spread over the first, and the columns of each are split over the second.
Heads, other feed-forward blocks and vocabularies are split over both as if they were one."""

DATA_AXIS = "data"
"""The axis before them where attention ranks have a model's experts together (`layers/ranks.py`). Experts are spread
over it too; all other parameters are there once for each rank."""

GROUP_AXIS, CONTEXT_AXIS = CONTEXT_AXES = ("group", "context")
"""The axes of the same devices where a context is split (`context_mesh`)."""

MESH_AXES_OF = dict.fromkeys("NKFOVXxnfpyo", MODEL_AXES) | {"e": EXPERT_AXIS, "Q": TENSOR_AXIS}
"""Letter -> mesh axes. Letters that are not here are whole on every device."""

KEY_HEADS = {"K", "p"}
"""Letters of axes that are repeated where there are fewer than devices."""

SPLIT_EVENLY = {
    "N": "attention heads",
    "o": "attention heads of layers that see all tokens",
    "F": "feed-forward columns",
    "O": "columns of shared experts",
    "x": "channels of convolutions",
    "y": "feed-forward columns of wide blocks",
}
"""Letters of axes that are split over all devices, neither padded nor repeated, and what they are."""


def partition_spec(dims: str, ranks: int = 1) -> PartitionSpec:
    """How an array with these axes is split, where there are so many attention ranks."""
    axes = MESH_AXES_OF | {"e": (DATA_AXIS, EXPERT_AXIS)} if ranks > 1 else MESH_AXES_OF
    return PartitionSpec(*(axes.get(letter) for letter in dims))


def sharding_of(spec: Spec, mesh: Mesh) -> NamedSharding:
    """Where the parts of a parameter live."""
    return NamedSharding(mesh, PartitionSpec() if spec.whole else partition_spec(spec.dims, num_ranks(mesh)))


def num_ranks(mesh: Mesh | AbstractMesh) -> int:
    """How many attention ranks there are."""
    return mesh.shape.get(DATA_AXIS, 1)


def expert_axes(mesh: Mesh | AbstractMesh) -> str | tuple[str, ...]:
    """The axes over which whole experts are spread: with attention ranks over the devices of all of them."""
    return (DATA_AXIS, EXPERT_AXIS) if num_ranks(mesh) > 1 else EXPERT_AXIS


def num_expert_devices(mesh: Mesh | AbstractMesh) -> int:
    """Over how many devices, or groups of them that share each, whole experts are spread."""
    return mesh.shape[EXPERT_AXIS] * num_ranks(mesh)


def num_model_shards(mesh: Mesh) -> int:
    """Over how many devices heads, feed-forward and vocabulary are split: those of a rank."""
    return math.prod(mesh.shape[axis] for axis in MODEL_AXES)


def context_mesh(mesh: Mesh | AbstractMesh, context_shards: int) -> Mesh | AbstractMesh:
    """The devices of `mesh`, in its order, as groups of `context_shards` over which the tokens of a context are split.

    It is a view of its own, since a group are neighbours on the expert axis or on the tensor axis, whichever has all.
    """
    shape, types = (mesh.size // context_shards, context_shards), (AxisType.Auto,) * len(CONTEXT_AXES)
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(shape, CONTEXT_AXES, axis_types=types, abstract_device=mesh.abstract_device)
    return Mesh(mesh.devices.reshape(shape), CONTEXT_AXES, axis_types=types)


def sizes_on(mesh: Mesh, sizes: Mapping[str, int]) -> dict[str, int]:
    """`device_sizes` on a mesh, with places of experts in a multiple of the devices over which they are spread. Raises
    ConfigError when the columns of an expert do not divide either."""
    result = device_sizes(sizes, num_model_shards(mesh))
    if "e" in sizes:
        result["e"] = -(-sizes["e"] // num_expert_devices(mesh)) * num_expert_devices(mesh)
    if sizes.get("Q", 0) % mesh.shape[TENSOR_AXIS]:
        raise ConfigError(
            f"tensor_parallel_size {mesh.shape[TENSOR_AXIS]} does not divide the model's {sizes['Q']} columns of an "
            "expert. Choose a tensor_parallel_size that does, or let devices have whole experts "
            "(enable_expert_parallel)."
        )
    return result


def device_sizes(sizes: Mapping[str, int], num_shards: int) -> dict[str, int]:
    """Letter -> size of the axis over all devices, from its size in the checkpoint.

    Key and value heads are repeated when there are fewer of them than shards; vocabularies are padded to a
    multiple of the shards. Raises ConfigError when heads or feed-forward do not divide. What experts need depends on
    the mesh: `sizes_on`.
    """
    result = dict(sizes)
    for letter in {"V", "X"} & sizes.keys():
        result[letter] = -(-sizes[letter] // num_shards) * num_shards
    for letter in KEY_HEADS & sizes.keys():
        result[letter] = kv_heads_on_devices(sizes[letter], num_shards)
    for letter, name in SPLIT_EVENLY.items():
        if sizes.get(letter, 0) % num_shards:
            raise ConfigError(
                f"tensor_parallel_size {num_shards} does not divide the model's {sizes[letter]} {name}. "
                "Choose a tensor_parallel_size that does."
            )
    return result


def kv_heads_on_devices(num_kv_heads: int, num_shards: int) -> int:
    """Number of key heads over all devices: at least one each, repeated where there are fewer.

    Raises ConfigError when neither number divides the other.
    """
    if num_kv_heads % num_shards == 0:
        return num_kv_heads
    if num_shards % num_kv_heads == 0:
        return num_shards
    raise ConfigError(
        f"tensor_parallel_size {num_shards} and the model's {num_kv_heads} key-value heads do not divide each "
        "other. Choose a tensor_parallel_size that divides the heads, or that they divide."
    )


@dataclass(frozen=True)
class Split:
    """How a weight of groups lies on the devices of a mesh: over which of its axes outputs are split, or inputs."""

    mesh: Mesh
    outputs: Any
    inputs: Any


def split_of(spec: Spec, mesh: Mesh) -> Split | None:
    """How a `StoredArray` is split; None where there is one device, and of experts, which functions of a single device
    multiply (`layers/experts.py`)."""
    if mesh.size == 1 or set(spec.dims) & set("eO"):
        return None
    inputs = spec.hf_dims.split(" ")[-1]
    return Split(mesh, MESH_AXES_OF.get(spec.dims[0]), MESH_AXES_OF.get(inputs[0]))


def param_shapes(specs: Any, config: Any, mesh: Mesh, dtype: Any) -> Any:
    """The pytree of `specs` with a `jax.ShapeDtypeStruct` (with sharding) in place of every spec.

    Enough to compile a program ahead of time without any weights. `config.dim_sizes()` gives letter -> size
    in the checkpoint. A quantized parameter is a `QuantizedArray` of two of them.
    """
    stored = config.dim_sizes()
    on_devices = sizes_on(mesh, stored)

    def array(spec: Spec, dtype: Any, sizes: Mapping[str, int] = on_devices) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(sizes[d] for d in spec.dims), dtype, sharding=sharding_of(spec, mesh))

    def shape(spec: Spec) -> Any:
        if not spec.quantized:
            return array(spec, spec.dtype or dtype)
        name = jnp.dtype(dtype).name
        if spec.quantized in ROWS:
            return QuantizedArray(array(spec, ROWS[spec.quantized]), array(scales_spec(spec), jnp.float32), name)
        if isinstance(spec.quantized, Stored):
            return stored_shape(spec, name)
        bytes_of, scales_of = packed_sizes(spec, on_devices)
        packed = PackedArray(array(spec, jnp.uint8, bytes_of), array(spec, jnp.bfloat16, scales_of), name)
        check_groups(packed.scales, spec.hf_name, num_model_shards(mesh))
        return packed

    def stored_shape(spec: Spec, name: str) -> StoredArray:
        form, (scales, groups) = spec.quantized, groups_spec(spec, on_devices)
        of_groups, zeros = (array(scales, dtype, groups) for dtype in (form.scales, jnp.float32))
        inputs = math.prod(stored[letter] for letter in spec.hf_dims.split(" ")[-1])
        order = jax.ShapeDtypeStruct((inputs,), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
        return StoredArray(
            array(spec, form.values, values_sizes(spec, on_devices)),
            of_groups,
            zeros if form.has_zeros else None,
            order if form.has_order else None,
            name,
            form.kernel,
            split_of(spec, mesh),
        )

    return jax.tree.map(shape, specs)


def check_groups(scales: jax.ShapeDtypeStruct, name: str, num_shards: int) -> None:
    """ConfigError where devices would have parts of groups of inputs."""
    try:
        scales.sharding.shard_shape(scales.shape)
    except ValueError:
        raise ConfigError(
            f"quantization is 'int4', which has groups of {GROUP} inputs; {name} has {scales.shape[-1]} of them for "
            f"each output, which {num_shards} devices cannot share evenly. Choose fewer devices, or 'int8'."
        ) from None


def elements_on_device(leaf: jax.ShapeDtypeStruct) -> int:
    """Numbers of one device's part of an array."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape))


def bytes_on_device(leaf: jax.ShapeDtypeStruct) -> int:
    """Bytes of one device's part of an array."""
    return array_bytes(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
