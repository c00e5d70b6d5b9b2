"""A process that computes with others as one: how it is started, and what runs in it from its first line to its end.

It is told through its standard input whom to follow. When its standard input ends, or the driver is gone, so is it.
"""

import contextlib
import importlib.metadata
import logging
import os
import platform
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from jaxpaged import __version__
from jaxpaged.config import EngineConfig
from jaxpaged.config.sections import LEAST_SECRET, ParallelConfig
from jaxpaged.engine.observability.log_setup import format_in_use, set_up_logging
from jaxpaged.engine.process import program
from jaxpaged.errors import ConfigError, EngineDeadError, JaxpagedError
from jaxpaged.executor.follower import Post, Resolve, UnansweredError, follow
from jaxpaged.executor.group import Group, addresses_of, end_process
from jaxpaged.messages import Progress

if TYPE_CHECKING:
    from jaxpaged.engine.process.ray_seats import Seats

logger = logging.getLogger(__name__)

PROGRAM = "from jaxpaged.engine.build import run_follower; run_follower()"
OF_ONE_HOST = ("node_rank", "group_secret_file")
"""Options that may differ between hosts."""
LAST_SECONDS = 2.0
"""How long those who follow may take to end in peace."""
FAILED, UNANSWERED = 1, 3
"""Exit statuses."""
PAUSE_SECONDS = 2.0
"""Between the end of a process that followed and the start of the next."""


class FollowerStart(msgspec.Struct, array_like=True):
    """Whom to follow: `addresses` of commands and of reports, and the group's secret. `join_seconds`: for how long to
    wait for the others."""

    rank: int
    addresses: tuple[str, str]
    secret: bytes
    log_level: int
    log_format: str
    join_seconds: float
    given: dict[str, str] = {}


def versions() -> dict[str, str]:
    """Of what computes here, by name."""
    found = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    return found | {"jaxpaged": __version__, "python": ".".join(platform.python_version_tuple()[:2])}


def given_here(config: EngineConfig) -> dict[str, str]:
    """What must be the same in all processes, by name: versions, and the options."""
    return versions() | {name: repr(value) for name, value in config.options().items() if name not in OF_ONE_HOST}


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
            start = FollowerStart(rank, group.addresses, secret, *log_in_use(), seconds, given)
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


def end_children(children: Sequence["FollowerChild"], seconds: float) -> None:
    """End processes that follow, which have so long to do so themselves: one that was stopped never does."""
    deadline = time.monotonic() + seconds
    for each in children:
        each.end(max(deadline - time.monotonic(), 0.0))


def seats_of(parallel: ParallelConfig) -> "Seats | None":
    """What Ray has reserved for the processes of an engine, if it is to place them."""
    if parallel.distributed_executor_backend != "ray":
        return None
    from jaxpaged.engine.process.ray_seats import opened_ray, reserved_seats  # they start what is defined here

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
    start = FollowerStart(parallel.node_rank, addresses, secret, *log_in_use(), seconds, given_here(config))
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


class FollowerChild:
    """A process that follows, started by this one. `on_end` hears, from another thread, what ended it."""

    def __init__(self, start: FollowerStart, on_end: Callable[[str], None]):
        self._process, self._on_end = program.started(PROGRAM), on_end
        threading.Thread(target=self._watch, name=f"rank {start.rank}", daemon=True).start()
        with contextlib.suppress(BrokenPipeError):  # it is dead already, and the watching thread says so
            program.tell(self._process, start)

    def wait(self) -> int:
        """The exit status of the process, once it has one. It is killed when waiting is interrupted."""
        try:
            return self._process.wait()
        except BaseException:
            self._process.kill()
            raise

    def end(self, seconds: float) -> None:
        """Kill the process unless it ends within `seconds`."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _watch(self) -> None:
        self._on_end(f"its process {self._process.pid} {program.end_in_words(self._process.wait())}")


def log_in_use() -> tuple[int, str]:
    return logger.getEffectiveLevel(), format_in_use()


def run(resolve: Resolve) -> NoReturn:
    """What the process does: follow whom standard input names. `resolve` finds the model of a configuration."""
    start = program.read_start(FollowerStart)
    set_up_logging(start.log_level, start.log_format, f"rank {start.rank}")
    threading.Thread(target=leave_with_parent, name="lifeline", daemon=True).start()
    post = Post(start.rank, start.addresses, start.secret)
    threading.Thread(target=leave_with_driver, args=(post,), name="driver", daemon=True).start()
    try:
        follow(post, f"process {os.getpid()} of {socket.gethostname()}", start.given, resolve, start.join_seconds)
    except BaseException as error:
        expected = isinstance(error, JaxpagedError) and error.__cause__ is None
        logger.error("rank %d ends: %s", start.rank, error, exc_info=None if expected else error)
        post.close()
        leave(UNANSWERED if isinstance(error, UnansweredError) else FAILED)
    leave(0)


def leave_with_parent() -> None:
    """For a thread: whoever started this process is gone once standard input ends."""
    program.wait_for_end_of_input()
    leave(0)


def leave_with_driver(post: Post) -> None:
    """For a thread: without a driver there is nothing to do."""
    post.wait_until_lost()
    logger.warning("the driver is gone, so rank %d ends", post.rank)
    leave(FAILED)


def leave(status: int) -> NoReturn:
    """End this process, without the interpreter's cleaning up: devices may wait for others that are gone."""
    sys.stderr.flush()
    os._exit(status)
