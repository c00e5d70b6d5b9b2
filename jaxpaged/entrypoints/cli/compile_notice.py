"""Says, while an answer has not begun, that programs are being compiled."""

import threading
from collections.abc import Callable, Mapping
from typing import Any, Self

from jaxpaged.entrypoints.terminal import ProgressLine

SECONDS = 0.5
"""Before it is said for the first time, and between two looks."""


class CompileNotice:
    """A line in a terminal, from a thread, until `end` takes it away. `stats` are those of an executor."""

    def __init__(self, stats: Callable[[], Mapping[str, Any]]):
        self._stats, self._line = stats, ProgressLine()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="jaxpaged-compile-notice", daemon=True)

    def __enter__(self) -> Self:
        if self._line.open:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def end(self) -> None:
        """Take the line away, for good."""
        if not self._ended.is_set():
            self._ended.set()
            if self._thread.is_alive():
                self._thread.join()
            self._line.close()

    def _watch(self) -> None:
        while not self._ended.wait(SECONDS):
            stats = self._stats()
            ready, needed = (stats.get(name, 0) for name in ("ordinary_programs_ready", "ordinary_programs"))
            if ready < needed:
                self._line.show(f"compiling: {ready} of {needed} programs are ready; the answer may have to wait")
