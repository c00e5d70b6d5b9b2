"""Writes pages into one tier in the background: a queue with a limit, and a few threads.

Whoever saves never waits for a slow store. A page that does not fit into the queue waits for its turn in the tier that
holds it; one that no tier holds is dropped, counted, and told of once. Until a page in the queue is written, it can be
had from there.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np

from jaxpaged.kv_store.page import PageKey
from jaxpaged.kv_store.tier import Tier

logger = logging.getLogger(__name__)


class TierWriter:
    """The queue in front of `tier`: at most `max_bytes` of pages, those being written included. `read` gives a page
    that another tier holds, None where it holds it no longer."""

    def __init__(self, tier: Tier, max_bytes: int, num_threads: int, read: Callable[[PageKey], np.ndarray | None]):
        self.tier = tier
        self.max_bytes = max_bytes
        self.dropped = 0
        self._read = read
        self._changed = threading.Condition()
        self._waiting: OrderedDict[PageKey, np.ndarray] = OrderedDict()
        self._later: OrderedDict[PageKey, None] = OrderedDict()  # that another tier holds
        self._being_written: dict[PageKey, np.ndarray | None] = {}  # None: it is being read first
        self._deleted: set[PageKey] = set()  # while they were being written
        self._num_bytes = 0
        self._closing = self._failed = self._has_dropped = False
        self._threads = [
            threading.Thread(target=self._work, name=f"kv-to-{tier.name}-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, key: PageKey, page: np.ndarray, is_held: bool = False) -> bool:
        """Have a page written, which must not change any more; `is_held`: it can be read where it is. False when it is
        dropped."""
        with self._changed:
            if key in self._waiting:
                return True
            if key in self._being_written and key not in self._deleted:
                if self._being_written[key] is None:  # who reads it may find it gone
                    self._being_written[key] = page
                return True
            self._changed.notify()
            if is_held and not self._closing and not self._fits(page.nbytes):
                self._later[key] = None
                return True
            self._later.pop(key, None)
            if self._closing or not self._fits(page.nbytes):
                self._drop(1)
                return False
            self._waiting[key] = page
            self._num_bytes += page.nbytes
            return True

    def offer(self, key: PageKey, page: np.ndarray) -> None:
        """The same for one that is kept elsewhere, if there is room for it now."""
        with self._changed:
            if self._fits(page.nbytes):
                self.submit(key, page)

    def _fits(self, num_bytes: int) -> bool:
        return self._num_bytes + num_bytes <= self.max_bytes

    def _drop(self, num_pages: int) -> None:
        self.dropped += num_pages
        is_news, self._has_dropped = num_pages and not self._has_dropped, True
        if is_news:
            logger.warning(
                "%d pages of keys and values do not get into the tier %s, which is slower than they come. The metric "
                "jaxpaged:kv_offload_tier_dropped counts further ones, and the log does not.",
                num_pages,
                self.tier.name,
            )

    def find(self, key: PageKey) -> np.ndarray | None:
        """A page that is still on its way, and that no tier may hold."""
        with self._changed:
            if key in self._waiting:
                return self._waiting[key]
            return None if key in self._deleted else self._being_written.get(key)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._later) + len(self._being_written)

    def delete(self, keys: Iterable[PageKey]) -> None:
        """Do not write these after all."""
        with self._changed:
            for key in keys:
                self._later.pop(key, None)
                if (page := self._waiting.pop(key, None)) is not None:
                    self._num_bytes -= page.nbytes
                if key in self._being_written:
                    self._deleted.add(key)

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything is written. False when it took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.num_waiting, timeout_s)

    def close(self, deadline: float, patience_s: float) -> None:
        """Write what is in the queue until `deadline` (monotonic), or until no page was written for so long, and end
        the threads. The rest is dropped."""
        while num_waiting := self.num_waiting:
            seconds = min(deadline - time.monotonic(), patience_s)
            with self._changed:
                if not self._changed.wait_for(lambda: self.num_waiting < num_waiting, max(seconds, 0.0)):
                    break
        with self._changed:
            self._closing = True
            self._drop(len(self._waiting) + len(self._later))
            self._num_bytes -= sum(page.nbytes for page in self._waiting.values())
            self._waiting.clear()
            self._later.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(min(deadline - time.monotonic(), 1.0), 0.1))

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._next() is not None)
                if (key := self._next()) is None:
                    return
                self._later.pop(key, None)
                page = self._being_written[key] = self._waiting.pop(key, None)
            num_bytes = 0 if page is None else page.nbytes
            try:
                if page is None and (page := self._read(key)) is None:
                    page = self._being_written[key]
                if page is not None:
                    self.tier.put(key, [page])
            except Exception as error:  # a tier must not raise; if one does, the others go on
                self._failed_with(error)
            with self._changed:
                del self._being_written[key]
                self._num_bytes -= num_bytes
                is_unwanted = key in self._deleted
                self._deleted.discard(key)
                self._changed.notify_all()
            if is_unwanted:
                self.tier.delete([key])

    def _next(self) -> PageKey | None:
        """The oldest that nobody is writing: one that was deleted and came again waits for its first writer. Those that
        another tier holds come last."""
        for pages in (self._waiting, self._later):
            if (key := next((key for key in pages if key not in self._being_written), None)) is not None:
                return key
        return None

    def _failed_with(self, error: Exception) -> None:
        with self._changed:
            self.dropped += 1
            is_news, self._failed = not self._failed, True
        if is_news:
            logger.warning("Saving pages to the tier %s failed: %s: %s", self.tier.name, type(error).__name__, error)
