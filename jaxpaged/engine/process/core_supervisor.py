"""Keeps an engine core running in another process: starts it, watches it, and replaces it when it dies or hangs.

A thread does this, so that nothing a front end does in its event loop delays it. This module knows neither requests
nor sockets.
"""

import contextlib
import logging
import os
import select
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from jaxpaged.config import EngineConfig
from jaxpaged.engine.observability.log_setup import format_in_use
from jaxpaged.engine.process import wire
from jaxpaged.engine.process.core_child import CoreChild
from jaxpaged.engine.process.core_process import HEARTBEAT, SOCKET
from jaxpaged.engine.process.heartbeat import CALL, STEP, Heartbeat, Patience
from jaxpaged.errors import ConfigError, EngineDeadError, JaxpagedError, ProgramError, error_named
from jaxpaged.executor.device_slices import ALL_DEVICES, DeviceSlice
from jaxpaged.messages import Progress

logger = logging.getLogger(__name__)

FACTORY = "jaxpaged.engine.build:build_core"
LONGEST_SOCKET_PATH = 100
"""Bytes: operating systems allow 104 to 108."""
SHORT_FOLDER = "/tmp"
LOADING_PATIENCE = 60.0
"""Seconds without a sign of life that a process is always given while it loads."""
RESTARTS_COUNT_FOR = 3600.0
SECONDS_BEFORE_RETRY = 1.0
"""Between two attempts when the first did not even load."""


@dataclass(frozen=True)
class CoreState:
    """`phase` is "loading", "serving", "restarting", "dead" or "closed"; `reason` says why in the last three."""

    phase: str
    reason: str = ""


