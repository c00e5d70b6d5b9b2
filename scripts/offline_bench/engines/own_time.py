"""Time that stands still while a process is stopped, for processes that take turns (`../turns.py`).

Runs with every peer's Python, as `session.py` does.
"""

import mmap
import time
from pathlib import Path

NUM_BYTES = 8
"""Of the file by which a process learns how long it was stopped: seconds, one float of 64 bits."""


def stopped_seconds(path: Path | str) -> memoryview:
    """What the file says, now and whenever it is looked at: one number, which may be written too."""
    with open(path, "r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), NUM_BYTES)).cast("d")


def use(path: Path | str) -> None:
    """Have `time.perf_counter` and `time.monotonic` tell this process's own time, for all that asks from now on."""
    stopped, real = stopped_seconds(path), time.perf_counter

    def own_time() -> float:
        while True:
            before = stopped[0]
            now = real()
            if stopped[0] == before:  # else it was stopped between the two
                return now - before

    time.perf_counter = time.monotonic = own_time
