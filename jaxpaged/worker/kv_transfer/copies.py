"""Copies of blocks between the KV cache of a device and arrays of pages, by programs for a few numbers of blocks.

What is gathered or scattered is a tuple of arrays with a page on the first axis, in the form that pages have
(`forms.py`). A copy is of whole pieces: all their blocks, and all their pages, in one order. Copies are dispatched and
not waited for; each is a link of the chain that the steps form.

Letters: P blocks of a copy, with padding.
"""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from jaxpaged.errors import UsageError
from jaxpaged.kv_cache_spec import KVCacheConfig
from jaxpaged.kv_connector.base import KVCacheLayout, KVGroupLayout, KVPoolLayout
from jaxpaged.kv_store.buffers import aligned_empty
from jaxpaged.kv_store.pieces import PieceSize
from jaxpaged.worker.device import Device
from jaxpaged.worker.kv_transfer.forms import PageForm
from jaxpaged.worker.kv_transfer.programs import (
    NOWHERE,
    copy_sizes,
    first_tensor,
    piece_size_of,
)
from jaxpaged.worker.programs.declare import ProgramKind, copy_key


class Copies:
    """Of the blocks of all pools."""

    def __init__(self, device: Device, kv_cache: KVCacheConfig, form: PageForm):
        self.form = form
        self._device, self._kv_cache = device, kv_cache
        self.pool_of = {g: p for p, pool in enumerate(kv_cache.pools) for g in pool.group_idxs}
        self._piece_sizes: list[PieceSize] = [piece_size_of(pool.storage, form) for pool in kv_cache.pools]
        self._sizes = [copy_sizes(pool, form) for pool in kv_cache.pools]

    def layout(self, namespace: str, model: str) -> KVCacheLayout:
        """What a connector is told of pages."""
        groups = tuple(
            KVGroupLayout(
                group.spec.kind,
                tuple(group.layer_idxs),
                group.spec.block_size,
                group.spec.most_seen,
                self.shape(g),
                self.form.of(group.spec).page_dtype.name,
                self.form.of(group.spec).is_scaled,
            )
            for g, group in enumerate(self._kv_cache.groups)
        )
        pools = tuple(
            KVPoolLayout(tuple(pool.group_idxs), tuple(sizes), tuple(self.num_bytes(p, size) for size in sizes))
            for p, (pool, sizes) in enumerate(zip(self._kv_cache.pools, self._sizes))
        )
        return KVCacheLayout(namespace, model, self.form.page_tokens, groups, pools)

    def form_of(self, groups: Collection[int]) -> PageForm:
        """That pages of all these groups have. Raises UsageError where they differ."""
        forms = {self.form.of(self._kv_cache.groups[g].spec) for g in groups}
        if len(forms) > 1:
            types = ", ".join(sorted({form.page_dtype.name for form in forms}))
            raise UsageError(
                f"a file of a beginning has pages of one type, but layers are cached in {types}. Leave out "
                "kv_cache_dtype_skip_layers."
            )
        return forms.pop()

    def shape(self, g: int) -> tuple[int, ...]:
        """Of the values in a page of group `g`: [layers, 2 or 1, tokens, heads, head dim]; [layers, 1, 1, 1, bytes]."""
        group = self._kv_cache.groups[g]
        return len(group.layer_idxs), *group.spec.page_shape(self.form.page_tokens)

    def page_bytes(self, g: int) -> int:
        """Of a page of group `g`, without its header."""
        return self.form.of(self._kv_cache.groups[g].spec).num_bytes(self.shape(g))

    def num_bytes(self, pool_idx: int, num_pieces: int) -> int:
        """Of what a copy of so many pieces makes, with padding."""
        pool = self._kv_cache.pools[pool_idx]
        shape = pool.num_tensors, *pool.storage.page_shape(self._piece_sizes[pool_idx].tokens)
        return self._bucket(pool_idx, num_pieces) * self.form.of(pool.storage).num_bytes(shape)

    def most(self, pool_idx: int) -> int:
        """Pieces of one copy."""
        return self._sizes[pool_idx][-1]

    def gather(self, pool_idx: int, block_ids: Sequence[int]) -> tuple[Any, ...]:
        """Pages of the blocks of `most` pieces at most, and of padding behind them."""
        size, id_P = self._padded(pool_idx, block_ids)
        return self._device.call(copy_key(ProgramKind.KV_GATHER, pool_idx, size), self._tensors(pool_idx), id_P)

    def scatter(self, pool_idx: int, block_ids: Sequence[int], pages: tuple[np.ndarray, ...]) -> None:
        """Write pages that `empty` made to their blocks, 0: to none."""
        size, id_P = self._padded(pool_idx, [block_id or NOWHERE for block_id in block_ids])
        first = first_tensor(self._kv_cache, pool_idx)
        written = self._device.call(
            copy_key(ProgramKind.KV_SCATTER, pool_idx, size), self._tensors(pool_idx), id_P, pages
        )
        self._device.state.kv[first : first + len(written)] = written

    def empty(self, pool_idx: int, num_pieces: int) -> tuple[np.ndarray, ...]:
        """Arrays of pages, zeros, for so many pieces and padding, which jax takes without a copy."""
        pool, tokens = self._kv_cache.pools[pool_idx], self.form.page_tokens
        num_pages = self._bucket(pool_idx, num_pieces) * self._piece_sizes[pool_idx].num_pages
        whole = num_pages, pool.num_tensors, *pool.storage.page_shape(tokens)
        made = []
        for shape, dtype in self.form.of(pool.storage).layout(whole):
            array = aligned_empty(int(np.prod(shape)) * dtype.itemsize).view(dtype).reshape(shape)
            array[...] = 0  # padding of groups with fewer layers must be numbers
            made.append(array)
        return tuple(made)

    def _bucket(self, pool_idx: int, num_pieces: int) -> int:
        return next(size for size in self._sizes[pool_idx] if size >= num_pieces)

    def _padded(self, pool_idx: int, block_ids: Sequence[int]) -> tuple[int, np.ndarray]:
        """The size of a copy of these blocks, and their ids with padding."""
        each = self._piece_sizes[pool_idx].num_blocks
        size = self._bucket(pool_idx, len(block_ids) // each)
        return size, np.array([*block_ids, *[NOWHERE] * (size * each - len(block_ids))], np.int32)

    def _tensors(self, pool_idx: int) -> list[Any]:
        first = first_tensor(self._kv_cache, pool_idx)
        return self._device.state.kv[first : first + self._kv_cache.pools[pool_idx].num_tensors]
