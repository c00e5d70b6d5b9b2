"""NVIDIA GPUs as compilation targets, for a machine that has none.

With the extra `aot-gpu` (XLA's CUDA plugin and ptxas, no driver) programs compile for a GPU from its description;
without it they can still be lowered. Also what data sheets promise, for estimates. Knows no kernel.
"""

import dataclasses
import importlib.util
import os
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec


@dataclasses.dataclass(frozen=True)
class GpuTarget:
    """What XLA wants to know of a GPU, from NVIDIA's data sheets and CUDA's table of compute capabilities.

    bandwidth: bytes per second. flops: dense bfloat16 products, per second. shared_memory: bytes that one program may
    have, and bytes of a core. Clock in GHz, sizes in bytes.
    """

    device_kind: str
    capability: tuple[int, int]
    num_cores: int
    memory: int
    bandwidth: float
    flops: float
    l2_cache: int
    shared_memory: tuple[int, int]
    clock: float
    has_accelerated_features: bool = True


TARGETS = {
    "a100": GpuTarget(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 80 * 2**30, 2.039e12, 312e12, 40 * 2**20, (166912, 167936), 1.41, False
    ),
    "h100": GpuTarget(
        "NVIDIA H100 80GB HBM3", (9, 0), 132, 80 * 2**30, 3.352e12, 989e12, 50 * 2**20, (232448, 233472), 1.98
    ),
    "h200": GpuTarget("NVIDIA H200", (9, 0), 132, 141 * 10**9, 4.8e12, 989e12, 50 * 2**20, (232448, 233472), 1.98),
    "b200": GpuTarget("NVIDIA B200", (10, 0), 148, 180 * 2**30, 8.0e12, 2250e12, 126 * 2**20, (232448, 233472), 1.965),
}


def describe(target: GpuTarget) -> str:
    """The target in the text form of XLA's `GpuTargetConfigProto`."""
    per_program, per_core = target.shared_memory
    features = "ACCELERATED_FEATURES" if target.has_accelerated_features else "NONE"
    major, minor = target.capability
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 fpus_per_core: 128
          shared_memory_per_block: 49152 shared_memory_per_core: {per_core} shared_memory_per_block_optin: {per_program}
          registers_per_core_limit: 65536 registers_per_block_limit: 65536 core_count: {target.num_cores}
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
          memory_bandwidth: {int(target.bandwidth)} l2_cache_size: {target.l2_cache} clock_rate_ghz: {target.clock}
          device_memory_size: {target.memory} device_address_bits: 64
          cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
          device_vendor: "NVIDIA Corporation" name: "{target.device_kind}" driver_version: "13.0.0"
          runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 10 }}
        runtime_version {{ major: 13 minor: 0 patch: 0 }}
        device_description_str: "{target.device_kind}"
    """


def why_not() -> str | None:
    """Why nothing can be compiled for GPUs here, and what to do, or None."""
    missing = [name for name in ("jax_plugins.xla_cuda13", "nvidia.cu13") if not _is_installed(name)]
    if missing:
        return f"{' and '.join(missing)} cannot be imported; run scripts/test --aot-gpu, or pip install -e '.[aot-gpu]'"
    return None


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent package
        return False


def devices_of(target: GpuTarget, count: int = 1) -> tuple[jax.Device, ...]:
    """Devices of `target` in one host, to compile for. Raises RuntimeError when the compiler is not installed."""
    reason = why_not()
    if reason is not None:
        raise RuntimeError(f"cannot compile for {target.device_kind}: {reason}.")
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # the plugin looks for libraries of a driver
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="one host", topology=f"1x1x{count}", target_config=describe(target)
    )
    return tuple(topology.devices)


def mesh_of(target: GpuTarget) -> Mesh:
    """A mesh of one device of `target`. Raises RuntimeError when the compiler is not installed."""
    return Mesh(np.array(devices_of(target)), ("model",), axis_types=(AxisType.Auto,))


def compile_for(
    target: GpuTarget,
    function: Any,
    *args: Any,
    donate: tuple[int, ...] = (),
    options: dict[str, Any] | None = None,
) -> jax.stages.Compiled:
    """Compile `function` for one device of `target`; `args` are trees of shapes, `options` the compiler's."""
    mesh = mesh_of(target)
    whole = NamedSharding(mesh, PartitionSpec())
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), args)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function, donate_argnums=donate).lower(*structs).compile(options)


def lower_for(target: GpuTarget, function: Any, *args: Any) -> str:
    """The program for one device of `target` as StableHLO text, with its kernels in Triton's own form inside.

    Needs no compiler for GPUs.
    """
    device = AbstractDevice(device_kind=target.device_kind, num_cores=None, platform="gpu")
    mesh = AbstractMesh((1,), ("model",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
