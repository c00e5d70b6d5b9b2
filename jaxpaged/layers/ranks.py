"""Attention ranks: groups of devices with requests of their own, which have one model's experts together.

A program of several ranks is that of one, on the part that each has of every argument (`of_each_rank`): tokens, block
tables, keys and values lie one rank after the other along the first axis. Only experts look beyond their rank
(`experts.py`). So a map over a rank's devices stands within it (`over_model_axes`). With one rank both change
nothing.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxpaged.params.sharding import DATA_AXIS, MODEL_AXES, num_ranks


def of_each_rank(mesh: Mesh, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[..., Any]:
    """`function` on every rank's part of arguments of these shapes. Results have the ranks along their first axis."""
    if num_ranks(mesh) == 1:
        return function
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=jax.tree.map(rank_part, arguments),
        out_specs=PartitionSpec(DATA_AXIS),
        axis_names={DATA_AXIS},
        check_vma=False,
    )


def rank_part(shape: jax.ShapeDtypeStruct) -> PartitionSpec:
    """Along which axis of an array the ranks have different parts; along none what they have alike."""
    axes = [axis if isinstance(axis, tuple) else (axis,) for axis in shape.sharding.spec]
    return PartitionSpec(*[DATA_AXIS if DATA_AXIS in each else None for each in axes])


def of_any_rank(mesh: Mesh, is_so: jax.Array) -> jax.Array:
    """Whether something is so on some rank, the same on all: within the program of each."""
    return is_so if num_ranks(mesh) == 1 else jax.lax.pmax(is_so.astype("int32"), DATA_AXIS) > 0


def over_model_axes(mesh: Mesh, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`shard_map` over the devices of a rank."""
    # Kernels' loops start from constants, which vary over no axis.
    if num_ranks(mesh) == 1:
        return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.shard_map(
        function,
        mesh=jax.sharding.get_abstract_mesh(),
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(MODEL_AXES),
        check_vma=False,
    )


def lying_like(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    """How a rank's array lies on its devices, to say so in a program."""
    here: Mesh | AbstractMesh = mesh if num_ranks(mesh) == 1 else jax.sharding.get_abstract_mesh()
    return NamedSharding(here, spec)


def of_ranks(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Where arrays lie that each rank has for itself, whole on each of its devices."""
    return NamedSharding(mesh, PartitionSpec(DATA_AXIS) if num_ranks(mesh) > 1 else PartitionSpec())


def on_all_ranks(mesh: Mesh | AbstractMesh, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """What all ranks have together, of one's array whose first axis is not split over its devices."""
    count = num_ranks(mesh)
    if count == 1:
        return shape
    spec = shape.sharding.spec
    assert not spec or spec[0] is None, f"{spec} splits the axis of ranks"
    sharding = NamedSharding(shape.sharding.mesh, PartitionSpec(DATA_AXIS, *spec[1:]))
    return jax.ShapeDtypeStruct((count * shape.shape[0], *shape.shape[1:]), shape.dtype, sharding=sharding)
