"""What a process has running: to see that an engine that was shut down leaves nothing of it behind."""

import os
import threading
import time
from pathlib import Path

PATIENCE = 60.0
STAYS = ("jaxpaged-interrupts",)
"""Threads that every program has once: what hears Ctrl-C."""


def running() -> set[str]:
    """Threads by name and id, and child processes, those included whose end nobody has asked for."""
    threads = {f"thread {each.name} {each.ident}" for each in threading.enumerate() if each.name not in STAYS}
    return threads | {f"process {pid}" for pid in children_of(os.getpid())}


def children_of(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[1]) == parent:
            found.append(int(stat.parent.name))
    return found


def left_of(before: set[str]) -> set[str]:
    """What runs that did not run before, once it has had time to end."""
    deadline = time.monotonic() + PATIENCE
    while (left := running() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left
