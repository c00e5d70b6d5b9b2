"""LMCache's layout in Redis or Valkey: for each part of a chunk its bytes, and a description, under two keys.

`<name>kv_bytes` and `<name>metadata`. LMCache looks for the description only, so it is written last; the server may
evict either. A part ends at 512 MB, by the server's default.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxpaged.errors import PageError
from jaxpaged.kv_store.buffers import Buffer
from jaxpaged.kv_store.lmcache.chunks import Chunk
from jaxpaged.kv_store.lmcache.layout import ChunkLayout
from jaxpaged.kv_store.lmcache.store import DESCRIPTION, ChunkStore, check_description, description_of
from jaxpaged.kv_store.redis_tier import Login, connect_redis

METADATA, BYTES = "metadata", "kv_bytes"


class RedisChunkStore(ChunkStore):
    """Chunks in the server at `url` (`redis://`, `rediss://` or `unix://`). With `ttl_s` they expire after that."""

    def __init__(
        self,
        url: str,
        layout: ChunkLayout,
        model: str,
        *,
        ttl_s: int | None = None,
        login: Login = (None, None),
        timeout_s: float = 2.0,
        retry_after_s: float = 30.0,
    ):
        self._ttl_s = ttl_s
        self.client: Any
        self.client, where, self.failures, self.refusals = connect_redis(url, login, timeout_s)
        super().__init__(where, layout, model, timeout_s=timeout_s, retry_after_s=retry_after_s)

    def exist(self, chunks: Sequence[Chunk]) -> list[bool]:
        pipeline = self.client.pipeline(transaction=False)
        for chunk in chunks:
            pipeline.exists(*[name + METADATA for name in self.names(chunk)])
        return [count == self.layout.num_parts for count in pipeline.execute()]

    def fetch(self, chunk: Chunk) -> np.ndarray | None:
        parts = []
        for name in self.names(chunk):
            pipeline = self.client.pipeline(transaction=False)
            pipeline.getrange(name + METADATA, 0, DESCRIPTION.size)  # one byte more than there may be
            pipeline.strlen(name + BYTES)
            described, length = pipeline.execute()
            if not described or not length:
                return None
            if len(described) != DESCRIPTION.size or length != self.layout.part_bytes:
                raise PageError(
                    f"LMCache's {name!r:.200} is not used: it has {length} bytes, described by {len(described)}; here "
                    f"it has {self.layout.part_bytes}, and {DESCRIPTION.size}."
                )
            check_description(DESCRIPTION.unpack(described), self.layout, name)
            content = self.client.get(name + BYTES)
            if content is None or len(content) != self.layout.part_bytes:
                return None  # it went, or changed, since
            parts.append(np.frombuffer(content, self.layout.chunk_dtype).reshape(self.layout.part_shape))
        return self.whole(parts)

    def store(self, chunk: Chunk, buffers: Sequence[Buffer]) -> None:
        described = DESCRIPTION.pack(*description_of(self.layout))
        for name, part in zip(self.names(chunk), self.parts_of(buffers), strict=True):
            self.client.set(name + BYTES, part.data, ex=self._ttl_s)
            self.client.set(name + METADATA, described, ex=self._ttl_s)

    def remove(self, chunks: Sequence[Chunk]) -> None:
        names = [name + end for chunk in chunks for name in self.names(chunk) for end in (METADATA, BYTES)]
        self.client.unlink(*names)

    def disconnect(self) -> None:
        self.client.close()
