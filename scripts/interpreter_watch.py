"""Who has the interpreter while a process has more to do than to compute steps: what a thread that wakes up waits for.

A thread sleeps for some milliseconds again and again. How much later it runs is what every other thread waits that has
given the interpreter away, such as one that computes steps. What threads that compile were about when it got it back
says who had it. Collections of garbage are timed too: nobody runs beside them.
"""

import collections
import gc
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

SLEEP = 0.003
LATE = 0.002


class InterpreterWatch:
    """A context: while it lasts, the thread watches threads whose names begin with `watched`."""

    def __init__(self, watched: str):
        self.watched = watched
        self.late: list[float] = []
        self.seconds_of: collections.Counter[str] = collections.Counter()
        self.collecting = 0.0
        self._since = 0.0
        self._ends = threading.Event()

    def __enter__(self) -> "InterpreterWatch":
        gc.callbacks.append(self._collected)
        threading.Thread(target=self._watch, name="interpreter-watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        gc.callbacks.remove(self._collected)

    def _watch(self) -> None:
        while not self._ends.is_set():
            begin = time.perf_counter()
            time.sleep(SLEEP)
            late = time.perf_counter() - begin - SLEEP
            self.late.append(late)
            if late > LATE:
                self.seconds_of[self._doing()] += late

    def _doing(self) -> str:
        """The innermost calls of those watched threads that are not just waiting."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        doing = []
        for ident, frame in sys._current_frames().items():
            if names.get(ident, "").startswith(self.watched):
                calls = traceback.extract_stack(frame)[-3:]
                if calls[-1].name != "wait":
                    doing.append(" < ".join(f"{Path(call.filename).name}:{call.name}" for call in reversed(calls)))
        return "; ".join(sorted(doing)) or "no watched thread"

    def _collected(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._since = time.perf_counter()
        else:
            self.collecting += time.perf_counter() - self._since

    def lines(self, most: int = 12) -> list[dict[str, Any]]:
        """Lines of a table: how late the thread was, and who was at work then."""
        late = sorted(self.late) or [float("nan")]
        at = lambda share: 1e3 * late[int(share * (len(late) - 1))]
        summary = {"woken up late by, ms": f"{at(0.5):.2f}, p90 {at(0.9):.2f}, p99 {at(0.99):.2f}, most {at(1):.1f}"}
        lines = [summary | {"s": sum(late)}, {"woken up late by, ms": "collections of garbage", "s": self.collecting}]
        return lines + [{"at work": name, "s": seconds} for name, seconds in self.seconds_of.most_common(most)]
