"""Several processes that compute as one: each joins before its devices start, and then sees those of all.

jax's own service, in the process that drives, tells them of each other; what they say to each other after that is said
by XLA's collectives. This module knows no messages: see `channel.py`.
"""

import os
import re
import threading
from collections.abc import Callable

import jax
import msgspec

from jaxpaged.distributed.backend import has_started
from jaxpaged.errors import ConfigError, EngineError

SPARE_SECONDS = 60.0
"""How much later than we jax gives up."""
VIRTUAL_DEVICES = re.compile(r"--xla_force_host_platform_device_count=\d+")


class Membership(msgspec.Struct, frozen=True, array_like=True):
    """Who a process is in its group. `coordinator`: host and port of jax's service, which runs in process 0.

    `one_device`: of its host's devices a process has the one with the number of its rank, and of a CPU one virtual
    device; otherwise all of them.
    """

    coordinator: str
    num_processes: int
    rank: int
    one_device: bool


def join(member: Membership, seconds: float, late: Callable[[EngineError], None]) -> None:
    """Become one of a group: returns when all have joined. Raises EngineError when that fails.

    If it takes longer than `seconds`, `late` is called from another thread, and is to end the process: a wait for the
    others cannot be interrupted, and one that jax itself gives up ends the process without a word that helps.
    """
    if has_started():
        raise ConfigError("this process has used its devices already, so it cannot join others. Start a new one.")
    if member.one_device:
        # Both ways to ask for several virtual devices of a CPU together are refused by jax.
        os.environ["XLA_FLAGS"] = VIRTUAL_DEVICES.sub("", os.environ.get("XLA_FLAGS", ""))
        jax.config.update("jax_num_cpu_devices", 1)
    who = f"process {member.rank} of {member.num_processes}"
    too_late = EngineError(
        f"{who} waited {seconds:g} s for all others to join at {member.coordinator}. Look at their logs, and whether "
        "every host can reach that address and port."
    )
    timer = threading.Timer(seconds, late, [too_late])
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            member.coordinator,
            member.num_processes,
            member.rank,
            local_device_ids=[member.rank] if member.one_device else None,
            coordinator_bind_address=member.coordinator if member.rank == 0 else None,
            initialization_timeout=round(seconds + SPARE_SECONDS),
        )
    except (RuntimeError, ValueError) as error:
        raise EngineError(
            f"{who} could not join the others at {member.coordinator}: "
            f"{str(error).splitlines()[0] if str(error) else error!r}"
        ) from error
    finally:
        timer.cancel()
