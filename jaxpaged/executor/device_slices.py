"""Which devices of this host each of several engine cores has for itself, said before its process begins.

A process sees its own devices only, so that in each of them they have the same numbers, and a program that one has
compiled is the same for all. How that is done depends on the platform:

    GPU   CUDA_VISIBLE_DEVICES; where it is set already, its devices are dealt out
    TPU   TPU_VISIBLE_CHIPS with the bounds of such a slice, and a port of its own for each process
    CPU   every process has virtual devices of its own (XLA_FLAGS), and an equal share of the processors

No device is touched here, and jax is not imported.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxpaged.errors import ConfigError, is_installed

GPU_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
CHIP_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
"""TPU chips of a process -> the box that they fill."""
FIRST_TPU_PORT = 8476
"""libtpu's own; each process listens on another one."""


@dataclass(frozen=True)
class DeviceSlice:
    """What a process is started with: variables of its environment, and the processors that it may use; None: all."""

    environment: Mapping[str, str] = field(default_factory=dict)
    processors: frozenset[int] | None = None


ALL_DEVICES = DeviceSlice()


@dataclass(frozen=True)
class Host:
    """What this host has: the platform that jax would choose, the names of its devices, none of a CPU, processors."""

    platform: str
    devices: Sequence[str]
    processors: Sequence[int]


def this_host(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> Host:
    """Found without starting jax: by what the drivers show below `root`, and the plugins that are installed."""
    wanted = environment.get("JAX_PLATFORMS", "").split(",")[0]
    processors = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if wanted in ("", "cuda", "gpu") and any(map(is_installed, GPU_PLUGINS)):
        given = environment.get("CUDA_VISIBLE_DEVICES")
        present = [str(number) for number, _ in enumerate(names_in(root / "proc/driver/nvidia/gpus", r".+"))]
        if gpus := present if given is None else [name.strip() for name in given.split(",") if name.strip()]:
            return Host("gpu", gpus, processors)
    if wanted in ("", "tpu") and is_installed("libtpu"):
        present = names_in(root / "dev", r"accel\d+") or names_in(root / "dev/vfio", r"\d+")
        chips = environment.get("TPU_VISIBLE_CHIPS", ",".join(map(str, range(len(present)))))
        if names := [name for name in chips.split(",") if name]:
            return Host("tpu", names, processors)
    return Host("cpu", (), processors)


def names_in(folder: Path, pattern: str) -> list[str]:
    """Sorted; none where there is no such folder."""
    try:
        return sorted(each.name for each in folder.iterdir() if re.fullmatch(pattern, each.name))
    except OSError:
        return []


def device_slices(num_cores: int, devices_each: int, host: Host | None = None) -> list[DeviceSlice]:
    """For each of `num_cores` engine cores of `devices_each` devices. One core has all that there is, as it finds it.

    Raises ConfigError when the host has too few devices, or no such slices.
    """
    if num_cores == 1:
        return [ALL_DEVICES]
    host = host or this_host()
    if host.platform == "cpu":
        return cpu_slices(num_cores, devices_each, host.processors)
    check_devices(num_cores, devices_each, host)
    own = [",".join(host.devices[rank * devices_each : (rank + 1) * devices_each]) for rank in range(num_cores)]
    if host.platform == "gpu":
        return [DeviceSlice({"CUDA_VISIBLE_DEVICES": names}) for names in own]
    return [DeviceSlice(tpu_environment(names, devices_each, rank)) for rank, names in enumerate(own)]


def check_devices(num_cores: int, devices_each: int, host: Host) -> None:
    needed, present = num_cores * devices_each, len(host.devices)
    if needed > present:
        raise ConfigError(
            f"data_parallel_size is {num_cores}, and each core has {devices_each} devices (tensor_parallel_size times "
            f"pipeline_parallel_size), which takes {needed}, but this host has {present} of the platform "
            f"{host.platform!r}. Lower one of them."
        )
    if host.platform == "tpu" and devices_each not in CHIP_BOUNDS:
        raise ConfigError(
            f"data_parallel_size is {num_cores}, and each core has {devices_each} devices, but the TPU chips of a host "
            f"can be divided into slices of {', '.join(map(str, CHIP_BOUNDS))} only. Choose one of these sizes."
        )


def tpu_environment(chips: str, num_chips: int, rank: int) -> dict[str, str]:
    """Variables by which libtpu takes some chips of a host for a process that knows of no other."""
    port = FIRST_TPU_PORT + rank
    return {
        "TPU_VISIBLE_CHIPS": chips,
        "TPU_CHIPS_PER_PROCESS_BOUNDS": CHIP_BOUNDS[num_chips],
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_MESH_CONTROLLER_ADDRESS": f"localhost:{port}",
        "TPU_MESH_CONTROLLER_PORT": str(port),
    }


def cpu_slices(num_cores: int, devices_each: int, processors: Sequence[int]) -> list[DeviceSlice]:
    """Shares of equal size, since XLA divides its work by it: what one compiled suits all. Where there would be less
    than a processor for each device, nobody has a share of their own."""
    share = len(processors) // num_cores
    if share < devices_each:
        return [ALL_DEVICES] * num_cores
    return [DeviceSlice({}, frozenset(processors[rank * share : (rank + 1) * share])) for rank in range(num_cores)]
