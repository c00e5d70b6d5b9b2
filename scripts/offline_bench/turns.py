"""Processes that have the cores in turns of half a second, each with a clock that stands still while it is stopped.

On a virtual machine the same work takes up to a third longer a minute later, for reasons that lie outside of it. So two
processes that are measured one after the other differ by that much; of two in turns each meets the same moments. A turn
is far longer than what it takes to fill the caches again.
"""

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from offline_bench.engines import own_time

TURN_SECONDS = 0.5


class Clock:
    """The file that tells a process how long it was stopped. The process gets its `path` before there is a turn."""

    def __init__(self, folder: Path):
        handle, name = tempfile.mkstemp(dir=folder, prefix="stopped-")
        os.write(handle, bytes(own_time.NUM_BYTES))
        os.close(handle)
        self.path = Path(name)
        self.stopped_seconds = own_time.stopped_seconds(name)


class Runner:
    """A process group, which leads its session, and its clock. Running, until it is stopped."""

    def __init__(self, process_id: int, clock: Clock):
        self.process_id, self._clock = process_id, clock
        self._stopped_at: float | None = None

    def stop(self) -> None:
        if self._stopped_at is None:
            self._stopped_at = time.perf_counter()
            self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        if self._stopped_at is not None:
            self._clock.stopped_seconds[0] += time.perf_counter() - self._stopped_at
            self._stopped_at = None
            self._signal(signal.SIGCONT)

    def end(self) -> None:
        """Kill it, with its children."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(self.process_id, number)


class Turns:
    """Runners of which one runs at a time. They may come and leave at any moment; who leaves goes on."""

    def __init__(self, seconds: float = TURN_SECONDS):
        self.seconds = seconds
        self._runners: list[Runner] = []  # the first one runs
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def taken_by(self, *runners: Runner) -> Iterator[None]:
        """Until the context ends. Whoever is there already has its turn first."""
        for runner in runners:
            self._join(runner)
        try:
            yield
        finally:
            for runner in runners:
                self._leave(runner)

    def end_all(self) -> None:
        """Kill whoever takes turns. Their contexts are left as usual, by whoever waits for them."""
        with self._changed:
            for runner in self._runners:
                runner.end()

    def _join(self, runner: Runner) -> None:
        with self._changed:
            self._runners.append(runner)
            if len(self._runners) > 1:
                runner.stop()
            else:
                runner.go_on()
            if self._thread is None:
                self._thread = threading.Thread(target=self._rotate, daemon=True)
                self._thread.start()

    def _leave(self, runner: Runner) -> None:
        with self._changed:
            self._runners.remove(runner)
            runner.go_on()
            if self._runners:
                self._runners[0].go_on()
            self._changed.notify_all()

    def _rotate(self) -> None:
        """The thread that changes turns. It ends with the last runner."""
        with self._changed:
            while self._runners:
                self._changed.wait(self.seconds)
                if len(self._runners) > 1:
                    self._runners.append(self._runners.pop(0))
                    for runner in self._runners[1:]:
                        runner.stop()
                    self._runners[0].go_on()
            self._thread = None
