"""In which form keys and values are in pages: so many tokens each, as they are cached or rounded to 8 bits with scales.

A cache with scales for each token and head has pages with them. Others are rounded on the devices, by the copies that
take blocks out and bring them back: half the bytes leave the device, and even on a CPU that takes no more time than in
the threads that move pages (int8; half of it for fp8). A vector of `head_dim` numbers, of one token and head, has one
scale: its largest number becomes the largest of the type. So it does not matter which tokens are in a page together.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.kv_cache_spec import CacheSpec
from jaxpaged.kv_store.options import EXACT, KVOffload
from jaxpaged.kv_store.page import SCALE_BYTES, SCALED, VERSION
from jaxpaged.kv_store.pieces import page_tokens_of
from pallas_kernels.ragged_paged_attention.quantized import quantize, token_scales

DTYPES = {"int8": np.dtype(jnp.int8), "fp8": np.dtype(jnp.float8_e4m3fn)}
"""Of the forms of 8 bits, by their names in options."""


@dataclass(frozen=True)
class PageForm:
    """The form called `name`, of a cache of `dtype`, with `page_tokens` in a page. Its pages are arrays: the values,
    and behind them their scales where there are any. `has_scales`: the cache has them, of each token."""

    name: str
    dtype: np.dtype
    page_tokens: int
    has_scales: bool = False

    @property
    def rounds(self) -> bool:
        return self.name in DTYPES

    @property
    def is_scaled(self) -> bool:
        return self.rounds or self.has_scales

    @property
    def page_dtype(self) -> np.dtype:
        """Of the values in a page."""
        return DTYPES.get(self.name, self.dtype)

    def of(self, spec: CacheSpec) -> "PageForm":
        """The form of the pages of layers that cache so: snapshots of states are bytes."""
        if spec.page_dtype is None:
            return self
        return replace(self, dtype=np.dtype(spec.page_dtype), has_scales=spec.has_page_scales)

    @property
    def version(self) -> int:
        """That pages have, as `kv_store/page.py` counts."""
        return SCALED if self.is_scaled else VERSION

    @property
    def facts(self) -> dict[str, str]:
        """What namespaces and people are told of it; nothing where pages are exact. Of tokens shapes tell."""
        return {"pages": self.name} if self.rounds else {}

    def layout(self, shape: Sequence[int]) -> list[tuple[tuple[int, ...], np.dtype]]:
        """(shape, dtype) of the arrays of pages whose values have this shape."""
        scales = [(tuple(shape[:-1]), np.dtype(np.float32))] if self.is_scaled else []
        return [(tuple(shape), self.page_dtype), *scales]

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Of pages whose values have this shape, without headers."""
        numbers = int(np.prod(shape))
        return numbers * self.page_dtype.itemsize + (numbers // shape[-1] * SCALE_BYTES if self.is_scaled else 0)

    def leaving(self, cached: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Pages of cached values [..., head dim], and of their scales where they have some."""
        if not self.rounds:
            return tuple(cached)
        (values,) = cached
        scales = token_scales(values, self.page_dtype)
        return quantize(values, scales, self.page_dtype), scales

    def coming(self, pages: Sequence[Any]) -> tuple[jax.Array, ...]:
        """What is cached, from pages."""
        if not self.rounds:
            return tuple(pages)
        values, scales = pages
        return ((values.astype(jnp.float32) * scales[..., None]).astype(self.dtype),)


def form_of(
    offload: KVOffload | None, dtype: np.dtype, block_sizes: Collection[int], *, has_snapshots: bool
) -> PageForm:
    """That the options name, for a cache of `dtype` with blocks of these sizes. Raises ConfigError."""
    name, asked = (EXACT, None) if offload is None else (offload.pages, offload.page_tokens)
    return PageForm(name, dtype, page_tokens_of(asked, block_sizes, has_snapshots=has_snapshots))
