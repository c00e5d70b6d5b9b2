"""The named mesh over which parameters and KV blocks are sharded; on one device it is a mesh of one.

Knows devices, where they lie, and axis names. Which array axis goes where is said in `params/sharding.py`. What can be
a mesh is decided here for devices that are present as for those of a plan.
"""

import math
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

from jaxpaged.distributed.backend import start_backend
from jaxpaged.errors import ConfigError
from jaxpaged.params.sharding import DATA_AXIS, MODEL_AXES

Coordinates = tuple[int, ...]
"""Where a TPU device lies: the coordinates of its chip in the torus, and which of the chip's cores it is."""


def make_mesh(
    tensor_parallel_size: int,
    devices: Sequence[jax.Device] | None = None,
    num_processes: int = 1,
    *,
    spreads_experts: bool = False,
    ranks: int = 1,
) -> Mesh:
    """A mesh of `tensor_parallel_size` devices with the axes `MODEL_AXES`, of which one has them all: see `mesh_shape`.
    Of several attention `ranks`, each has so many neighbouring ones, and `DATA_AXIS` comes first.

    `devices` are the first ones of the default backend unless given; those of `num_processes` that have joined are all
    of them. The axis type is Auto: with explicit axes a product that is split along its contracted axis raises. Raises
    ConfigError when there is no such mesh, with the sizes that there are, and when the devices of the backend belong to
    more or fewer processes.
    """
    if devices is None:
        devices = start_backend()
        kinds = f"{len(devices)} {devices[0].platform} devices"
        check_processes(num_processes, jax.process_count(), kinds)
        if num_processes > 1 and tensor_parallel_size != len(devices):
            raise ConfigError(
                f"tensor_parallel_size is {tensor_parallel_size}, but the {num_processes} processes of this engine "
                f"have {kinds}, and compute with all of them. Set it to {len(devices)}."
            )
    kind = devices[0].platform if devices else "no"
    check_mesh_size(tensor_parallel_size, sizes_of(devices), len(devices), f"{kind} devices", ranks)
    size = tensor_parallel_size * ranks
    # Neighbours on a line are neighbours on whichever axis has all devices: jax orders a line best.
    line = jax.make_mesh((size,), ("line",), axis_types=(AxisType.Auto,), devices=list(devices[:size]))
    shape, axes = axes_of(tensor_parallel_size, spreads_experts, ranks)
    return Mesh(line.devices.reshape(shape), axes, axis_types=(AxisType.Auto,) * len(axes))


def stage_meshes(
    tensor_parallel_size: int,
    num_stages: int,
    num_processes: int = 1,
    *,
    spreads_experts: bool = False,
    ranks: int = 1,
) -> tuple[Mesh, ...]:
    """A mesh for each stage of a pipeline, of neighbouring devices; one mesh unless there are several stages. Stages
    have no `ranks`.

    Raises ConfigError when there are too few devices, or those of a stage form no mesh.
    """
    if num_stages == 1:
        settings = {"num_processes": num_processes, "spreads_experts": spreads_experts, "ranks": ranks}
        return (make_mesh(tensor_parallel_size, **settings),)
    devices = start_backend()
    check_processes(num_processes, jax.process_count(), f"{len(devices)} {devices[0].platform} devices")
    check_num_stages(tensor_parallel_size, num_stages, len(devices), f"{devices[0].platform} devices")
    return meshes_in_line(tensor_parallel_size, num_stages, devices, spreads_experts)


def meshes_in_line(
    tensor_parallel_size: int, num_stages: int, devices: Sequence[jax.Device], spreads_experts: bool
) -> tuple[Mesh, ...]:
    """Meshes of neighbouring devices, the first of them first. Raises ConfigError when some form no mesh."""
    firsts = range(0, tensor_parallel_size * num_stages, tensor_parallel_size)
    parts = [devices[i : i + tensor_parallel_size] for i in firsts]
    return tuple(make_mesh(tensor_parallel_size, part, spreads_experts=spreads_experts) for part in parts)


