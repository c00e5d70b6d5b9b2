"""Chunks on their way: those that pages are put together to, and those that pages are cut out of. Both are bounded."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from jaxpaged.kv_store.lmcache.chunks import Chunk
from jaxpaged.kv_store.page import PageKey

MAX_BYTES = 256 << 20
"""Of chunks that are held at a time, or two where they are larger."""
MAX_WANTED = 4096


class Filling:
    """A chunk of which some pages have come."""

    def __init__(self, missing: Sequence[PageKey]):
        self.missing = set(missing)
        self.array: np.ndarray | None = None


class Staging:
    """Chunks that pages are collected for, of `chunk_bytes` each. The oldest go when there is no room."""

    def __init__(self, empty: Callable[[], np.ndarray], chunk_bytes: int, max_bytes: int = MAX_BYTES):
        self._empty = empty
        self._most = max(max_bytes // chunk_bytes, 2)
        self._lock = threading.Lock()
        self._fillings: OrderedDict[Chunk, Filling] = OrderedDict()
        self.num_dropped = 0

    def want(self, chunk: Chunk, keys: Sequence[PageKey]) -> None:
        """Collect the pages of a chunk, all of these, from now on."""
        with self._lock:
            if chunk not in self._fillings:
                self._fillings[chunk] = Filling(keys)
            self._fillings.move_to_end(chunk)
            self._make_room(MAX_WANTED, self._fillings)

    def wanting(self, key: PageKey, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Those of these chunks that a page is collected for and has not come."""
        with self._lock:
            return [
                each for each in chunks if (filling := self._fillings.get(each)) is not None and key in filling.missing
            ]

    def place(self, chunk: Chunk, key: PageKey, write: Callable[[np.ndarray], None]) -> np.ndarray | None:
        """Have a page written into a chunk's array. The array once it is whole, which is the caller's then."""
        with self._lock:
            filling = self._fillings.get(chunk)
            if filling is None:
                return None
            if filling.array is None:
                held = [each for each, other in self._fillings.items() if other.array is not None]
                self._make_room(self._most - 1, held)
                filling.array = self._empty()
            array = filling.array
        write(array)  # outside of the lock; two that write the same page write the same bytes
        with self._lock:
            filling.missing.discard(key)
            if filling.missing or self._fillings.get(chunk) is not filling:
                return None
            del self._fillings[chunk]
            return array

    def discard(self, chunks: Sequence[Chunk]) -> None:
        """Collect pages for these no longer."""
        with self._lock:
            for chunk in chunks:
                self._fillings.pop(chunk, None)

    def _make_room(self, most: int, held: Sequence[Chunk] | OrderedDict[Chunk, Filling]) -> None:
        for chunk in list(held)[: max(len(held) - most, 0)]:
            del self._fillings[chunk]
            self.num_dropped += 1


class ChunkReader:
    """Chunks that were fetched for one page, for as long as others of their pages may be read.

    Each is fetched once, by whoever comes first; it goes when all of its `num_pages` were read, or for want of room.
    """

    def __init__(
        self, fetch: Callable[[Chunk], np.ndarray | None], num_pages: int, chunk_bytes: int, max_bytes: int = MAX_BYTES
    ):
        self._fetch, self._num_pages = fetch, num_pages
        self._most = max(max_bytes // chunk_bytes, 2)
        self._lock = threading.Lock()
        self._held: OrderedDict[Chunk, Future[np.ndarray | None]] = OrderedDict()
        self._num_read: dict[Chunk, int] = {}

    def read(self, chunk: Chunk) -> np.ndarray | None:
        """The chunk, or None where the store does not have it. Blocks while it is fetched."""
        with self._lock:
            future = self._held.get(chunk)
            is_first = future is None
            if future is None:
                future = self._held[chunk] = Future()
                done = [each for each, other in self._held.items() if other.done()]
                for oldest in done[: max(len(self._held) - self._most, 0)]:
                    self._forget(oldest)
            self._held.move_to_end(chunk)
            self._num_read[chunk] = self._num_read.get(chunk, 0) + 1
            if self._num_read[chunk] >= self._num_pages:
                self._forget(chunk)
        if is_first:
            found = None
            try:
                found = self._fetch(chunk)
            finally:
                future.set_result(found)
                if found is None:
                    with self._lock:
                        self._forget(chunk)
        return future.result()

    def _forget(self, chunk: Chunk) -> None:
        self._held.pop(chunk, None)
        self._num_read.pop(chunk, None)
