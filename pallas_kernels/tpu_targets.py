"""TPUs to compile for without having one: the real compiler from the `libtpu` wheel, on any x86-64 Linux machine.

Also what their datasheets promise, for estimates that are computed and not measured. Knows no kernel.
"""

import dataclasses
import importlib.util
import os
import re
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


@dataclasses.dataclass(frozen=True)
class Target:
    """One device with one core, which for TPU7x is half a chip. The rates are the datasheet's, per second."""

    name: str
    topology: str
    chip: pltpu.ChipVersion

    @property
    def info(self) -> pltpu.TpuInfo:
        """What JAX knows of the chip: `mem_bw_bytes_per_second`, `bf16_ops_per_second`, `vmem_capacity_bytes`."""
        return pltpu.get_tpu_info_for_chip(self.chip, 1)


TARGETS = {
    target.name: target
    for target in (
        Target("v5e", "v5e:2x2", pltpu.ChipVersion.TPU_V5E),
        Target("v6e", "v6e:2x2", pltpu.ChipVersion.TPU_V6E),
        Target("tpu7x", "tpu7x:2x2x1", pltpu.ChipVersion.TPU_7X),
    )
}

# Without these libtpu asks a metadata server which machine it is on, and refuses a second process.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def why_not() -> str | None:
    """Why nothing can be compiled for TPUs here, and what to do, or None."""
    if importlib.util.find_spec("libtpu") is None:
        return "the TPU compiler is not installed; pip install 'jax[tpu]', or run scripts/test --aot-tpu"
    return None


def mesh_of(target: Target) -> Mesh:
    """A mesh of one device of `target`. Raises RuntimeError when the compiler is not installed."""
    reason = why_not()
    if reason is not None:
        raise RuntimeError(f"cannot compile for {target.name}: {reason}.")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    topology = topologies.get_topology_desc(platform="tpu", topology_name=target.topology)
    return Mesh(np.array(topology.devices[:1]), ("model",), axis_types=(AxisType.Auto,))


def compile_for(target: Target, function: Any, *args: Any, donate: tuple[int, ...] = ()) -> jax.stages.Compiled:
    """Compile `function` for one device of `target`; `args` are trees of shapes."""
    mesh = mesh_of(target)
    whole = NamedSharding(mesh, PartitionSpec())
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), args)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function, donate_argnums=donate).lower(*structs).compile()


def vmem_of_kernels(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Bytes of VMEM that each Pallas kernel of a program takes, by the kernel's name."""
    sizes = {}
    for line in compiled.as_text().splitlines():
        kernel = re.match(r"\s*(?:ROOT )?%(\w+?)(?:\.[\w.]*)? = .*custom_call_target=\"tpu_custom_call\"", line)
        used = re.search(r'"used_scoped_memory_configs":\[([^\]]*)\]', line)
        if kernel and used:
            in_vmem = re.findall(r'"memory_space":"1"[^}]*"size":"(\d+)"', used.group(1))
            sizes[kernel.group(1)] = sum(int(size) for size in in_vmem)
    return sizes
