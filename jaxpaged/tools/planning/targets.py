"""Devices by name, present or not: what they can do, and a mesh of them to lower and compile for.

A TPU target is a topology such as `v6e:2x4`, which Google calls `v6e-8` (see below); libtpu compiles for it on any
x86-64 machine. For a GPU target such as `h100:8` CUDA's compilers do, where they are installed; else its mesh has
shapes only. This module knows no model.
"""

import itertools
import math
import os
import re
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from jaxpaged.distributed.mesh import (
    Coordinates,
    axes_of,
    check_mesh_size,
    check_num_stages,
    make_mesh,
    meshes_in_line,
    sizes_of,
    torus_sizes,
)
from jaxpaged.errors import ConfigError, did_you_mean, how_to_install, is_installed
from jaxpaged.tools.planning.plan import DeviceFacts
from pallas_kernels import gpu_targets

CHIPS = {
    "v5e": pltpu.ChipVersion.TPU_V5E,
    "v5p": pltpu.ChipVersion.TPU_V5P,
    "v6e": pltpu.ChipVersion.TPU_V6E,
    "tpu7x": pltpu.ChipVersion.TPU_7X,
}
LINKS = {"v5e": 2.0e11, "v5p": 6.0e11, "v6e": 4.48e11, "tpu7x": 6.0e11}
"""Bytes per second of a device's interconnect (cloud.google.com/tpu/docs: 1600, 4800, 3584 Gbit/s a chip; a TPU7x
chip has 1.2 TB/s and two devices)."""
ONE_HOST = {"v5e": (2, 4), "v5p": (2, 2, 1), "v6e": (2, 4), "tpu7x": (2, 2, 1)}
"""The largest topology of one host (cloud.google.com/tpu/docs). Larger ones are spread over hosts of four chips."""
CHIPS_OF_MANY_HOSTS = 4
GPUS_PER_HOST = 8
Bounds = tuple[int, ...]

