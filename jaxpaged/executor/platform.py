"""What kind of devices this process has. The engine asks here, since it imports no jax itself."""

import jax


def platform() -> str:
    """ "cpu", "gpu" or "tpu": where programs run unless they are told otherwise."""
    return jax.default_backend()
