"""How LMCache lays out the keys and values of a chunk, and where pages are in it.

A chunk is `[2, layers, tokens, heads * head dim]` (LMCache's KV_2LTD): keys then values, after rotation, all layers in
their order, heads in theirs. Where vLLM runs on several devices each stores its own heads, so that a chunk is in as
many parts; where these are more than heads, neighbours have the same one. A page is `[layers of a group, 2, tokens,
heads, head dim]`, so a chunk is made of the pages of all groups. Numbers of 8 bits are bytes in a chunk; where each
token and head has a scale, its 4 bytes follow those of the numbers that it is of, as if heads were larger.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxpaged.errors import ConfigError
from jaxpaged.kv_store.buffers import aligned_empty
from jaxpaged.kv_store.lmcache.keys import DTYPE_NAMES
from jaxpaged.kv_store.page import EIGHT_BITS, SCALE_BYTES, SCALED, VERSION

BYTES = np.dtype(np.uint8)
"""Of chunks whose numbers have 8 bits."""


@dataclass(frozen=True)
class ChunkLayout:
    """Raises ConfigError for what does not fit into one."""

    num_layers: int
    num_heads: int
    head_dim: int
    dtype: np.dtype
    """Of keys and values in pages."""
    chunk_tokens: int
    groups: tuple[tuple[int, ...], ...]
    """Of each KV group the layers of the model that it has, in the order of its pages."""
    page_tokens: int
    num_parts: int = 1
    """Devices of those who share the store: `world_size` in LMCache's names."""
    has_scales: bool = False
    """Whether pages have a scale for each token and head."""

    def __post_init__(self) -> None:
        if self.chunk_tokens <= 0 or self.chunk_tokens % self.page_tokens:
            raise ConfigError(
                f"LMCache's chunk_size is {self.chunk_tokens} tokens, and pages have {self.page_tokens}: it must be a "
                "multiple. Give other page_tokens in kv_offload, or another block_size."
            )
        if sorted(layer for layers in self.groups for layer in layers) != list(range(self.num_layers)):
            raise ConfigError("LMCache's chunks hold every layer once, and some layers of this model share theirs.")
        if self.chunk_dtype.name not in DTYPE_NAMES:
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
    def chunk_dtype(self) -> np.dtype:
        return BYTES if self.dtype.name in EIGHT_BITS else self.dtype

    @property
    def page_version(self) -> int:
        return SCALED if self.has_scales else VERSION

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return 2, self.num_layers, self.chunk_tokens, self.num_heads * self._head_extent

    @property
    def _head_extent(self) -> int:
        return self.head_dim + SCALE_BYTES * self.has_scales

    @property
    def part_shape(self) -> tuple[int, int, int, int]:
        """Of what one device has of a chunk."""
        return *self.shape[:3], self.shape[3] // self._num_different

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * self.chunk_dtype.itemsize

    @property
    def part_bytes(self) -> int:
        return self.num_bytes // self._num_different

    @property
    def _num_different(self) -> int:
        return min(self.num_parts, self.num_heads)

    def empty(self) -> np.ndarray:
        """A chunk of any content."""
        return aligned_empty(self.num_bytes).view(self.chunk_dtype).reshape(self.shape)

    def page_shape(self, g: int) -> tuple[int, ...]:
        return len(self.groups[g]), 2, self.page_tokens, self.num_heads, self.head_dim

    def write_page(
        self, chunk: np.ndarray, g: int, start: int, values: np.ndarray, scales: np.ndarray | None = None
    ) -> None:
        """Put the page of group `g` that begins at token `start` of the chunk where it belongs."""
        place, numbers = self._place(chunk, start), values.view(self.chunk_dtype)
        for i, layer in enumerate(self.groups[g]):
            place[:, layer, ..., : self.head_dim] = numbers[i]
            if scales is not None:
                place[:, layer, ..., self.head_dim :] = scales[i, ..., None].view(BYTES)

    def read_page(self, chunk: np.ndarray, g: int, start: int) -> tuple[np.ndarray, np.ndarray | None]:
        """A copy of such a page, and of its scales where there are some."""
        place = self._place(chunk, start)
        page = np.stack([place[:, layer] for layer in self.groups[g]])
        if not self.has_scales:
            return page.view(self.dtype), None
        values, scales = (np.ascontiguousarray(each) for each in np.split(page, [self.head_dim], axis=-1))
        return values.view(self.dtype), scales.view("<f4")[..., 0]

    def _place(self, chunk: np.ndarray, start: int) -> np.ndarray:
        """The tokens of a page: [2, layers, tokens, heads, head dim and scale]."""
        by_head = chunk.reshape(*self.shape[:3], self.num_heads, self._head_extent)
        return by_head[:, :, start : start + self.page_tokens]

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
        return aligned_empty(self.part_bytes).view(self.chunk_dtype).reshape(self.part_shape)