GENERATIONS = {
    "v5e": "v5e",
    "v5litepod": "v5e",
    "v5lite": "v5e",
    "tpu-v5-lite-podslice": "v5e",
    "tpu-v5-lite-device": "v5e",
    "ct5lp-hightpu": "v5e",
    "ct5l-hightpu": "v5e",
    "v5p": "v5p",
    "tpu-v5p-slice": "v5p",
    "ct5p-hightpu": "v5p",
    "v6e": "v6e",
    "trillium": "v6e",
    "tpu-v6e-slice": "v6e",
    "tpu-v6e-device": "v6e",
    "ct6e-standard": "v6e",
    "tpu7x": "tpu7x",
    "v7x": "tpu7x",
    "ironwood": "tpu7x",
    "tpu7x-standard": "tpu7x",
}
"""By every name that they have."""
CORES_PER_CHIP = {"v5e": 1, "v5p": 2, "v6e": 1, "tpu7x": 2}
PLANE = tuple((2 ** (k // 2), 2 ** ((k + 1) // 2)) for k in (0, 2, 3, 4, 5, 6, 7, 8))
CUBES = ((1, 1, 1), (2, 2, 1), *((2 ** (k // 3), 2 ** ((k + 1) // 3), 2 ** ((k + 2) // 3)) for k in range(3, 13)))
SHAPES: dict[str, tuple[Bounds, ...]] = {"v5e": PLANE, "v6e": PLANE, "v5p": CUBES, "tpu7x": CUBES}
"""What a slice of so many chips looks like, unless somebody asks for another shape (cloud.google.com/tpu/docs)."""
SLICE = re.compile(r"(?P<family>[a-z0-9-]+?)-(?P<count>[1-9]\d{0,4})(?P<machine>t?)")
OLD = re.compile(r"(tpu-)?v[234](i|-podslice|-lite)?([-:].*)?")


def gib(size: float) -> int:
    return int(size * 2**30)


GPUS = {
    "a100-40gb": DeviceFacts("NVIDIA A100 40GB", gib(39.3), 1.555e12, 3.12e14, 6.0e11),
    "a100-80gb": DeviceFacts("NVIDIA A100 80GB", gib(79.1), 2.039e12, 3.12e14, 6.0e11),
    "b200": DeviceFacts("NVIDIA B200", gib(178.3), 7.67e12, 2.25e15, 1.8e12),
    "h100": DeviceFacts("NVIDIA H100 SXM", gib(79.1), 3.35e12, 9.89e14, 9.0e11),
    "h200": DeviceFacts("NVIDIA H200", gib(139.7), 4.8e12, 9.89e14, 9.0e11),
    "l4": DeviceFacts("NVIDIA L4", gib(22.0), 3.0e11, 1.21e14, 6.4e10),
    "l40s": DeviceFacts("NVIDIA L40S", gib(44.3), 8.64e11, 3.62e14, 6.4e10),
}
"""Memory as CUDA counts it, of which jax's pool is a share: less than the name says, since the driver and error
correction keep some. The rest is from NVIDIA's data sheets: the memory's bandwidth, dense bf16 operations, NVLink or
PCIe in both directions."""

COMPILED_GPUS = {"a100-80gb": "a100", "b200": "b200", "h100": "h100", "h200": "h200"}
"""Those that the extra `aot-gpu` compiles for, by what `pallas_kernels.gpu_targets` calls them."""

RUNTIME_SHARE = 0.025
"""Of a TPU's memory, what its runtime keeps for itself: a v5e reports 15.75 of 16 GiB, a v6e 31.25 of 32."""


@dataclass(frozen=True)
class Target:
    """`platform` is "tpu" or "gpu". `devices` are those of a topology; empty where nothing can be compiled.

    `sizes` are those of the meshes that its devices can be, `host_sizes` and `host_name` belong to the largest host
    that has such devices.
    """

    name: str
    platform: str
    device: DeviceFacts
    num_devices: int
    devices: tuple[jax.Device, ...] = ()
    num_hosts: int = 1
    sizes: tuple[int, ...] = (1,)
    host_sizes: tuple[int, ...] = (1,)
    host_name: str = ""

    @property
    def compiles(self) -> bool:
        return bool(self.devices)

    def mesh(self, size: int, spreads_experts: bool = False, ranks: int = 1) -> Mesh | AbstractMesh:
        """A mesh of `size` devices of the target for each of its attention ranks, real ones if it compiles. Raises
        ConfigError if there is none."""
        if self.compiles:
            return make_mesh(size, self.devices, spreads_experts=spreads_experts, ranks=ranks)
        check_mesh_size(size, self.sizes, self.num_devices, f"devices of {self.name}", ranks)
        return shapes_mesh(size, spreads_experts, AbstractDevice(self.device.name, None, self.platform), ranks)

    def stage_meshes(
        self, size: int, num_stages: int, spreads_experts: bool = False, ranks: int = 1
    ) -> tuple[Mesh, ...] | tuple[AbstractMesh, ...]:
        """A mesh for each stage of a pipeline, of the devices that an engine would give it; one, of all attention
        `ranks`, if there are no stages. Raises ConfigError."""
        if num_stages > 1:
            check_num_stages(size, num_stages, self.num_devices, f"devices of {self.name}")
            if self.compiles:
                return meshes_in_line(size, num_stages, self.devices, spreads_experts)
        return (self.mesh(size, spreads_experts, ranks),) * num_stages


def shapes_mesh(
    size: int, spreads_experts: bool = False, device: AbstractDevice | None = None, ranks: int = 1
) -> AbstractMesh:
    """A mesh with a size and no devices: enough for shapes and shardings. `device`: what each is, if it matters."""
    shape, axes = axes_of(size, spreads_experts, ranks)
    return AbstractMesh(shape, axes, axis_types=(AxisType.Auto,) * len(axes), abstract_device=device)


def known_targets() -> str:
    tpus = f"{', '.join(f'{chip}:AxB' for chip in CHIPS)}, v6e-8, v5litepod-8, v5p-16, ... (TPU)"
    return f"{tpus}, {', '.join(f'{gpu}[:N]' for gpu in GPUS)} (GPU)"


def parse_target(name: str, *, compile: bool = True) -> Target:
    """The target called `name`; with `compile`, a TPU's topology is opened, which needs libtpu, and GPUs of one host
    where the extra `aot-gpu` is installed; from shapes alone they can be planned for without.

    Raises ConfigError for unknown names, impossible topologies, and when libtpu is missing.
    """
    kind, _, shape = topology_of(name).partition(":")
    if kind in GPUS:
        if shape and not re.fullmatch("[1-9][0-9]{0,3}", shape):
            raise ConfigError(f"target {name!r} has {shape!r} GPUs; write a number, as in {kind}:8.")
        return gpu_target(name, kind, int(shape or 1), compile)
    if kind not in CHIPS:
        raise ConfigError(f"unknown target {name!r}.{near_targets(kind)} Known are {known_targets()}.")
    if not re.fullmatch(r"[1-9]\d?(x[1-9]\d?){1,2}", shape):
        raise ConfigError(
            f"target {name!r} needs the shape of its topology, as in v6e:2x4 or v5p:2x2x1, or the number that Google "
            "names slices by, as in v6e-8 or v5p-8."
        )
    bounds = tuple(map(int, shape.split("x")))
    return tpu_target(topology_name(kind, bounds), kind, bounds, compile)


def near_targets(name: str) -> str:
    """` Did you mean 'h100:8'?` for a name that is nearly one; or an empty string."""
    for gpu in GPUS:
        counted = re.fullmatch(rf"(?:([1-9]\d*)x)?{gpu}(?:[x-]?([1-9]\d*))?", name)
        if counted:
            return f" Did you mean '{gpu}:{counted[1] or counted[2]}'?"
    known = [*CHIPS, *GPUS]
    return did_you_mean(name, known) or did_you_mean(re.sub(r"-\d+$", "", name), known)


def gpu_target(name: str, kind: str, count: int, compile: bool) -> Target:
    """Any number of GPUs are a mesh; whether a cluster has more than eight in a host is not known by name."""
    devices: tuple[jax.Device, ...] = ()
    if compile and kind in COMPILED_GPUS and count <= GPUS_PER_HOST and gpu_targets.why_not() is None:
        devices = gpu_targets.devices_of(gpu_targets.TARGETS[COMPILED_GPUS[kind]], count)
    sizes, host_sizes = tuple(range(1, count + 1)), tuple(range(1, GPUS_PER_HOST + 1))
    num_hosts = math.ceil(count / GPUS_PER_HOST)
    return Target(name, "gpu", GPUS[kind], count, devices, num_hosts, sizes, host_sizes, f"{kind}:{GPUS_PER_HOST}")


def tpu_target(name: str, kind: str, bounds: tuple[int, ...], compile: bool) -> Target:
    """Chips in a box of `bounds`, opened to compile for or as a shape only: both have the same sizes."""
    chip, host_bounds = CHIPS[kind], ONE_HOST[kind]
    cores_per_device = 2 if chip.supports_megacore else 1
    devices_per_chip = chip.num_physical_tensor_cores_per_chip // cores_per_device
    num_chips = math.prod(bounds)
    num_hosts = 1 if num_chips <= math.prod(host_bounds) else math.ceil(num_chips / CHIPS_OF_MANY_HOSTS)
    host = (tuple(torus_sizes(coordinates_of(host_bounds, devices_per_chip))), topology_name(kind, host_bounds))
    if compile:
        devices = open_topology(topology_name(kind, bounds), bounds, num_hosts)
        facts, sizes = tpu_facts(kind, devices[0].num_cores), tuple(sizes_of(devices))
        return Target(name, "tpu", facts, len(devices), devices, num_hosts, sizes, *host)
    coordinates = coordinates_of(bounds, devices_per_chip)
    facts = tpu_facts(kind, cores_per_device)
    return Target(name, "tpu", facts, len(coordinates), (), num_hosts, tuple(torus_sizes(coordinates)), *host)


def topology_name(kind: str, bounds: tuple[int, ...]) -> str:
    return f"{kind}:{'x'.join(map(str, bounds))}"


def coordinates_of(bounds: tuple[int, ...], devices_per_chip: int) -> list[Coordinates]:
    """Where the devices of a topology lie, in their order: cores of a chip first, then along the first axis."""
    axes = [range(extent) for extent in reversed(bounds)]
    return [(*reversed(chip), core) for chip in itertools.product(*axes) for core in range(devices_per_chip)]


def tpu_facts(kind: str, num_cores: int) -> DeviceFacts:
    """One device of `num_cores` TensorCores, from the numbers that JAX keeps of every chip."""
    core = pltpu.get_tpu_info_for_chip(CHIPS[kind], num_cores)
    return DeviceFacts(
        f"TPU {kind.removeprefix('tpu')}",
        int(core.hbm_capacity_bytes * num_cores * (1 - RUNTIME_SHARE)),
        float(core.mem_bw_bytes_per_second * num_cores),
        float(core.bf16_ops_per_second * num_cores),
        LINKS[kind],
    )


def open_topology(name: str, bounds: tuple[int, ...], num_hosts: int) -> tuple[jax.Device, ...]:
    """The devices of a TPU topology, to compile for. This process then computes on the CPU.

    Raises ConfigError when libtpu is missing or there is no such topology.
    """
    # libtpu would ask the metadata server of a TPU VM, and wait for one that is not there.
    for variable, value in {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }.items():
        os.environ.setdefault(variable, value)
    if not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")
    settings = {"chips_per_host_bounds": [*bounds, *[1] * (3 - len(bounds))]} if num_hosts == 1 else {}
    try:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=name, **settings)
    except Exception as error:  # jax raises whatever the plugin's loader or the plugin itself raised
        text = str(error)
        if not is_installed("libtpu") or "libtpu" in text.lower():
            raise ConfigError(
                "compiling for a TPU needs libtpu, which works on any x86-64 Linux machine. "
                f"To install it, {how_to_install('aot-tpu')}; or leave compiling out with --no-compile. ({text})"
            ) from error
        raise ConfigError(f"there is no topology {name}: {text.splitlines()[0]}") from error
    return tuple(np.array(topology.devices, dtype=object).ravel())


# ---- names of slices -------------------------------------------------------------------------------


def topology_of(name: str) -> str:
    """The topology that one of Google's names means; other names as they are. Raises ConfigError for a slice that does
    not exist, and for generations that nothing is planned for."""
    lower = name.lower()
    if OLD.fullmatch(lower):
        raise ConfigError(f"target {name!r} is a TPU of an older generation than v5e, which jaxpaged does not run on.")
    slice_ = SLICE.fullmatch(lower)
    if slice_ is not None and slice_["family"] in GENERATIONS:
        return topology_of_slice(name, slice_["family"], int(slice_["count"]), bool(slice_["machine"]))
    family, colon, shape = lower.partition(":")
    return f"{GENERATIONS.get(family, family)}{colon}{shape}"


def topology_of_slice(name: str, family: str, count: int, is_machine: bool) -> str:
    generation = GENERATIONS[family]
    each = 1 if is_machine else CORES_PER_CHIP[generation]
    shapes = {math.prod(bounds) * each: "x".join(map(str, bounds)) for bounds in SHAPES[generation]}
    if count in shapes:
        return f"{generation}:{shapes[count]}"
    counted = "chips" if each == 1 else "TensorCores, two a chip"
    raise ConfigError(
        f"target {name!r}: no slice of {generation} has {count} {counted}. Known are {', '.join(map(str, shapes))}; "
        f"for another shape write its topology, as in {generation}:{shapes[4 * each]}."
    )
