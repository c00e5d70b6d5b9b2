"""What all servers that keep LMCache's chunks have in common: their parts, and what may be accepted as one."""

import abc
import struct
from collections.abc import Callable, Sequence

import numpy as np

from jaxpaged.errors import PageError
from jaxpaged.kv_store.lmcache.chunks import Chunk
from jaxpaged.kv_store.lmcache.keys import chunk_name
from jaxpaged.kv_store.lmcache.layout import ChunkLayout
from jaxpaged.kv_store.remote_store import AsyncRemoteStore

KV_2LTD = 1
"""LMCache's number of the layout [2, layers, tokens, hidden]."""
DTYPE_NUMBERS = {"float16": 2, "bfloat16": 3, "float32": 4, "uint8": 6}
"""numpy's names of types, and LMCache's numbers, of which 1 is float16 too."""
ALSO_FLOAT16 = 1


class ChunkStore(AsyncRemoteStore[Chunk, np.ndarray], abc.ABC):
    """A store of chunks. What is handed out are bytes (uint8), `layout.num_bytes` of them."""

    name = "lmcache"
    max_known = 1 << 14

    def __init__(
        self, where: str, layout: ChunkLayout, model: str, *, timeout_s: float = 2.0, retry_after_s: float = 30.0
    ):
        self.layout, self.model, self.timeout_s = layout, model, timeout_s
        self.on_change: Callable[[Chunk, bool], None] | None = None
        super().__init__(where, patience_s=timeout_s, retry_after_s=retry_after_s)

    def names(self, chunk: Chunk) -> list[str]:
        """Of its parts."""
        n, dtype = self.layout.num_parts, self.layout.chunk_dtype.name
        return [chunk_name(self.model, n, worker, chunk.chunk_hash, dtype) for worker in range(n)]

    def checked(self, chunk: Chunk, content: np.ndarray) -> np.ndarray:
        """LMCache keeps no checksums: what has the right form is believed."""
        return content

    def noted(self, chunk: Chunk, is_there: bool) -> None:
        if self.on_change is not None:
            self.on_change(chunk, is_there)

    def remove(self, chunks: Sequence[Chunk]) -> None:
        """Most servers have no way to. What is wrong is overwritten when it is computed anew."""
        return

    def put_array(self, chunk: Chunk, array: np.ndarray) -> bool:
        """Keep a chunk, given as `layout.shape`. Whether it is there now."""
        return self.put(chunk, [array.reshape(-1).view(np.uint8)])

    def parts_of(self, buffers: Sequence[object]) -> list[np.ndarray]:
        """The parts, as bytes, of what `put_array` was given."""
        (whole,) = buffers
        assert isinstance(whole, np.ndarray)
        if self.layout.num_parts == 1:
            return [whole]
        parts = self.layout.parts(whole.view(self.layout.chunk_dtype).reshape(self.layout.shape))
        return [part.reshape(-1).view(np.uint8) for part in parts]

    def whole(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """The bytes of the chunk that these are the parts of, as `layout.part_shape`."""
        return self.layout.joined(parts).reshape(-1).view(np.uint8)


DESCRIPTION = struct.Struct("<7i")
"""How LMCache describes a part of a chunk: length, layout, type, and 4 extents."""


def description_of(layout: ChunkLayout) -> tuple[int, ...]:
    """Of a part of a chunk: length, layout, type, extents."""
    return layout.part_bytes, KV_2LTD, DTYPE_NUMBERS[layout.chunk_dtype.name], *layout.part_shape


def check_description(said: Sequence[int], layout: ChunkLayout, name: str) -> None:
    """Raise PageError unless something is a part of a chunk. Nothing is read or allocated by what is said."""
    length, form, dtype, *extents = said
    wanted = description_of(layout)
    if dtype == ALSO_FLOAT16:
        dtype = DTYPE_NUMBERS["float16"]
    if (length, form, dtype, *extents) != wanted:
        raise PageError(
            f"LMCache's {name!r:.200} is not used: it says length {length}, layout {form}, type {dtype} and shape "
            f"{extents}; this engine has {wanted[0]}, {wanted[1]}, {wanted[2]} and {list(wanted[3:])}."
        )
