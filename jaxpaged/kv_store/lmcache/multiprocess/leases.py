"""Chunks that LMCache's server was asked for and found: it keeps them from being evicted until they are read or let go.

A look-up locks every chunk that it finds, for whoever looked. So each may be read once, and what is not read after a
while is let go, be it that its request was aborted, or that computing was faster. Knows no protocol.
"""

import threading
import time
from collections.abc import Callable, Iterable

import numpy as np

from jaxpaged.kv_store.lmcache.chunks import Chunk

MAX_LEASES = 1024


class Lease:
    """One look-up, under the name `request_id`: the text's tokens, and what of it was found and is still locked."""

    def __init__(self, request_id: str, token_ids: np.ndarray, found: Iterable[Chunk]):
        self.request_id, self.token_ids = request_id, token_ids
        self.left = dict.fromkeys(found)
        self.num_readers = 0
        self.until = 0.0

    def runs(self) -> list[tuple[int, int]]:
        """Which chunks are left, by number: from, and up to without."""
        runs: list[tuple[int, int]] = []
        for number in sorted(chunk.number for chunk in self.left):
            if runs and runs[-1][1] == number:
                runs[-1] = (runs[-1][0], number + 1)
            else:
                runs.append((number, number + 1))
        return runs


class Leases:
    """All of them, and a thread that ends what is over. `end(lease)` tells the server; it may block, and not raise."""

    def __init__(self, end: Callable[[Lease], None], hold_s: float, max_leases: int = MAX_LEASES):
        self._end, self._hold_s, self._max_leases = end, hold_s, max_leases
        self._changed = threading.Condition()
        self._leases: dict[Lease, None] = {}  # the oldest, which ends first, comes first
        self._of_chunk: dict[Chunk, list[Lease]] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._keep_ending, name="kv-lmcache-leases", daemon=True)
        self._thread.start()

    def add(self, lease: Lease) -> None:
        with self._changed:
            lease.until = time.monotonic() + self._hold_s
            self._leases[lease] = None
            for chunk in lease.left:
                self._of_chunk.setdefault(chunk, []).append(lease)
            self._changed.notify_all()

    def take(self, chunk: Chunk) -> Lease | None:
        """One under which a chunk may be read, once; `done` must follow. None: it is not locked."""
        with self._changed:
            held = self._of_chunk.get(chunk)
            if not held:
                return None
            lease = held.pop()
            if not held:
                del self._of_chunk[chunk]
            del lease.left[chunk]
            lease.num_readers += 1
            return lease

    def done(self, lease: Lease) -> None:
        """What was taken is read. The last reader of a lease of which nothing is left ends it."""
        with self._changed:
            lease.num_readers -= 1
            is_over = not lease.left and not lease.num_readers
            self._leases.pop(lease, None) if is_over else None
        if is_over:
            self._end(lease)

    def __len__(self) -> int:
        return len(self._leases)

    def close(self) -> None:
        """End all that nobody reads at the moment."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _keep_ending(self) -> None:
        while True:
            with self._changed:
                while not (over := self._over(time.monotonic())) and not self._closing:
                    first = next(iter(self._leases), None)
                    self._changed.wait(None if first is None else max(first.until - time.monotonic(), 0.01))
                for lease in over:
                    self._forget(lease)
            if not over:
                return
            for lease in over:
                self._end(lease)

    def _over(self, now: float) -> list[Lease]:
        """Those to end now; one that is being read from ends later."""
        too_many = len(self._leases) - self._max_leases
        return [
            lease
            for i, lease in enumerate(self._leases)
            if (self._closing or lease.until <= now or i < too_many) and not lease.num_readers
        ]

    def _forget(self, lease: Lease) -> None:
        del self._leases[lease]
        for chunk in lease.left:
            held = self._of_chunk[chunk]
            held.remove(lease)
            if not held:
                del self._of_chunk[chunk]
