"""Chunks of tokens as LMCache has them, and which pages each is made of.

A page is found by its hash, which does not say of which tokens it is. So chunks are made known, with their tokens and
the hashes of their pages, before their pages are asked for or kept; what is not known is in no chunk. A page may be
part of several chunks, which go on differently behind it.
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from jaxpaged.kv_store.lmcache.keys import ChunkHasher
from jaxpaged.kv_store.lmcache.layout import ChunkLayout
from jaxpaged.kv_store.page import PageHeader, PageKey

MAX_CHUNKS = 1 << 13
"""That are known at a time: the last ones that requests began with."""
MAX_SHARING = 32
"""Chunks, the latest, that a page is known to be part of."""


class Chunk:
    """One chunk of a text: its tokens, all before it, and the hashes of its pages. Equal to chunks of equal hashes."""

    __slots__ = ("before", "chunk_hash", "hashes", "number", "token_ids")

    def __init__(self, before: "Chunk | None", token_ids: np.ndarray, hashes: tuple[bytes, ...], chunk_hash: int):
        self.before, self.token_ids, self.hashes, self.chunk_hash = before, token_ids, hashes, chunk_hash
        self.number: int = 0 if before is None else before.number + 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chunk) and self.hashes[-1] == other.hashes[-1]

    def __hash__(self) -> int:
        return hash(self.hashes[-1])

    def beginning(self) -> np.ndarray:
        """All tokens up to its end."""
        parts = [self.token_ids]
        before = self.before
        while before is not None:
            parts.append(before.token_ids)
            before = before.before
        return np.concatenate(parts[::-1])


class ChunkIndex:
    """The chunks that are known. Not for several threads at a time."""

    def __init__(self, layout: ChunkLayout, hasher: ChunkHasher, max_chunks: int = MAX_CHUNKS):
        self.layout, self.hasher, self._max_chunks = layout, hasher, max_chunks
        self._chunks: OrderedDict[bytes, Chunk] = OrderedDict()  # by the hash of the last page
        self._of_page: dict[PageKey, list[Chunk]] = {}

    def introduce(
        self, token_ids: Sequence[int], hashes: Sequence[bytes], end: int
    ) -> tuple[Chunk | None, list[Chunk]]:
        """Make the full chunks of the first `end` tokens known; `hashes` are those of their pages.

        The last of these chunks, None without any, and chunks that are known no more.
        """
        size, num_pages = self.layout.chunk_tokens, self.layout.chunk_tokens // self.layout.page_tokens
        chunk, gone = None, []
        for number in range(min(end // size, len(hashes) // num_pages)):
            last = hashes[(number + 1) * num_pages - 1]
            known = self._chunks.get(last)
            if known is None:
                some = token_ids[number * size : (number + 1) * size]
                parent = self.hasher.root if chunk is None else chunk.chunk_hash
                own = tuple(hashes[number * num_pages : (number + 1) * num_pages])
                known = Chunk(chunk, np.asarray(some, np.uint32), own, self.hasher.hash(parent, some))
                self._chunks[last] = known
                gone += self._forget_oldest()
            else:
                self._chunks.move_to_end(last)
            self._note_pages(known)
            chunk = known
        return chunk, gone

    def _note_pages(self, chunk: Chunk) -> None:
        """It is the latest of those that its pages are part of."""
        if (first := self._of_page.get(PageKey(chunk.hashes[0], 0))) is not None and first[-1] == chunk:
            return
        for key in self.keys(chunk):
            sharing = self._of_page.setdefault(key, [])
            if chunk in sharing:
                sharing.remove(chunk)
            sharing.append(chunk)
            del sharing[:-MAX_SHARING]

    def _forget_oldest(self) -> list[Chunk]:
        gone = [self._chunks.popitem(last=False)[1] for _ in range(len(self._chunks) - self._max_chunks)]
        for chunk in gone:
            for key in self.keys(chunk):
                sharing = self._of_page.get(key, [])
                if chunk in sharing:
                    sharing.remove(chunk)
                if not sharing:
                    self._of_page.pop(key, None)
        return gone

    def chunks_of(self, key: PageKey) -> list[Chunk]:
        """Known chunks that a page is part of, the latest first."""
        return self._of_page.get(key, [])[::-1]

    def keys(self, chunk: Chunk) -> list[PageKey]:
        """The pages that a chunk is made of."""
        return [PageKey(each, g) for g in range(len(self.layout.groups)) for each in chunk.hashes]

    def start_of(self, chunk: Chunk, key: PageKey) -> int:
        """At which token of a chunk one of its pages begins."""
        return chunk.hashes.index(key.block_hash) * self.layout.page_tokens

    def header(self, chunk: Chunk, key: PageKey, namespace: str) -> PageHeader:
        """What a page says that was part of a chunk."""
        start, size = self.start_of(chunk, key), self.layout.page_tokens
        if start:
            parent: bytes | None = chunk.hashes[start // size - 1]
        else:
            parent = chunk.before.hashes[-1] if chunk.before is not None else None
        return PageHeader(namespace, key, parent, tuple(chunk.token_ids[start : start + size].tolist()))
