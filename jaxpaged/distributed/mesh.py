"""The named mesh over which parameters and KV blocks are sharded; on one device it is a mesh of one.

Knows devices and axis names. Which array axis goes where is said in `params/sharding.py`.
"""

from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

from jaxpaged.errors import ConfigError
from jaxpaged.params.sharding import MODEL_AXIS


def make_mesh(tensor_parallel_size: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of `tensor_parallel_size` devices along the axis "model".

    `devices` are the first ones of the default backend unless given. The axis type is Auto: with explicit axes
    a product that is split along its contracted axis raises. Raises ConfigError when devices are too few.
    """
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) < tensor_parallel_size:
        kind = devices[0].platform if devices else "no"
        raise ConfigError(
            f"tensor_parallel_size is {tensor_parallel_size}, but there are only {len(devices)} {kind} devices. "
            "Lower it; or, to try it on a CPU, set the environment variable "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={tensor_parallel_size}."
        )
    return jax.make_mesh(
        (tensor_parallel_size,), (MODEL_AXIS,), axis_types=(AxisType.Auto,), devices=devices[:tensor_parallel_size]
    )
