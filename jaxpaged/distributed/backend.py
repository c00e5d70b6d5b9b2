"""Starts jax's backend: the devices of this process, and the share of a GPU's memory that jax takes for itself.

jax fills a pool with three quarters of a GPU's memory when it starts and gives out nothing else, so what an engine may
use is settled here, before the first device is asked for. A share that is set in the environment is kept.
"""

import contextlib
import logging
import os

import jax

from jaxpaged.errors import ConfigError, how_to_install, is_installed

logger = logging.getLogger(__name__)

SHARE_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""jax reads the first, or else the second, when a GPU's backend starts; both together it refuses."""
DEFAULT_SHARE = 0.75
"""Of a GPU's memory, what jax takes if neither is set."""

EXTRAS = {
    "tpu": ("tpu", "libtpu", "a TPU"),
    "gpu": ("gpu", "jax_plugins.xla_cuda13", "an NVIDIA GPU with its driver"),
    "cuda": ("gpu", "jax_plugins.xla_cuda13", "an NVIDIA GPU with its driver"),
}
"""Platform as JAX_PLATFORMS has it -> our extra, a module that it installs, and what else must be there."""


def start_backend(gpu_share: float | None = None) -> list[jax.Device]:
    """The devices of the default backend, which is started if it is not running yet.

    `gpu_share`: of a GPU's memory, what jax may take, unless the environment says so already. Raises ConfigError when
    the platforms that JAX_PLATFORMS names cannot be used.
    """
    if gpu_share is not None and given_share() is None and not has_started():
        os.environ[SHARE_VARIABLES[0]] = str(gpu_share)
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter, without a word, for "cuda" where there is no GPU
        raise ConfigError(why_not(jax.config.jax_platforms or "", error)) from error


def why_not(platforms: str, error: Exception) -> str:
    """What is missing for a backend that does not start, and what to do."""
    words = (str(error).splitlines() or ["no such device"])[0]
    wanted = next((name for name in platforms.split(",") if name in EXTRAS), None)
    if wanted is None:
        return f"jax cannot start (JAX_PLATFORMS is {platforms!r}): {words}. Set JAX_PLATFORMS=cpu, or unset it."
    extra, module, hardware = EXTRAS[wanted]
    beginning = f"JAX_PLATFORMS is {platforms!r}, and jax cannot use it: {words}. "
    if is_installed(module):
        return f"{beginning}It needs {hardware}, which was not found. Unset JAX_PLATFORMS to run on what is here."
    return (
        f"{beginning}To install what it needs, {how_to_install(extra)}; and there must be {hardware}. "
        "Or unset JAX_PLATFORMS to run on what is here."
    )


def has_started() -> bool:
    """Whether a backend runs already. jax has no function that says so, but refuses this option from then on."""
    before = jax.config.jax_num_cpu_devices
    try:
        jax.config.update("jax_num_cpu_devices", 1 if before != 1 else 2)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", before)
    return False


def given_share() -> tuple[str, float] | None:
    """The variable of the environment that says how much of a GPU jax takes, and its value. Raises ConfigError."""
    for variable in SHARE_VARIABLES:
        if text := os.environ.get(variable):
            with contextlib.suppress(ValueError):
                if (share := float(text)) > 0:
                    return variable, share
            raise ConfigError(f"{variable} is {text!r}. Set it to a number such as 0.9, or unset it.")
    return None


def usable_share_of_pool(gpu_memory_utilization: float) -> float:
    """Which share of jax's pool on a GPU is `gpu_memory_utilization` of all its memory: all of it where jax took less.

    Says so in the log when jax was told to take less than the engine was.
    """
    variable, share = given_share() or ("jax, which ran before the engine,", DEFAULT_SHARE)
    if share < gpu_memory_utilization:
        logger.warning(
            "%s gives jax %.0f %% of the GPU's memory, and that holds, not gpu_memory_utilization = %s",
            variable,
            100 * share,
            gpu_memory_utilization,
        )
    return min(gpu_memory_utilization / share, 1.0)
