"""Several processes that compute as one: each joins before its devices start, and then sees those of all.

jax's own service, in the process that drives, tells them of each other; what they say to each other after that is said
by XLA's collectives. This module knows no messages: see `channel.py`.
"""

import os
import re

import jax
import msgspec

from jaxpaged.distributed.backend import has_started
from jaxpaged.errors import ConfigError, EngineError

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


def join(member: Membership, seconds: float) -> None:
    """Become one of a group: returns when all have joined. Raises EngineError if that takes longer than `seconds`."""
    if has_started():
        raise ConfigError("this process has used its devices already, so it cannot join others. Start a new one.")
    if member.one_device:
        # Both ways to ask for several virtual devices of a CPU together are refused by jax.
        os.environ["XLA_FLAGS"] = VIRTUAL_DEVICES.sub("", os.environ.get("XLA_FLAGS", ""))
        jax.config.update("jax_num_cpu_devices", 1)
    try:
        jax.distributed.initialize(
            member.coordinator, member.num_processes, member.rank,
            local_device_ids=[member.rank] if member.one_device else None,
            coordinator_bind_address=member.coordinator if member.rank == 0 else None,
            initialization_timeout=round(seconds),
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        raise EngineError(
            f"process {member.rank} of {member.num_processes} could not join the others at {member.coordinator}: "
            f"{str(error).splitlines()[0] if str(error) else error!r}"
        ) from error
