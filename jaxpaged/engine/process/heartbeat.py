"""A sign of life that one process writes and another reads, in a small file that both have mapped into memory.

It costs a step well under a microsecond, and it needs nothing of the process that hangs: not its interpreter lock, nor
an answer. This module does not know what is being done, nor what happens to those who stop.
"""

import contextlib
import mmap
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

LAYOUT = struct.Struct("<QQ")
"""How many signs of life there were, and what is under way, one of the following."""
WAITING, STEP, CALL = range(3)
TICK_SECONDS = 0.25
"""Between two signs of life of a process that waits for work, loads, or does what may take any time."""
LEAST_PATIENCE = 5.0
"""Seconds of silence that are never too long for a process that only ticks: the machine may be busy."""
CALL_PATIENCE = 60.0
"""Seconds of silence that are never too long for a call: falling asleep takes all weights from the devices. To read
them again takes longer, but every array that was read is told."""


class Heartbeat:
    """One file. Who works calls `beat`, who does not calls `tick`, who watches calls `look`."""

    def __init__(self, path: Path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, LAYOUT.size)
            self._memory = mmap.mmap(descriptor, LAYOUT.size)
        finally:
            os.close(descriptor)
        self._count = 0

    def beat(self, doing: int = STEP) -> None:
        """A step, or a call, begins: the next sign of life comes when it is done."""
        self._count += 1
        LAYOUT.pack_into(self._memory, 0, self._count, doing)

    def tick(self) -> None:
        """No step is under way, and the next sign of life comes within `TICK_SECONDS`."""
        self.beat(WAITING)

    @contextlib.contextmanager
    def ticking(self) -> Iterator[None]:
        """What this encloses may take any time, as long as the process runs: a thread ticks meanwhile."""
        done = threading.Event()
        self.tick()

        def go_on() -> None:
            while not done.wait(TICK_SECONDS):
                self.tick()

        thread = threading.Thread(target=go_on, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def look(self) -> tuple[int, int]:
        """How many signs of life there were, and what is under way."""
        return LAYOUT.unpack_from(self._memory)

    def close(self) -> None:
        self._memory.close()


class Patience:
    """Decides when a heartbeat has stood still for too long: a step for `seconds`, a process that ticks for at least
    `LEAST_PATIENCE`, a call for at least `CALL_PATIENCE`.

    It counts looks rather than seconds: when the machine sleeps, or the watcher itself gets no time, no looks pass.
    """

    def __init__(self, heartbeat: Heartbeat, seconds: float):
        self.interval = min(1.0, seconds / 10)  # between looks
        self._heartbeat = heartbeat
        self._seconds = seconds
        self._looks = 0
        self._last = -1
        self.doing = WAITING  # when it was last looked at

    @property
    def silence(self) -> float:
        """For about how many seconds there was no sign of life."""
        return self._looks * self.interval

    @property
    def limit(self) -> float:
        """How many seconds of silence are too long, for what was seen last."""
        return max(self._seconds, {WAITING: LEAST_PATIENCE, STEP: 0.0, CALL: CALL_PATIENCE}[self.doing])

    def renew(self) -> None:
        """There was another sign of life."""
        self._looks = 0

    def exhausted(self) -> bool:
        """Look once more. True when as many looks as the limit holds have found nothing new."""
        count, self.doing = self._heartbeat.look()
        self._looks = self._looks + 1 if count == self._last else 0
        self._last = count
        return self._looks >= round(self.limit / self.interval)
