"""What comes into tiers and leaves them, for whoever tells routers of it.

A page in several tiers of one medium comes with the first and goes with the last. Tiers are used by many threads, so is
this. Knows neither pages' bytes nor who is told.
"""

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxpaged.kv_store.page import PageKey

MEMORY, STORAGE = "CPU", "STORAGE"
"""vLLM's words for the media."""


class TierEvent(NamedTuple):
    """A page is to be had from a medium now, or not any more."""

    medium: str
    key: PageKey
    is_there: bool


class TierEventLog:
    """Changes since they were taken, in their order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_copies: Counter[tuple[str, PageKey]] = Counter()
        self._changes: list[TierEvent] = []

    def note(self, medium: str, key: PageKey, is_there: bool) -> None:
        """One tier of a medium has a page now, or has it no more."""
        with self._lock:
            self._num_copies[medium, key] += 1 if is_there else -1
            num_copies = self._num_copies[medium, key]
            if num_copies == 0:
                del self._num_copies[medium, key]
            if num_copies == int(is_there):
                self._changes.append(TierEvent(medium, key, is_there))

    def take(self) -> list[TierEvent]:
        with self._lock:
            taken, self._changes = self._changes, []
            return taken


class WatchedDict[K, V](dict[K, V]):
    """A dict of which somebody may hear what comes (True) and goes: by assignment and `pop`, as tiers use theirs."""

    on_change: Callable[[K, bool], None] | None = None

    def watch(self, on_change: Callable[[K, bool], None]) -> None:
        """What is there already comes now."""
        self.on_change = on_change
        for key in self:
            on_change(key, True)

    def __setitem__(self, key: K, value: V) -> None:
        is_new = key not in self
        super().__setitem__(key, value)
        if is_new and self.on_change is not None:
            self.on_change(key, True)

    def pop(self, key: K, *default: Any) -> Any:
        was_there = key in self
        value = super().pop(key, *default)
        if was_there and self.on_change is not None:
            self.on_change(key, False)
        return value
