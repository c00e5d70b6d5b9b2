"""The process of an engine core: what runs in it from its first line to its end.

It is told through its standard input what to serve, and reports through another pipe how far it is. When its standard
input ends, nobody needs it any more: whoever started it is done, or dead. This module knows neither what an engine is
made of, nor what becomes of the reports.
"""

import contextlib
import faulthandler
import gc
import importlib
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from jaxpaged.config import EngineConfig
from jaxpaged.engine.core import EngineCore
from jaxpaged.engine.observability.log_setup import set_up_logging
from jaxpaged.engine.process import wire
from jaxpaged.engine.process.child_program import framed, read_start, wait_for_end_of_input
from jaxpaged.engine.process.core_server import CoreServer
from jaxpaged.engine.process.heartbeat import Heartbeat
from jaxpaged.errors import EngineDeadError, JaxpagedError

logger = logging.getLogger(__name__)

Factory = Callable[[EngineConfig, wire.Reports], EngineCore]
"""Makes a core from options, and reports of it."""

SOCKET, HEARTBEAT, STACKS = "core.sock", "heartbeat", "stacks.txt"
"""Files in the directory that a core shares with its front ends."""

LAST_STEP_SECONDS = 5.0
"""How long the step under way may still take when the process is to end."""
SAVING_SECONDS = 75.0
"""What the process may take beyond that, where keys and values are written that outlive it."""


class StatusPipe:
    """Where the process reports to. Reports from several threads do not mix; that nobody reads them is no error."""

    def __init__(self, descriptor: int):
        os.set_inheritable(descriptor, False)  # its end is the end of this process, not of one started by it
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def write(self, status: wire.Status) -> None:
        with self._lock, contextlib.suppress(BrokenPipeError):
            os.write(self._descriptor, framed(status))


class Lifeline:
    """Ends the process when standard input does: at once while loading, after the step under way when serving, and
    `seconds` later at most what follows that."""

    def __init__(self, directory: Path, seconds: float):
        self._directory, self._seconds = directory, seconds
        self._server: CoreServer | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def hold(self, server: CoreServer) -> None:
        """From now on there is a server to be stopped."""
        self._server = server

    def leave(self, status: int) -> NoReturn:
        """End this process, without the interpreter's cleaning up: libraries' threads may be in the middle of work."""
        self._ended.set()
        sys.stderr.flush()
        os._exit(status)

    def _watch(self) -> None:
        wait_for_end_of_input()
        shutil.rmtree(self._directory, ignore_errors=True)
        if self._server is not None:
            self._server.stop()
            end = time.monotonic() + LAST_STEP_SECONDS
            if self._server.has_stopped.wait(LAST_STEP_SECONDS):
                self._ended.wait(end + self._seconds - time.monotonic())
        os._exit(0)


def main() -> NoReturn:
    """Serve what standard input says; reports go to the file descriptor that is the first argument."""
    status = StatusPipe(int(sys.argv[1]))
    start = read_start(wire.Start)
    directory = Path(start.directory)
    set_up_logging(start.log_level, start.log_format, start.name)
    with open(directory / STACKS, "wb") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        lifeline = Lifeline(directory, closing_seconds(start))
        try:
            serve(start, directory, status, lifeline)
        except BaseException as error:
            status.write(failure(error))
            lifeline.leave(1)
    lifeline.leave(0)


def failure(error: BaseException) -> wire.Failed:
    """What to report of an error. One that does not say itself what happened goes to the log, with what led to it."""
    broke_down = isinstance(error, EngineDeadError) and error.__cause__ is not None
    if isinstance(error, JaxpagedError) and not broke_down:
        return wire.Failed(type(error).__name__, str(error))
    logger.error("the engine core broke down", exc_info=error)
    cause = error.__cause__ or error
    words = str(cause) if isinstance(cause, JaxpagedError) else repr(cause)
    return wire.Failed("EngineDeadError", f"the engine core broke down: {words}")


def serve(start: wire.Start, directory: Path, status: StatusPipe, lifeline: Lifeline) -> None:
    """Load, open the socket, and serve until the lifeline ends. Raises what loading raises, and EngineDeadError."""
    announced: list[wire.CoreFacts] = []

    def announce(facts: wire.CoreFacts) -> None:
        announced.append(facts)
        status.write(wire.Announced(facts))

    def progress(what: str, done: int, total: int) -> None:
        status.write(wire.Loading(what, done, total))

    def fail(error: JaxpagedError) -> None:
        status.write(wire.Failed(type(error).__name__, str(error)))

    heartbeat = Heartbeat(directory / HEARTBEAT)
    with heartbeat.ticking():  # what the file says may be of a process before this one
        gc.disable()  # modules and weights stay, and to look among them for garbage takes a tenth of the start
        module, _, function = start.factory.partition(":")
        make_core: Factory = getattr(importlib.import_module(module), function)
        core = make_core(EngineConfig.from_options(**start.options), wire.Reports(announce, progress, fail))
    # What was loaded stays. The garbage collector would look at all of it again and again, for 80 ms and more in which
    # nobody gets a token.
    gc.collect()
    gc.freeze()
    gc.enable()
    server = CoreServer(core, announced[-1], f"ipc://{directory / SOCKET}", heartbeat)
    lifeline.hold(server)
    status.write(wire.Serving())
    try:
        server.run()
    finally:
        server.close()
        core.shutdown()


def closing_seconds(start: wire.Start) -> float:
    """What a process may take beyond LAST_STEP_SECONDS to end."""
    keeps = any(start.options.get(name) for name in ("kv_offload", "kv_transfer_config", "ec_transfer_config"))
    return SAVING_SECONDS if keeps else 0.0
