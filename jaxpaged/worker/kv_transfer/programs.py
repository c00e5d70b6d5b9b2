"""The programs that copy blocks out of the KV cache and into it, in the form that pages have.

What leaves the device is `[pages, layers, 2, tokens, KV heads, head dim]` (1 in place of 2 for latents; bytes, `[pages,
layers, 1, 1, 1, bytes]`, for snapshots of states), whatever the layout of the attention backend, with each head of the
model once, however many devices have it, and whole on every device, in the form that pages have (`forms.py`). Blocks
are cut into pages, or joined to them, on the device. Block ids outside of the pool are padding.

What comes is given to each of N devices whole, so N times the bytes are sent, over N links at a time. Shared out by
pages and exchanged by the devices, it takes two collectives a layer: with 16 layers 0.22 GB/s came in place of 0.72 to
1.06 (2 to 8 devices that a CPU plays). Shared out by heads, nothing is exchanged, but the host has to gather each
device's part: 3 to 10 ms for 16 MiB, where whole pages are taken as they lie (0.33 and 0.60 GB/s with 2 and 4 devices,
1.87 with 8). On accelerators neither was measured.

Letters: P blocks of a copy, L layers, S slots of a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.kv_cache_spec import KVCacheConfig, PoolLayout
from jaxpaged.kv_store.pieces import PieceSize
from jaxpaged.worker.cache.kinds import kind_of
from jaxpaged.worker.kv_transfer.forms import PageForm

MOST_BYTES, MOST_BLOCKS = 32 << 20, 64
"""What one copy moves at most: smaller ones are as fast, and take less memory."""
NOWHERE = -1
"""The id of padding."""


def copy_sizes(pool: PoolLayout, form: PageForm) -> tuple[int, ...]:
    """Numbers of pieces (`kv_store/pieces.py`) that get a program: one for the end of an answer, one for a prompt."""
    piece_size = piece_size_of(pool.storage, form)
    piece_bytes = pool.num_tensors * layer_bytes(pool.storage, piece_size.tokens, form)
    largest = max(min(MOST_BYTES // piece_bytes, MOST_BLOCKS // piece_size.num_blocks), 1)
    return tuple(sorted({max(largest // 8, 1), largest}))


def piece_size_of(spec: Any, form: PageForm) -> PieceSize:
    return PieceSize(spec.block_size, form.page_tokens, is_end=not spec.needs_blocks)


def layer_bytes(spec: Any, num_tokens: int, form: PageForm) -> int:
    """Of one layer of so many tokens, as they are cached, without scales."""
    return int(np.prod(spec.page_shape(num_tokens))) * form.of(spec).dtype.itemsize


def token_bytes(kv_cache: KVCacheConfig, form: PageForm) -> float:
    """Of a token in all layers, as pages have them; 0 with recurrent states, whose size no token has."""
    specs = [(group.spec, len(group.layer_idxs)) for group in kv_cache.groups]
    if not all(spec.needs_blocks for spec, _ in specs):
        return 0.0
    return sum(num_layers * form.of(spec).num_bytes(spec.page_shape(1)) for spec, num_layers in specs)


def first_tensor(kv_cache: KVCacheConfig, pool_idx: int) -> int:
    """The index of a pool's first KV tensor."""
    return sum(pool.num_tensors for pool in kv_cache.pools[:pool_idx])


@dataclass(frozen=True)
class BlockCopy:
    """The copies of `num_pieces` pieces of one pool: between its KV tensors and arrays of pages."""

    tensors: Sequence[Any]  # shapes of the pool's KV tensors
    spec: Any
    backend: str
    replicated: Any
    num_pieces: int
    form: PageForm

    @property
    def block_ids(self) -> jax.ShapeDtypeStruct:
        return self._whole((self.num_pieces * piece_size_of(self.spec, self.form).num_blocks,), jnp.int32)

    @property
    def pages(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        num_pages = self.num_pieces * piece_size_of(self.spec, self.form).num_pages
        shape = (num_pages, len(self.tensors), *self.spec.page_shape(self.form.page_tokens))
        return tuple(self._whole(*each) for each in self.form.layout(shape))

    def _whole(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.replicated)

    def _length(self, num_tokens: int) -> int:
        """Of the axis of tokens of so many; 1 of a snapshot."""
        return self.spec.page_shape(num_tokens)[1]

    def gather(self, tensors: Any, id_P: Any) -> Any:
        """Pages of the blocks."""
        kind = kind_of(self.spec)
        layers = [kind.gather(tensor, id_P, self.spec, self.backend) for tensor in tensors]
        length = self._length(self.form.page_tokens)
        return self.form.leaving([recut(jnp.stack(arrays, axis=1), length, 3) for arrays in zip(*layers)])

    def scatter(self, tensors: Any, id_P: Any, pages: Any) -> Any:
        """The tensors with pages in these blocks."""
        kind = kind_of(self.spec)
        layers = [self.form.coming([array[:, i] for array in pages]) for i in range(len(tensors))]
        length = self._length(self.spec.block_size)
        blocks = [tuple(recut(array, length, 2) for array in layer) for layer in layers]
        return [kind.scatter(each, id_P, arrays, self.spec, self.backend) for each, arrays in zip(tensors, blocks)]


def copies_of(kv_cache: KVCacheConfig, kv: Sequence[Any], backend: str, replicated: Any, form: PageForm) -> list[Any]:
    """(pool, copy) of every pool and size. `kv` are the shapes of the KV tensors."""
    copies = []
    for pool_idx, pool in enumerate(kv_cache.pools):
        first = first_tensor(kv_cache, pool_idx)
        tensors = kv[first : first + pool.num_tensors]
        for size in copy_sizes(pool, form):
            own = form.of(pool.storage)
            copies.append((pool_idx, BlockCopy(tensors, pool.storage, backend, replicated, size, own)))
    return copies


def recut(runs: Any, num_tokens: int, axis: int) -> Any:
    """Consecutive runs of tokens, which lie along `axis`, with `num_tokens` each instead: a run has a multiple of it,
    or is one of several for it."""
    (count, *middle), length, rest = runs.shape[:axis], runs.shape[axis], runs.shape[axis + 1 :]
    if length == num_tokens:
        return runs
    if length > num_tokens:
        parts = runs.reshape(count, *middle, length // num_tokens, num_tokens, *rest)
        return jnp.moveaxis(parts, axis, 1).reshape(-1, *middle, num_tokens, *rest)
    each = runs.reshape(-1, num_tokens // length, *middle, length, *rest)
    return jnp.moveaxis(each, 1, axis).reshape(-1, *middle, num_tokens, *rest)