def check_num_stages(tensor_parallel_size: int, num_stages: int, num_devices: int, devices: str) -> None:
    """Raise ConfigError where there are too few devices. `devices` says what they are."""
    if (wanted := tensor_parallel_size * num_stages) > num_devices:
        raise ConfigError(
            f"pipeline_parallel_size {num_stages} times tensor_parallel_size {tensor_parallel_size} is {wanted}, but "
            f"there are only {num_devices} {devices}. Lower one of them; or, to try it on a CPU, "
            f"set the environment variable XLA_FLAGS=--xla_force_host_platform_device_count={wanted}."
        )


def mesh_shape(size: int, spreads_experts: bool) -> tuple[int, int]:
    """(devices over which whole experts are spread, devices over which each of them is split)."""
    return (size, 1) if spreads_experts else (1, size)


def axes_of(size: int, spreads_experts: bool, ranks: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """(Sizes, names) of the axes of a mesh whose ranks have `size` devices."""
    shape = mesh_shape(size, spreads_experts)
    return ((ranks, *shape), (DATA_AXIS, *MODEL_AXES)) if ranks > 1 else (shape, MODEL_AXES)


def check_slice(num_engines: int, mesh: Mesh) -> None:
    """Raise ConfigError when the process of one of several engines sees more devices than its mesh has: it would take
    those of the others. On a CPU every process has devices of its own."""
    first = mesh.devices.flat[0]
    num_devices = len(first.client.devices())
    if num_engines > 1 and first.platform != "cpu" and num_devices != mesh.devices.size:
        raise ConfigError(
            f"data_parallel_size is {num_engines}, and every engine core should see its own {mesh.devices.size} "
            f"{first.platform} devices only, but this one sees {num_devices}. How devices of this kind are divided is "
            "not known: start an engine for each, with data_parallel_size 1."
        )


def sizes_of(devices: Sequence[jax.Device]) -> list[int]:
    """The sizes of the meshes that the first of these devices can be."""
    if devices and devices[0].platform == "tpu":
        return torus_sizes([(*device.coords, device.core_on_chip) for device in devices])
    return list(range(1, len(devices) + 1))


def torus_sizes(coordinates: Sequence[Coordinates]) -> list[int]:
    """The sizes of the meshes that the first of these TPU devices can be.

    jax wants a box of the torus without holes. Of those XLA's collectives take powers of two and the whole: its
    compiler ends with a failed check for 6 devices of a v6e:2x4, and for 4 that are not the first ones.
    """
    count = len(coordinates)
    return [n for n in range(1, count + 1) if (n == count or n.bit_count() == 1) and is_box(coordinates[:n])]


def is_box(coordinates: Sequence[Coordinates]) -> bool:
    """Whether devices at these coordinates fill the smallest box around them."""
    return math.prod(max(axis) - min(axis) + 1 for axis in zip(*coordinates, strict=True)) == len(set(coordinates))


def check_mesh_size(size: int, sizes: Sequence[int], num_devices: int, devices: str, ranks: int = 1) -> None:
    """Raise ConfigError unless `sizes` have `size`, and that of all `ranks`. `devices` says what the devices are."""
    if ranks > 1 and (wanted := size * ranks) not in sizes:
        raise ConfigError(
            f"data_parallel_size {ranks} times tensor_parallel_size {size} is {wanted}, and no {wanted} of "
            f"{num_devices} {devices} form a mesh. Sizes that do: {', '.join(map(str, sizes))}. Lower one of them; or, "
            "to try it on a CPU, set the environment variable "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={wanted}."
        )
    if size > num_devices:
        raise ConfigError(
            f"tensor_parallel_size is {size}, but there are only {num_devices} {devices}. "
            "Lower it; or, to try it on a CPU, set the environment variable "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={size}."
        )
    if size not in sizes:
        raise ConfigError(
            f"tensor_parallel_size is {size}, but no {size} of {num_devices} {devices} form a mesh: they must fill a "
            f"rectangle of the torus, and be a power of two or all. Sizes that do: {', '.join(map(str, sizes))}."
        )


def check_processes(wanted: int, found: int, devices: str) -> None:
    """Raise ConfigError unless the devices are those of as many processes as take part."""
    if wanted != found:
        raise ConfigError(
            f"these {devices} belong to {found} processes, one on each host of a slice, and {wanted} takes part. Start "
            "the engine on every host: serve --nnodes and --node-rank."
        )


def across_hosts(num_hosts: int, devices: str) -> str:
    return f"{devices} are spread over {num_hosts} hosts, and an engine across hosts computes with all devices of each."
