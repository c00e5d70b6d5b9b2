"""NVIDIA GPUs as compilation targets, for a machine that has none.

With the extra `aot-gpu` (XLA's CUDA plugin and ptxas, no driver) programs compile for a GPU from its description.
Without it they can still be lowered. This module knows nothing of kernels.
"""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXIS = "model"


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


def mesh_of(target: GpuTarget) -> Mesh:
    """A mesh of one such device. Raises RuntimeError when the extra `aot-gpu` is not installed."""
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name="one", topology="1x1x1", target_config=describe(target)
        )
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise RuntimeError(
            f"cannot compile for {target.device_kind}: {error} Install jaxpaged[aot-gpu], and set "
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 where there is no driver."
        ) from error
    return Mesh(np.array(topology.devices), (MESH_AXIS,), axis_types=(AxisType.Auto,))


@contextlib.contextmanager
def tracing_for(mesh: Mesh) -> Iterator[NamedSharding]:
    """Inside, programs are traced for the devices of `mesh`; gives the sharding for their arguments."""
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield NamedSharding(mesh, PartitionSpec())
