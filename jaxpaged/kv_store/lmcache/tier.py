"""A tier whose pages are cut out of LMCache's chunks, and put together to chunks.

Chunks are made known by whoever knows the tokens (`introduce`); once one is computed its pages are wanted (`collect`),
and when the last has come the chunk is stored. A chunk is fetched for the first page that is read of it. Tokens of
which there is no full chunk are not kept. Counters count chunks.
"""

import dataclasses
import threading
from collections.abc import Iterable, Sequence
from functools import partial

from jaxpaged.errors import PageError
from jaxpaged.kv_store.buffers import Buffer, joined, read_only
from jaxpaged.kv_store.lmcache.chunks import Chunk, ChunkIndex
from jaxpaged.kv_store.lmcache.keys import ChunkHasher
from jaxpaged.kv_store.lmcache.staging import ChunkReader, Staging
from jaxpaged.kv_store.lmcache.store import ChunkStore
from jaxpaged.kv_store.page import PageKey, decode, encode, scales_of
from jaxpaged.kv_store.tier import Lookup, TierUsage
from jaxpaged.kv_store.tier_events import STORAGE, TierEventLog


class LMCacheTier:
    """Pages of the namespace in a store of chunks, which it owns. LMCache knows no namespaces: the model's name says
    whose chunks are used."""

    name = ChunkStore.name

    def __init__(self, store: ChunkStore, hasher: ChunkHasher, namespace: str):
        layout = store.layout
        self.layout, self.namespace, self._store = layout, namespace, store
        self._lock = threading.Lock()  # of the index
        self._index = ChunkIndex(layout, hasher)
        self._staging = Staging(layout.empty, layout.num_bytes)
        num_pages = len(layout.groups) * layout.chunk_tokens // layout.page_tokens
        self._reader = ChunkReader(store.get, num_pages, layout.num_bytes)

    # ---- which chunks there are --------------------------------------------------------------------------

    @property
    def chunk_tokens(self) -> int:
        return self.layout.chunk_tokens

    def introduce(self, token_ids: Sequence[int], hashes: Sequence[bytes], end: int) -> Chunk | None:
        """Full chunks of a text's first `end` tokens may be asked for; `hashes` are its pages'. The last of them."""
        with self._lock:
            chunk, gone = self._index.introduce(token_ids, hashes, end)
        if gone:
            self._staging.discard(gone)
            self._store.forget(gone)
        return chunk

    def collect(self, token_ids: Sequence[int], hashes: Sequence[bytes], end: int) -> bool:
        """The chunk that ends at token `end` is computed. Whether its pages, all of them, are wanted."""
        chunk = self.introduce(token_ids, hashes, end)
        if chunk is None or self._store.lookup([chunk]) == [Lookup.HIT]:
            return False
        self._staging.want(chunk, self._index.keys(chunk))
        return True

    def lacks(self, keys: Sequence[PageKey]) -> list[bool]:
        """Whether it is to be given each page."""
        return [bool(self._wanting(key)) for key in keys]

    def _chunks_of(self, key: PageKey) -> list[Chunk]:
        with self._lock:
            return self._index.chunks_of(key)

    def _wanting(self, key: PageKey) -> list[Chunk]:
        return self._staging.wanting(key, self._chunks_of(key))

    # ---- the tier ------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[PageKey]) -> list[Lookup]:
        with self._lock:
            chunks = [self._index.chunks_of(key) for key in keys]
        distinct = list(dict.fromkeys(chunk for some in chunks for chunk in some))
        states = dict(zip(distinct, self._store.lookup(distinct)))
        return [best_of([states[chunk] for chunk in some]) for some in chunks]

    def get(self, key: PageKey) -> Buffer | None:
        chunks = self._chunks_of(key)
        for chunk, state in zip(chunks, self._store.lookup(chunks)):
            content = self._reader.read(chunk) if state is Lookup.HIT else None
            if content is not None:
                array = content.view(self.layout.chunk_dtype).reshape(self.layout.shape)
                values, scales = self.layout.read_page(array, key.group, self._index.start_of(chunk, key))
                header = self._index.header(chunk, key, self.namespace)
                return read_only(joined(encode(header, values, scales=scales)))
        return None

    def put(self, key: PageKey, buffers: Sequence[Buffer]) -> bool:
        """Whether the page is part of a chunk that is stored now, or will be once its other pages have come."""
        wanting = self._wanting(key)
        if not wanting:
            return False
        page = buffers[0] if len(buffers) == 1 else joined(buffers)
        try:
            header, values = decode(
                page,
                expect_namespace=self.namespace,
                key=key,
                dtype=self.layout.dtype.name,
                shape=self.layout.page_shape(key.group),
                version=self.layout.page_version,
                verify=False,
            )
        except PageError:
            self._staging.discard(wanting)
            return False
        kept, scales = True, scales_of(page, header)
        for chunk in wanting:
            start = self._index.start_of(chunk, key)
            write = partial(self.layout.write_page, g=key.group, start=start, values=values, scales=scales)
            whole = self._staging.place(chunk, key, write)
            kept = (whole is None or self._store.put_array(chunk, whole)) and kept
        return kept

    def touch(self, keys: Iterable[PageKey]) -> None:
        """What the store evicts follows from what is read."""
        return

    def delete(self, keys: Iterable[PageKey]) -> None:
        """The chunks that these pages are part of."""
        chunks = list(dict.fromkeys(chunk for key in keys for chunk in self._chunks_of(key)))
        self._staging.discard(chunks)
        self._store.delete(chunks)

    def watch(self, log: TierEventLog) -> None:
        """What the store evicts is not heard of before it is missed."""

        def tell(chunk: Chunk, is_there: bool) -> None:
            for key in self._index.keys(chunk):
                log.note(STORAGE, key, is_there)

        self._store.on_change = tell

    def usage(self) -> list[TierUsage]:
        lines = self._store.usage()
        dropped = self._staging.num_dropped
        return [
            dataclasses.replace(
                line, counters=dataclasses.replace(line.counters, dropped=line.counters.dropped + dropped)
            )
            for line in lines
        ]

    def close(self) -> None:
        self._store.close()


def best_of(states: Sequence[Lookup]) -> Lookup:
    """Of chunks that have a page, any of which will do."""
    for state in (Lookup.HIT, Lookup.PENDING):
        if state in states:
            return state
    return Lookup.MISS
