"""A sign of life that one process writes and another reads, in a small file that both have mapped into memory.

It costs a step well under a microsecond, and it needs nothing of the process that hangs: not its interpreter lock, nor
an answer. This module does not know what is being done, nor what happens to those who stop.
"""

import mmap
import os
import struct
from pathlib import Path

LAYOUT = struct.Struct("<QQ")
"""How often work began, and whether it is under way."""


class Heartbeat:
    """One file. Who works calls `beat` and `rest`, who watches calls `look`."""

    def __init__(self, path: Path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, LAYOUT.size)
            self._memory = mmap.mmap(descriptor, LAYOUT.size)
        finally:
            os.close(descriptor)
        self._count = 0

    def beat(self) -> None:
        """Work begins, or goes on."""
        self._count += 1
        LAYOUT.pack_into(self._memory, 0, self._count, 1)

    def rest(self) -> None:
        """Nothing is to be done."""
        LAYOUT.pack_into(self._memory, 0, self._count, 0)

    def look(self) -> tuple[int, bool]:
        """How often work began, and whether it is under way."""
        count, working = LAYOUT.unpack_from(self._memory)
        return count, bool(working)

    def close(self) -> None:
        self._memory.close()


class Patience:
    """Decides when a heartbeat has stood still for too long.

    It counts looks rather than seconds: when the machine sleeps, or the watcher itself gets no time, no looks pass.
    """

    def __init__(self, heartbeat: Heartbeat, seconds: float):
        self.interval = min(1.0, seconds / 10)  # between looks
        self._heartbeat = heartbeat
        self._limit = round(seconds / self.interval)
        self._looks = 0
        self._last = -1

    def renew(self) -> None:
        """There was another sign of life."""
        self._looks = 0

    def exhausted(self) -> bool:
        """Look once more. True when as many looks as `seconds` hold have found the same work under way."""
        count, working = self._heartbeat.look()
        self._looks = self._looks + 1 if working and count == self._last else 0
        self._last = count
        return self._looks >= self._limit
