"""KV groups: what full attention and sliding windows need of the cache, and hits on which all groups agree.

A group is a set of layers with one block table. All groups draw from one pool, and all have blocks of the same
number of tokens. Nothing here knows requests: positions, hashes and blocks come in.
"""

from collections.abc import Sequence
from typing import Protocol

from jaxpaged.core.kv_cache.block_pool import BlockPool, KVCacheBlock
from jaxpaged.kv_cache_spec import KVCacheGroup, max_blocks_per_request


class GroupRules(Protocol):
    """What one group needs of the cache."""

    window: int | None

    def find_longest_hit(self, block_hashes: Sequence[bytes], max_blocks: int) -> list[KVCacheBlock]:
        """The table of the longest cached beginning of at most `max_blocks` blocks."""

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        """How many blocks at the front of a table no later query reads."""


class FullAttentionGroup:
    """Every query reads everything before it."""

    window = None

    def __init__(self, group_idx: int, pool: BlockPool):
        self._suffix = group_idx.to_bytes(4, "big")
        self._pool = pool

    def find_longest_hit(self, block_hashes: Sequence[bytes], max_blocks: int) -> list[KVCacheBlock]:
        get, suffix, hit = self._pool.get_cached_block, self._suffix, []
        for block_hash in block_hashes[:max_blocks]:
            block = get(block_hash + suffix)
            if block is None:
                break
            hit.append(block)
        return hit

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        return 0


class SlidingWindowGroup:
    """A query reads the `window` last tokens, itself included."""

    def __init__(self, group_idx: int, pool: BlockPool, window: int, block_size: int):
        self.window = window
        self._block_size = block_size
        self._num_needed_blocks = -(-(window - 1) // block_size)
        self._suffix = group_idx.to_bytes(4, "big")
        self._pool = pool

    def find_longest_hit(self, block_hashes: Sequence[bytes], max_blocks: int) -> list[KVCacheBlock]:
        """From the right: the first run of cached blocks that covers the window, or that reaches the beginning."""
        run: list[KVCacheBlock] = []  # right to left
        end = min(max_blocks, len(block_hashes))
        for block_idx in range(end - 1, -1, -1):
            if len(run) == self._num_needed_blocks:
                break
            block = self._pool.get_cached_block(block_hashes[block_idx] + self._suffix)
            if block is None:
                end, run = block_idx, []
            else:
                run.append(block)
        return [self._pool.null_block] * (end - len(run)) + run[::-1]

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        return max(num_computed_tokens - self.window + 1, 0) // self._block_size


class KVCacheCoordinator:
    """All groups of a KV cache over one pool."""

    def __init__(self, groups: Sequence[KVCacheGroup], pool: BlockPool, max_num_batched_tokens: int):
        sizes = {group.spec.block_size for group in groups}
        assert len(sizes) == 1, f"all KV groups must have one block size, but they have {sorted(sizes)}"
        self.block_size = sizes.pop()
        self._kv_cache_groups = tuple(groups)
        self._max_num_batched_tokens = max_num_batched_tokens
        self.groups: tuple[GroupRules, ...] = tuple(
            FullAttentionGroup(g, pool)
            if group.spec.window is None
            else SlidingWindowGroup(g, pool, group.spec.window, self.block_size)
            for g, group in enumerate(groups)
        )

    def find_longest_hit(self, block_hashes: Sequence[bytes], max_blocks: int) -> tuple[list[KVCacheBlock], ...]:
        """One table a group, all of the same length: the longest beginning that every group has.

        A group narrows what those before it have found; since a shorter beginning may lack blocks that a window
        needs, this goes on until nobody narrows any more.
        """
        length = max_blocks
        while True:
            hits = []
            for group in self.groups:
                hit = group.find_longest_hit(block_hashes, length)
                length = len(hit)
                hits.append(hit)
            if all(len(hit) == length for hit in hits):
                return tuple(hits)

    def max_blocks(self, num_tokens: int) -> int:
        """Blocks that a request needs at most, over all groups, while its first `num_tokens` are computed."""
        return max_blocks_per_request(self._kv_cache_groups, num_tokens, self._max_num_batched_tokens)
