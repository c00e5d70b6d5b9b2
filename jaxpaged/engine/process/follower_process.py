"""A process that computes with others as one: how it is started, and what runs in it from its first line to its end.

It is told through its standard input whom to follow. When its standard input ends, or the driver is gone, so is it.
"""

import contextlib
import importlib.metadata
import logging
import os
import platform
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn

import msgspec

from jaxpaged import __version__
from jaxpaged.engine.observability.log_setup import format_in_use, set_up_logging
from jaxpaged.engine.process import child_program
from jaxpaged.errors import ConfigError, JaxpagedError
from jaxpaged.executor.follower import Post, Resolve, UnansweredError, follow
from jaxpaged.plugins.loading import digests

logger = logging.getLogger(__name__)

PROGRAM = "from jaxpaged.engine.build import run_follower; run_follower()"
FAILED, UNANSWERED = 1, 3
"""Exit statuses."""


class FollowerStart(msgspec.Struct, array_like=True):
    """Whom to follow: `addresses` of commands and of reports, and the group's secret. `join_seconds`: for how long to
    wait for the others. `plugin` and `plugins` are options: what they name here must be what the driver has."""

    rank: int
    addresses: tuple[str, str]
    secret: bytes
    log_level: int
    log_format: str
    join_seconds: float
    given: dict[str, str] = {}
    plugin: tuple[str, ...] = ()
    plugins: tuple[str, ...] | None = None


def versions() -> dict[str, str]:
    """Of what computes here, by name."""
    found = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    return found | {"jaxpaged": __version__, "python": ".".join(platform.python_version_tuple()[:2])}


def plugin_digests(plugin: Sequence[str], plugins: Sequence[str] | None) -> dict[str, str]:
    """Digests of the plugins that these options name on this host, or why there are none, by what they are."""
    try:
        return {f"plugin {name}": digest for name, digest in digests(plugin, plugins).items()}
    except ConfigError as error:
        return {"code of plugins": f"that cannot be read: {error}"}


class FollowerChild:
    """A process that follows, started by this one. `on_end` hears, from another thread, what ended it."""

    def __init__(self, start: FollowerStart, on_end: Callable[[str], None]):
        self._process, self._on_end = child_program.started(PROGRAM), on_end
        threading.Thread(target=self._watch, name=f"rank {start.rank}", daemon=True).start()
        with contextlib.suppress(BrokenPipeError):  # it is dead already, and the watching thread says so
            child_program.tell(self._process, start)

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
        self._on_end(f"its process {self._process.pid} {child_program.end_in_words(self._process.wait())}")


def log_in_use() -> tuple[int, str]:
    return logger.getEffectiveLevel(), format_in_use()


def run(resolve: Resolve) -> NoReturn:
    """What the process does: follow whom standard input names. `resolve` finds the model of a configuration."""
    start = child_program.read_start(FollowerStart)
    set_up_logging(start.log_level, start.log_format, f"rank {start.rank}")
    threading.Thread(target=leave_with_parent, name="lifeline", daemon=True).start()
    post = Post(start.rank, start.addresses, start.secret)
    threading.Thread(target=leave_with_driver, args=(post,), name="driver", daemon=True).start()
    try:
        given = start.given | plugin_digests(start.plugin, start.plugins)
        follow(post, f"process {os.getpid()} of {socket.gethostname()}", given, resolve, start.join_seconds)
    except BaseException as error:
        expected = isinstance(error, JaxpagedError) and error.__cause__ is None
        logger.error("rank %d ends: %s", start.rank, error, exc_info=None if expected else error)
        post.close()
        leave(UNANSWERED if isinstance(error, UnansweredError) else FAILED)
    leave(0)


def leave_with_parent() -> None:
    """For a thread: whoever started this process is gone once standard input ends."""
    child_program.wait_for_end_of_input()
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
