"""What kind of devices this process has. The engine asks here, since it imports no jax itself."""

from jaxpaged.distributed.backend import start_backend


def platform(gpu_memory_utilization: float) -> str:
    """ "cpu", "gpu" or "tpu": where programs run unless they are told otherwise.

    The first call starts the devices, of GPUs with so much of their memory. Raises ConfigError when they do not start.
    """
    return start_backend(gpu_memory_utilization)[0].platform
