"""Several processes that want the same programs compile each of them once: the first one does, the others wait for it
and find it in the compilation cache.

A turn is a lock on a file beside the cache, which the system gives back when a process ends, however it does. This
module does not know what a program is.
"""

import contextlib
import fcntl
import hashlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jaxpaged.messages import ProgramKey

HIT = "/jax/compilation_cache/cache_hits"
FOLDER = "turns"
LOOK_SECONDS = 0.05
"""How often who waits for a turn looks whether it has come."""
LONGEST_WAIT = 600.0
"""Seconds after which a program is compiled without a turn: who has it may have been stopped."""


class CompileTurns:
    """Turns among all processes that name the same cache `folder` and `purpose`: what their programs depend on."""

    def __init__(self, folder: str, purpose: Any):
        self._folder = Path(folder) / FOLDER
        self._folder.mkdir(exist_ok=True)
        self._name = hashlib.sha256(repr(purpose).encode()).hexdigest()[:16]

    @contextlib.contextmanager
    def turn(self, key: ProgramKey) -> Iterator[None]:
        """Encloses the compiling of a program."""
        with open(self._folder / f"{self._name}-{key.kind}-{key.size}", "ab") as file:
            deadline = time.monotonic() + LONGEST_WAIT
            while time.monotonic() < deadline:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(LOOK_SECONDS)
            yield  # to close the file gives the turn back


class CacheHits:
    """Counts programs that came from the compilation cache, of threads whose names begin with `thread_name`."""

    def __init__(self, thread_name: str):
        self._thread_name = thread_name
        self.count = 0
        jax.monitoring.register_event_listener(self._on_event)

    def _on_event(self, event: str, **_: Any) -> None:
        if event == HIT and threading.current_thread().name.startswith(self._thread_name):
            self.count += 1

    def close(self) -> None:
        jax.monitoring.unregister_event_listener(self._on_event)
