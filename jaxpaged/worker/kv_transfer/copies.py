"""Copies of blocks between the KV cache of a device and arrays of pages, by programs for a few numbers of blocks.

What is gathered or scattered is a tuple of arrays with a page on the first axis, in the form that pages have
(`forms.py`). Copies are dispatched and not waited for; each is a link of the chain that the steps form.

Letters: P blocks of a copy, with padding.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxpaged.kv_cache_spec import KVCacheConfig
from jaxpaged.kv_store.buffers import aligned_empty
from jaxpaged.worker.device import Device
from jaxpaged.worker.kv_transfer.forms import PageForm
from jaxpaged.worker.kv_transfer.programs import (
    GATHER,
    NOWHERE,
    SCATTER,
    copy_key,
    copy_sizes,
    first_tensor,
    page_shape,
)


class Copies:
    """Of the blocks of all pools."""

    def __init__(self, device: Device, kv_cache: KVCacheConfig, form: PageForm):
        self.form = form
        self._device, self._kv_cache = device, kv_cache
        self.pool_of = {g: p for p, pool in enumerate(kv_cache.pools) for g in pool.group_idxs}

    def shape(self, g: int) -> tuple[int, ...]:
        """Of the values in a page of group `g`: [layers, 2 or 1, tokens, heads, head dim]."""
        group = self._kv_cache.groups[g]
        return len(group.layer_idxs), *page_shape(group.spec)

    def page_bytes(self, g: int) -> int:
        """Of a page of group `g`, without its header."""
        return self.form.num_bytes(self.shape(g))

    def most(self, pool_idx: int) -> int:
        """Blocks of one copy."""
        return copy_sizes(self._kv_cache.pools[pool_idx])[-1]

    def gather(self, pool_idx: int, block_ids: Sequence[int]) -> tuple[Any, ...]:
        """Pages of these blocks, `most` at most, and of padding behind them."""
        id_P = self._padded(pool_idx, block_ids)
        return self._device.call(copy_key(GATHER, pool_idx, len(id_P)), self._tensors(pool_idx), id_P)

    def scatter(self, pool_idx: int, block_ids: Sequence[int], pages: tuple[np.ndarray, ...]) -> None:
        """Write pages that `empty` made to blocks, 0: to none."""
        id_P = self._padded(pool_idx, [block_id or NOWHERE for block_id in block_ids])
        first = first_tensor(self._kv_cache, pool_idx)
        written = self._device.call(copy_key(SCATTER, pool_idx, len(id_P)), self._tensors(pool_idx), id_P, pages)
        self._device.state.kv[first : first + len(written)] = written

    def empty(self, pool_idx: int, num_blocks: int) -> tuple[np.ndarray, ...]:
        """Arrays of pages, zeros, for so many blocks and padding, which jax takes without a copy."""
        pool = self._kv_cache.pools[pool_idx]
        whole = self._bucket(pool_idx, num_blocks), pool.num_tensors, *page_shape(pool.storage)
        made = []
        for shape, dtype in self.form.layout(whole):
            array = aligned_empty(int(np.prod(shape)) * dtype.itemsize).view(dtype).reshape(shape)
            array[...] = 0  # padding of groups with fewer layers must be numbers
            made.append(array)
        return tuple(made)

    def _bucket(self, pool_idx: int, num_blocks: int) -> int:
        return next(size for size in copy_sizes(self._kv_cache.pools[pool_idx]) if size >= num_blocks)

    def _padded(self, pool_idx: int, block_ids: Sequence[int]) -> np.ndarray:
        padding = self._bucket(pool_idx, len(block_ids)) - len(block_ids)
        return np.array([*block_ids, *[NOWHERE] * padding], np.int32)

    def _tensors(self, pool_idx: int) -> list[Any]:
        first = first_tensor(self._kv_cache, pool_idx)
        return self._device.state.kv[first : first + self._kv_cache.pools[pool_idx].num_tensors]
