"""A tier in this process's memory: a buffer for each page, evicted when the capacity is reached.

Buffers are counted by their references, not by the tier: whoever got one may keep it, and it is freed with the last
view. So evicting never waits for a reader, and what readers hold beyond the capacity is theirs to account for.
"""

import dataclasses
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from jaxpaged.errors import ConfigError
from jaxpaged.kv_store.buffers import ALIGNMENT, Buffer, joined, read_only, total_bytes
from jaxpaged.kv_store.page import PageKey
from jaxpaged.kv_store.policy import Policy, SecondUse, policy_named
from jaxpaged.kv_store.tier import Counters, Lookup, TierUsage
from jaxpaged.kv_store.tier_events import MEMORY, TierEventLog, WatchedDict


class HostTier:
    """Pages in memory. `on_evict(key, buffer)` is told of each page that goes for want of room, outside of the lock.

    A page given as one read-only, aligned array, as tiers hand them out, is kept as it is, without a copy.
    """

    name = "host"

    def __init__(
        self,
        capacity: int,
        policy: str = "lru",
        second_use: bool = False,
        on_evict: Callable[[PageKey, Buffer], None] | None = None,
    ):
        if capacity <= 0:
            raise ConfigError(f"The host tier has a capacity of {capacity} bytes. Give it some, or leave it out.")
        self.capacity = capacity
        self.on_evict = on_evict
        self.counters = Counters()
        self._policy: Policy[PageKey] = policy_named(policy, capacity)
        self._admission: SecondUse[PageKey] | None = SecondUse() if second_use else None
        self._lock = threading.Lock()
        self._pages = WatchedDict[PageKey, np.ndarray]()
        self._being_written: dict[PageKey, object] = {}
        self._page_bytes = 0
        self._bytes_being_written = 0

    def lookup(self, keys: Sequence[PageKey]) -> list[Lookup]:
        with self._lock:
            return [self._state(key) for key in keys]

    def _state(self, key: PageKey) -> Lookup:
        if key in self._pages:
            return Lookup.HIT
        return Lookup.PENDING if key in self._being_written else Lookup.MISS

    def get(self, key: PageKey) -> Buffer | None:
        with self._lock:
            page = self._pages.get(key)
            if page is None:
                self.counters.misses += 1
                return None
            self.counters.hits += 1
            self.counters.loaded_bytes += page.nbytes
            self._policy.touch(key)
            return page

    def put(self, key: PageKey, buffers: Sequence[Buffer]) -> bool:
        size, ticket = total_bytes(buffers), object()
        with self._lock:
            if self._state(key) is not Lookup.MISS:
                self._policy.touch(key)
                return True
            refused = self._admission and not self._admission.admits(key)
            if refused or self._bytes_being_written + size > self.capacity:
                self.counters.dropped += 1
                return False
            evicted = self._make_room(size)
            self._being_written[key] = ticket
            self._bytes_being_written += size
        page = None
        try:
            page = as_kept(buffers)
        finally:
            with self._lock:
                self._bytes_being_written -= size
                is_wanted = self._being_written.get(key) is ticket  # it was not deleted meanwhile
                if is_wanted:
                    del self._being_written[key]
                if page is not None and is_wanted:
                    self._pages[key] = page
                    self._page_bytes += size
                    self._policy.insert(key, size)
                    self.counters.stored += 1
                    self.counters.stored_bytes += size
        if self.on_evict:
            for gone, buffer in evicted:
                self.on_evict(gone, buffer)
        return is_wanted

    def _make_room(self, size: int) -> list[tuple[PageKey, np.ndarray]]:
        """Evict until `size` bytes fit besides those that are being written."""
        evicted = []
        while self._page_bytes + self._bytes_being_written + size > self.capacity:
            key = self._policy.evict()
            page = self._pages.pop(key)
            self._page_bytes -= page.nbytes
            self.counters.evictions += 1
            evicted.append((key, page))
        return evicted

    def touch(self, keys: Iterable[PageKey]) -> None:
        with self._lock:
            for key in keys:
                self._policy.touch(key)

    def delete(self, keys: Iterable[PageKey]) -> None:
        with self._lock:
            for key in keys:
                self._being_written.pop(key, None)
                self._policy.remove(key)
                if (page := self._pages.pop(key, None)) is not None:
                    self._page_bytes -= page.nbytes

    def watch(self, log: TierEventLog) -> None:
        with self._lock:
            self._pages.watch(partial(log.note, MEMORY))

    def usage(self) -> list[TierUsage]:
        with self._lock:
            counters = dataclasses.replace(self.counters)
            used = self._page_bytes + self._bytes_being_written
            return [TierUsage(self.name, used, self.capacity, len(self._pages), counters)]

    def close(self) -> None:
        with self._lock:
            keys = [*self._pages, *self._being_written]
        self.delete(keys)


def as_kept(buffers: Sequence[Buffer]) -> np.ndarray:
    """The page in one piece that nobody writes to."""
    page = buffers[0] if len(buffers) == 1 and isinstance(buffers[0], np.ndarray) else None
    if page is not None and page.dtype == np.uint8 and page.flags.c_contiguous and not page.flags.writeable:
        return page if page.ctypes.data % ALIGNMENT == 0 else read_only(joined(buffers))
    return read_only(joined(buffers))
