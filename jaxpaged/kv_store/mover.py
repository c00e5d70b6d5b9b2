"""Writes pages into one tier in the background: a queue with a limit, and a few threads.

What does not fit into the queue is dropped and counted: whoever saves never waits for a slow store. Until a page is
written, it can be had from the queue. Knows one tier, and not where pages come from.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from jaxpaged.kv_store.page import PageKey
from jaxpaged.kv_store.tier import Tier

logger = logging.getLogger(__name__)


class Mover:
    """The queue in front of `tier`: at most `max_bytes` of pages, those being written included."""

    def __init__(self, tier: Tier, max_bytes: int, num_threads: int):
        self.tier = tier
        self.max_bytes = max_bytes
        self.dropped = 0
        self._changed = threading.Condition()
        self._waiting: OrderedDict[PageKey, np.ndarray] = OrderedDict()
        self._being_written: dict[PageKey, np.ndarray] = {}
        self._deleted: set[PageKey] = set()  # while they were being written
        self._num_bytes = 0
        self._closing = self._failed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"kv-to-{tier.name}-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, key: PageKey, page: np.ndarray) -> bool:
        """Have a page written, which must not change any more. False when it is dropped."""
        with self._changed:
            if key in self._waiting or (key in self._being_written and key not in self._deleted):
                return True
            if self._closing or self._num_bytes + page.nbytes > self.max_bytes:
                self.dropped += 1
                return False
            self._waiting[key] = page
            self._num_bytes += page.nbytes
            self._changed.notify()
            return True

    def find(self, key: PageKey) -> np.ndarray | None:
        """A page that is still on its way."""
        with self._changed:
            if key in self._waiting:
                return self._waiting[key]
            return None if key in self._deleted else self._being_written.get(key)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._being_written)

    def delete(self, keys: Iterable[PageKey]) -> None:
        """Do not write these after all."""
        with self._changed:
            for key in keys:
                if (page := self._waiting.pop(key, None)) is not None:
                    self._num_bytes -= page.nbytes
                if key in self._being_written:
                    self._deleted.add(key)

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything is written. False when it took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.num_waiting, timeout_s)

    def close(self, deadline: float) -> None:
        """Write what is in the queue until `deadline` (monotonic), and end the threads. The rest is dropped."""
        self.flush(max(deadline - time.monotonic(), 0.0))
        with self._changed:
            self._closing = True
            self.dropped += len(self._waiting)
            self._num_bytes -= sum(page.nbytes for page in self._waiting.values())
            self._waiting.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.1))

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._next() is not None)
                if (key := self._next()) is None:
                    return
                page = self._being_written[key] = self._waiting.pop(key)
            try:
                self.tier.put(key, [page])
            except Exception as error:  # a tier must not raise; if one does, the others go on
                self._failed_with(error)
            with self._changed:
                del self._being_written[key]
                self._num_bytes -= page.nbytes
                is_unwanted = key in self._deleted
                self._deleted.discard(key)
                self._changed.notify_all()
            if is_unwanted:
                self.tier.delete([key])

    def _next(self) -> PageKey | None:
        """The oldest that nobody is writing: one that was deleted and came again waits for its first writer."""
        return next((key for key in self._waiting if key not in self._being_written), None)

    def _failed_with(self, error: Exception) -> None:
        with self._changed:
            self.dropped += 1
            is_news, self._failed = not self._failed, True
        if is_news:
            logger.warning("Saving pages to the tier %s failed: %s: %s", self.tier.name, type(error).__name__, error)
