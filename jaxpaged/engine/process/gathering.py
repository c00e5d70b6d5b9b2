"""Gathers the processes that compute as one, for the driver, and for a host that joins another host's engine."""

import logging
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxpaged.config import EngineConfig
from jaxpaged.config.sections import LEAST_SECRET, ParallelConfig
from jaxpaged.engine.process.follower_process import (
    UNANSWERED,
    FollowerChild,
    FollowerStart,
    log_in_use,
    plugin_digests,
    versions,
)
from jaxpaged.engine.process.ray_seats import Seats, opened_ray, reserved_seats
from jaxpaged.errors import ConfigError, EngineDeadError, JaxpagedError
from jaxpaged.executor.group import Group, addresses_of, end_process
from jaxpaged.messages import Progress

logger = logging.getLogger(__name__)

OF_ONE_HOST = ("node_rank", "group_secret_file")
"""Options that may differ between hosts."""
LAST_SECONDS = 2.0
"""How long those who follow may take to end in peace."""
PAUSE_SECONDS = 2.0
"""Between the end of a process that followed and the start of the next."""


def given_here(config: EngineConfig) -> dict[str, str]:
    """What must be the same in all processes, by name: versions, plugins, and the options."""
    options = {name: repr(value) for name, value in config.options().items() if name not in OF_ONE_HOST}
    return versions() | plugin_digests(*plugins_of(config)) | options


def plugins_of(config: EngineConfig) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    """The options that name plugins, with other places that options name as code."""
    return (*config.plugins.plugin, *config.code_places), config.plugins.plugins


def shared_secret(parallel: ParallelConfig) -> bytes:
    """What several hosts know and nobody else. Raises ConfigError when it is missing or short."""
    advice = (
        f"Hosts that compute together know each other by a secret: put the same {LEAST_SECRET} letters or more into a "
        "file on each, for example those of `openssl rand -hex 32`, and give it as group_secret_file."
    )
    if parallel.group_secret_file is None:
        raise ConfigError(f"nnodes is {parallel.nnodes}, but there is no group_secret_file. {advice}")
    try:
        secret = Path(parallel.group_secret_file).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cannot read group_secret_file {parallel.group_secret_file}: {error.strerror}.") from None
    if len(secret) < LEAST_SECRET:
        raise ConfigError(f"group_secret_file {parallel.group_secret_file} holds {len(secret)} letters. {advice}")
    return secret


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def gather_group(config: EngineConfig, progress: Progress, fail: Callable[[JaxpagedError], None]) -> Group:
    """The processes that `config` wants besides this one, which drives them, once all have joined. Those of this host
    are started here, and all of them where Ray is asked to. `fail` is told why this process ends where nobody can raise
    that. Raises ConfigError, and EngineDeadError when one does not arrive.
    """
    parallel = config.parallel
    across, seats, seconds = parallel.nnodes > 1, seats_of(parallel), parallel.distributed_timeout_seconds
    host, port = (parallel.master_addr, parallel.master_port) if across else ("127.0.0.1", None)
    if seats is not None:
        host = seats.address
    secret = shared_secret(parallel) if across and seats is None else secrets.token_bytes(32)
    children: list[FollowerChild] = []

    def release() -> None:
        if seats is not None:
            seats.release()
        end_children(children, 0.0 if group.failure else LAST_SECONDS)

    def end(error: JaxpagedError) -> None:
        fail(error)
        end_children(children, 0.0)
        end_process()

    group = Group(parallel.num_processes, host, port and port + 1, secret, progress, end, release)
    try:
        given = given_here(config)
        for rank in () if across and seats is None else group.ranks:
            lost = lambda words, rank=rank: group.fail(EngineDeadError(f"rank {rank}: {words}"))
            start = FollowerStart(rank, group.addresses, secret, *log_in_use(), seconds, given, *plugins_of(config))
            if seats is None:
                children.append(FollowerChild(start, lost))
            else:
                seats.start(start, lost)
        group.gather(given, seconds)
        one_device = parallel.distributed_executor_backend == "mp"
        group.join(config.options(), f"{host}:{port or free_port()}", one_device, seconds)
    except BaseException as error:
        group.close(str(error))
        raise
    return group


def end_children(children: Sequence[FollowerChild], seconds: float) -> None:
    """End processes that follow, which have so long to do so themselves: one that was stopped never does."""
    deadline = time.monotonic() + seconds
    for each in children:
        each.end(max(deadline - time.monotonic(), 0.0))


def seats_of(parallel: ParallelConfig) -> Seats | None:
    """What Ray has reserved for the processes of an engine, if it is to place them."""
    if parallel.distributed_executor_backend != "ray":
        return None
    seats = reserved_seats(parallel, opened_ray(parallel.num_cores))
    seats.take_own()
    return seats


def follow_other_host(config: EngineConfig) -> None:
    """Take part in the engine of another host, again and again, until that one ends in peace. Raises ConfigError, and
    EngineDeadError when it does not come, or come back, in time."""
    parallel, secret = config.parallel, shared_secret(config.parallel)
    if not 0 < parallel.node_rank < parallel.nnodes:
        raise ConfigError(f"node_rank is {parallel.node_rank}, but nnodes is {parallel.nnodes}.")
    addresses = addresses_of(parallel.master_addr, parallel.master_port + 1, parallel.master_port + 2)
    seconds = parallel.distributed_timeout_seconds
    given = given_here(config)
    start = FollowerStart(parallel.node_rank, addresses, secret, *log_in_use(), seconds, given, *plugins_of(config))
    while True:
        logger.info("rank %d waits for the host of rank 0 at %s", parallel.node_rank, parallel.master_addr)
        status = FollowerChild(start, lambda words: logger.info("rank %d: %s", parallel.node_rank, words)).wait()
        if status == 0:
            return
        if status == UNANSWERED:
            raise EngineDeadError(
                f"rank {parallel.node_rank} waited distributed_timeout_seconds = {seconds} for rank 0 at "
                f"{' and '.join(addresses)}, and nothing came. Look at its log, whether this host can reach those "
                "addresses, and whether both have the same secret; then start this host again."
            )
        time.sleep(PAUSE_SECONDS)
