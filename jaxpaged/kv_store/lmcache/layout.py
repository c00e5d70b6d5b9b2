"""How LMCache lays out the keys and values of a chunk, and where pages are in it.

A chunk is `[2, layers, tokens, heads * head dim]` (LMCache's KV_2LTD): keys then values, after rotation, all layers in
their order, heads in theirs. Where vLLM runs on several devices each stores its own heads, so that a chunk is in as
many parts; where these are more than heads, neighbours have the same one. A page is `[layers of a group, 2, tokens,
heads, head dim]`, so a chunk is made of the pages of all groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxpaged.errors import ConfigError
from jaxpaged.kv_store.buffers import aligned_empty
from jaxpaged.kv_store.lmcache.keys import DTYPE_NAMES


@dataclass(frozen=True)
class ChunkLayout:
    """Raises ConfigError for what does not fit into one."""

    num_layers: int
    num_heads: int
    head_dim: int
    dtype: np.dtype
    chunk_tokens: int
    groups: tuple[tuple[int, ...], ...]
    """Of each KV group the layers of the model that it has, in the order of its pages."""
    page_tokens: int
    num_parts: int = 1
    """Devices of those who share the store: `world_size` in LMCache's names."""

    def __post_init__(self) -> None:
        if self.chunk_tokens <= 0 or self.chunk_tokens % self.page_tokens:
            raise ConfigError(
                f"LMCache's chunk_size is {self.chunk_tokens} tokens, and pages have {self.page_tokens}: it must be a "
                "multiple. Give other page_tokens in kv_offload, or another block_size."
            )
        if sorted(layer for layers in self.groups for layer in layers) != list(range(self.num_layers)):
            raise ConfigError("LMCache's chunks hold every layer once, and some layers of this model share theirs.")
        if self.dtype.name not in DTYPE_NAMES:
            raise ConfigError(
                f"LMCache's chunks are shared as {', '.join(DTYPE_NAMES)}, and the KV cache has {self.dtype.name}. "
                "Give another kv_cache_dtype."
            )
        if self.num_parts <= 0 or (self.num_heads % self.num_parts and self.num_parts % self.num_heads):
            raise ConfigError(
                f"LMCache's world_size is {self.num_parts}, and the model has {self.num_heads} KV heads: it must "
                "divide them, or they it (tensor parallelism; stages of a pipeline are not read)."
            )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return 2, self.num_layers, self.chunk_tokens, self.num_heads * self.head_dim

    @property
    def part_shape(self) -> tuple[int, int, int, int]:
        """Of what one device has of a chunk."""
        return *self.shape[:3], self.shape[3] // self._num_different

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize

    @property
    def part_bytes(self) -> int:
        return self.num_bytes // self._num_different

    @property
    def _num_different(self) -> int:
        return min(self.num_parts, self.num_heads)

    def empty(self) -> np.ndarray:
        """A chunk of any content."""
        return aligned_empty(self.num_bytes).view(self.dtype).reshape(self.shape)

    def page_shape(self, g: int) -> tuple[int, ...]:
        return len(self.groups[g]), 2, self.page_tokens, self.num_heads, self.head_dim

    def write_page(self, chunk: np.ndarray, g: int, start: int, values: np.ndarray) -> None:
        """Put the page of group `g` that begins at token `start` of the chunk where it belongs."""
        place = self._by_head(chunk)[:, :, start : start + self.page_tokens]
        for layer, page in zip(self.groups[g], values, strict=True):
            place[:, layer] = page

    def read_page(self, chunk: np.ndarray, g: int, start: int) -> np.ndarray:
        """A copy of such a page."""
        place = self._by_head(chunk)[:, :, start : start + self.page_tokens]
        page = np.empty(self.page_shape(g), self.dtype)
        for i, layer in enumerate(self.groups[g]):
            page[i] = place[:, layer]
        return page

    def _by_head(self, chunk: np.ndarray) -> np.ndarray:
        return chunk.reshape(*self.shape[:3], self.num_heads, self.head_dim)

    def parts(self, chunk: np.ndarray) -> list[np.ndarray]:
        """What each device of those who share the store has of a chunk: contiguous, copies where it is cut."""
        different = [np.ascontiguousarray(part) for part in np.split(chunk, self._num_different, axis=3)]
        return [part for part in different for _ in range(self.num_parts // len(different))]

    def joined(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """The chunk that these are the parts of."""
        if len(parts) == 1:
            return parts[0]
        different = parts[:: len(parts) // self._num_different]
        return np.concatenate(different, axis=3, out=self.empty())

    def empty_part(self) -> np.ndarray:
        return aligned_empty(self.part_bytes).view(self.dtype).reshape(self.part_shape)