class CoreSupervisor:
    """A core of `config` in a process of its own, from `start` to `close`.

    `step_timeout`: seconds without a sign of life, such as a compiled program, after which a step counts as hung, and
    so does a process that waits for work (`heartbeat.Patience`) or loads (`LOADING_PATIENCE`).
    `max_restarts`: how often within an hour a process that died or hung is replaced.
    `factory`: see `core_process.Factory`. `name`: what errors and logs call it. `devices`: those that are its own.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress | None = None,
        *,
        step_timeout: float,
        max_restarts: int,
        factory: str = FACTORY,
        name: str = "the engine core",
        devices: DeviceSlice = ALL_DEVICES,
    ):
        self._name, self._devices = name, devices
        self._progress = progress or (lambda stage, done, total: None)
        self._step_timeout = step_timeout
        self._max_restarts = max_restarts
        self._restarts: deque[float] = deque()
        self._directory = private_directory()
        log = logger.getEffectiveLevel(), format_in_use(), name.removeprefix("the ")
        self._start = wire.Start(sendable_options(config), factory, str(self._directory), *log)
        self._changed = threading.Condition()
        self._state = CoreState("loading")
        self._facts: wire.CoreFacts | None = None
        self._failure: JaxpagedError | None = None  # the last one that the process reported
        self._listener: Callable[[CoreState], None] | None = None
        self._served = False  # whether the process that runs now has got so far
        self._patience: Patience | None = None
        self.num_restarts = 0  # since the engine was started
        self.pid: int | None = None
        self._wake_reader, self._wake_writer = os.pipe()
        self._thread = threading.Thread(target=self._run, name="engine core supervisor", daemon=True)

    @property
    def address(self) -> str:
        """Where the core answers; all its processes use the same."""
        return f"ipc://{self._directory / SOCKET}"

    @property
    def state(self) -> CoreState:
        return self._state

    @property
    def silence(self) -> float:
        """For about how many seconds the process has given no sign of life."""
        patience = self._patience
        return 0.0 if patience is None else patience.silence

    def begin(self) -> None:
        """Start the first process."""
        self._thread.start()

    def facts(self) -> wire.CoreFacts:
        """Options and model, as soon as they are known. Raises what loading raises."""
        with self._changed:
            self._changed.wait_for(lambda: self._facts is not None or self._state.phase == "dead")
        self._raise_if_dead()
        assert self._facts is not None, "the process serves and never said what"
        return self._facts

    def wait_until_serving(self) -> None:
        """Wait for the end of loading. Raises ConfigError, CheckpointError, CapacityError or EngineDeadError."""
        with self._changed:
            self._changed.wait_for(lambda: self._state.phase != "loading")
        self._raise_if_dead()

    def listen(self, listener: Callable[[CoreState], None]) -> None:
        """Call `listener` with every new state, from another thread."""
        self._listener = listener

    def close(self) -> None:
        """End the process, after the step under way. A second call does nothing."""
        if self._state.phase == "closed":
            return
        self._set(CoreState("closed", "the engine was shut down"))
        os.write(self._wake_writer, b"\0")
        if self._thread.is_alive():
            self._thread.join()
        shutil.rmtree(self._directory, ignore_errors=True)
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    # ---- the thread

    def _run(self) -> None:
        try:
            while self._state.phase not in ("closed", "dead"):
                self._served = False
                child = CoreChild(self._start, self._devices)
                self.pid = child.pid
                logger.debug("%s's process is %d", self._name, child.pid)
                reason = self._watch(child)
                if reason is not None:
                    self._decide(reason)
        except BaseException as error:
            self._failure = EngineDeadError(f"{self._name}'s process cannot be kept running: {error!r}.")
            self._set(CoreState("dead", str(self._failure)))
            raise

    def _watch(self, child: CoreChild) -> str | None:
        """Follow a process until its end; returns why it ended, or None when it was told to."""
        with contextlib.ExitStack() as stack:
            stack.callback(child.kill)  # has an effect only if this ends otherwise than foreseen
            heartbeat = stack.enter_context(contextlib.closing(Heartbeat(self._directory / HEARTBEAT)))
            self._patience = patience = Patience(heartbeat, max(self._step_timeout, LOADING_PATIENCE))
            watched_as_serving = False
            while True:
                ready, _, _ = select.select([self._wake_reader, child.reports], [], [], patience.interval)
                if self._wake_reader in ready:
                    child.stop()
                    return None
                if child.reports in ready:
                    reports = child.read()
                    if reports is None:
                        return self._describe_end(child)
                    for report in reports:
                        self._note(report)
                    if self._served and not watched_as_serving:
                        watched_as_serving = True
                        self._patience = patience = Patience(heartbeat, self._step_timeout)
                    patience.renew()  # a step may wait for programs, and here is one
                elif not ready and patience.exhausted():
                    return self._end_hung(child, patience)

    def _note(self, report: wire.Status) -> None:
        if isinstance(report, wire.Loading):
            self._progress(report.what, report.done, report.total)
        elif isinstance(report, wire.Failed):
            self._failure = error_named(report.error, report.message)
        elif isinstance(report, wire.Announced):
            with self._changed:
                self._facts = report.facts
                self._changed.notify_all()
        else:
            self._served = True
            self._set(CoreState("serving"))

    def _describe_end(self, child: CoreChild) -> str:
        end = child.wait()
        if stacks := child.stacks():
            logger.error("%s's process %s. Where its threads were:\n%s", self._name, end, stacks)
        return str(self._failure).rstrip(".") if self._failure else f"{self._name}'s process {end}"

    def _end_hung(self, child: CoreChild, patience: Patience) -> str:
        """Write to the log where a process hangs, and kill it."""
        if self._served and patience.doing == STEP:
            reason = f"a step took longer than step_timeout = {self._step_timeout:g} s, so it counts as hung"
        elif self._served and patience.doing == CALL:
            reason = f"a call such as sleep took longer than {patience.limit:g} s, so it counts as hung"
        else:
            reason = f"{self._name}'s process gave no sign of life for {patience.limit:g} s, so it counts as hung"
        stacks = child.dump_stacks() or "it does not say"
        logger.error("%s. Where %s's threads are:\n%s", reason, self._name, stacks)
        child.kill()
        if self._state.phase != "loading":
            self._set(CoreState("restarting", reason))  # before it has ended: with a device involved that may take long
        child.wait()
        return reason

    def _decide(self, reason: str) -> None:
        """After the end of a process: another one, or the end of the engine."""
        if self._state.phase == "loading":
            self._failure = self._failure or EngineDeadError(f"{reason} while it was loading. Its log may say more.")
            self._set(CoreState("dead", reason))
            return
        if isinstance(self._failure, ProgramError):  # of another process, too
            self._set(CoreState("dead", reason))
            return
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > RESTARTS_COUNT_FOR:
            self._restarts.popleft()
        if len(self._restarts) >= self._max_restarts:
            self._set(CoreState("dead", f"{reason}; it had been restarted {len(self._restarts)} times within an hour"))
            return
        self._restarts.append(now)
        self.num_restarts += 1
        self._failure = None
        self._set(CoreState("restarting", reason))
        if not self._served:
            select.select([self._wake_reader], [], [], SECONDS_BEFORE_RETRY)

    def _set(self, state: CoreState) -> None:
        with self._changed:
            if self._state.phase == "closed" or state == self._state:
                return
            was, self._state = self._state, state
            self._changed.notify_all()
        if state.phase in ("restarting", "dead"):
            level = logging.DEBUG if was.phase == "loading" else logging.ERROR  # who waits for loading is told
            logger.log(level, "%s is %s: %s", self._name, state.phase, state.reason)
        else:
            began = state.phase == "serving" or was.phase in ("serving", "restarting")
            logger.log(logging.INFO if began else logging.DEBUG, "%s is %s", self._name, state.phase)
        if self._listener is not None:
            self._listener(state)

    def _raise_if_dead(self) -> None:
        if self._state.phase == "dead":
            raise self._failure or EngineDeadError(f"{self._state.reason}. Start a new engine.")


def private_directory() -> Path:
    """A new directory that nobody else may enter: in the folder for temporary files, or in /tmp where the path of a
    socket would be too long there. Raises ConfigError when it would be too long in both."""
    for folder in (None, SHORT_FOLDER):
        try:
            directory = Path(tempfile.mkdtemp(prefix="jaxpaged-", dir=folder))  # mode 700
        except OSError:
            if folder is None:
                raise
            continue  # the words below are of the folder that TMPDIR names
        length = len(os.fsencode(directory / SOCKET))
        if length <= LONGEST_SOCKET_PATH:
            return directory
        with contextlib.suppress(OSError):
            directory.rmdir()
    raise ConfigError(
        f"a socket in {tempfile.gettempdir()} would have a path of more than the {LONGEST_SOCKET_PATH} bytes that are "
        f"safe, and nothing can be written to {SHORT_FOLDER}. Set TMPDIR to a shorter folder."
    )


def sendable_options(config: EngineConfig) -> dict[str, Any]:
    """The options as plain data. Raises ConfigError when one holds an object."""
    options = config.options()
    for name, value in options.items():
        try:
            msgspec.msgpack.encode(value)
        except TypeError:
            raise ConfigError(
                f"{name} is {value!r}, which cannot be sent to the engine's process. Give it as a text: 'module:Class'."
            ) from None
    return options
