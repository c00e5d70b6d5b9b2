"""The KV blocks of requests: what the prefix cache already has, new slots, what may be cached, and giving back.

Which fence asynchronous scheduling needs, and why no other
-----------------------------------------------------------
A step is scheduled while steps before it are still in flight, and these may give fewer tokens than they could: the
count of computed tokens then comes back smaller, and the steps after them compute earlier positions than was supposed
when they were scheduled, since the device begins where a row is. Every step takes the KV arrays that the step before
it returns, so the device computes steps in the order in which they were scheduled. Therefore

* A request has slots for the most that it may get. Wherever it stands, it stands within them.
* A block may be given out again at once. Steps in flight that still read or write it come before the step that
  overwrites it. This holds for finished, aborted and preempted requests. A block that slid out of a window must lie
  before the window of every token of the step being scheduled and of all later ones, so it is judged by the tokens
  that are computed however few come back (`Request.num_confirmed_tokens`), not by those that may be.
* A block may enter the prefix cache before its content is computed: whoever finds it reads in a later step. Two
  conditions remain. Its tokens must be known and certain to be computed, so neither a token that is still being
  sampled is hashed nor the stop token that ended a request (`Request.num_cacheable_tokens`): of the known tokens only
  the newest is not computed, and the next step that is scheduled computes it first, whatever it gives. What a row
  wrote behind its known tokens, where it got fewer than it might have, is written anew when a token is known there.
  And a block may be found only by later steps, not by the one that writes it, since kernels promise no order between
  requests of a step. So a step's blocks enter when its schedule is complete.
* What a failed step was to write must leave the cache. That is the one fence by step number: blocks entered since
  a step was scheduled stay on record until that step is confirmed, and are taken out when it is revoked.

This module decides nothing about who gets blocks; that is the scheduler's.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence, Set
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from jaxpaged.core.kv_cache.block_hash import BlockHasher, extra_keys
from jaxpaged.core.kv_cache.block_pool import BlockPool, KVCacheBlock
from jaxpaged.core.kv_cache.coordinator import KVCacheCoordinator
from jaxpaged.core.kv_cache.events import BlockStored, KVCacheEvent
from jaxpaged.core.request import Request
from jaxpaged.kv_cache_spec import KVCacheConfig
from jaxpaged.messages import KVBlockMap


class CacheHit(NamedTuple):
    """The beginning of a request that the prefix cache has: one table a KV group, and its length in tokens."""

    tables: tuple[list[KVCacheBlock], ...]
    num_tokens: int


class KVCacheManager:
    """Block tables of requests over one pool, with prefix caching."""

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        *,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool,
        enable_kv_cache_events: bool = False,
    ):
        self.pool = BlockPool(kv_cache_config.num_blocks, record_events=enable_kv_cache_events)
        self.coordinator = KVCacheCoordinator(kv_cache_config.groups, self.pool, max_num_batched_tokens)
        self.block_size = self.coordinator.block_size
        self.num_groups = len(kv_cache_config.groups)
        groups = enumerate(self.coordinator.groups)
        self._suffixes = [g.to_bytes(4, "big") for g in range(self.num_groups)]  # of the groups' keys
        self._window_groups = [(g, group) for g, group in groups if group.window is not None]
        self._enable_prefix_caching = enable_prefix_caching
        self._hasher = BlockHasher(self.block_size)
        self._no_hit = CacheHit(tuple([] for _ in range(self.num_groups)), 0)
        self._unconfirmed: deque[tuple[int, KVCacheBlock, bytes]] = deque()  # (step, block, its key)

    # ---- admission -----------------------------------------------------------------------------

    def get_computed_blocks(self, request: Request) -> CacheHit:
        """The longest cached beginning; the last known token is never part of it, since it must be computed."""
        if not self._enable_prefix_caching or not request.reads_prefix_cache:
            return self._no_hit
        self._hasher.extend(request)
        max_blocks = min((request.num_tokens - 1) // self.block_size, len(request.block_hashes))
        tables = self.coordinator.find_longest_hit(request.block_hashes, max_blocks)
        return CacheHit(tables, len(tables[0]) * self.block_size)

    def hashes_filled(self, request: Request, num_new_tokens: int) -> list[bytes]:
        """Of the blocks that a request fills with its next, known tokens, and that others may find one step later."""
        if not self._enable_prefix_caching or num_new_tokens < 2:
            return []
        self._hasher.extend(request)
        first, end = request.num_computed_tokens, request.num_computed_tokens + num_new_tokens
        return request.block_hashes[first // self.block_size : end // self.block_size]

    def num_tokens_behind(self, request: Request, hit: CacheHit, hashes: Set[bytes]) -> int:
        """By how many tokens a hit would be longer if these blocks were cached."""
        if not hashes or not request.reads_prefix_cache:
            return 0
        first, end = hit.num_tokens // self.block_size, (request.num_tokens - 1) // self.block_size
        behind = takewhile(hashes.__contains__, request.block_hashes[first:end])
        return sum(1 for _ in behind) * self.block_size

    def fits_whole(self, request: Request, hit: CacheHit, num_reserved_blocks: int) -> bool:
        """Whether all known tokens would get slots, with `num_reserved_blocks` of the free blocks left alone."""
        num_shared = sum(block.ref_cnt > 0 for table in hit.tables for block in table)
        num_needed = self.coordinator.max_blocks(request.num_tokens) - num_shared
        return num_needed <= self.pool.num_free_blocks - num_reserved_blocks

    def num_blocks_to_finish(self, request: Request) -> int:
        """How many more blocks a partly computed request may take until all its known tokens are computed."""
        num_held = sum(len(table) for table in request.blocks) - sum(request.num_skipped_blocks)
        return max(self.coordinator.max_blocks(request.num_tokens) - num_held, 0)

    def can_ever_fit(self, num_tokens: int) -> bool:
        return self.coordinator.max_blocks(num_tokens) <= self.pool.num_usable_blocks

    # ---- slots ---------------------------------------------------------------------------------

    def adopt_hit(self, request: Request, hit: CacheHit) -> None:
        """Start the tables of a request, which has none, with what the cache has."""
        for g, table in enumerate(hit.tables):
            self.pool.touch(table)
            request.blocks[g].extend(table)
        request.num_computed_tokens = hit.num_tokens
        request.num_cached_blocks = len(hit.tables[0])

    def allocate_slots(self, request: Request, num_new_tokens: int) -> tuple[list[int], ...] | None:
        """Give slots to the next `num_new_tokens` tokens. Returns the appended block ids per group.

        Blocks that slid out of a window are freed first. None, and nothing allocated, when too few are free.
        """
        if self._window_groups:
            self._free_skipped_blocks(request)
        num_new = self.num_new_blocks(request, num_new_tokens)
        if sum(num_new) > self.pool.num_free_blocks:
            return None
        new_block_ids = []
        for table, n in zip(request.blocks, num_new):
            new_blocks = self.pool.get_new_blocks(n)
            table += new_blocks
            new_block_ids.append([block.block_id for block in new_blocks])
        return tuple(new_block_ids)

    def num_new_blocks(self, request: Request, num_new_tokens: int) -> list[int]:
        """How many blocks each table needs for the next `num_new_tokens` tokens; none when it has slots to spare."""
        num_blocks = -(-(request.num_computed_tokens + num_new_tokens) // self.block_size)
        return [max(num_blocks - len(table), 0) for table in request.blocks]

    def _free_skipped_blocks(self, request: Request) -> None:
        for g, group in self._window_groups:
            first, end = request.num_skipped_blocks[g], group.num_skipped_blocks(request.num_confirmed_tokens)
            if first < end:
                table = request.blocks[g]
                self.pool.free_blocks(table[first:end])
                table[first:end] = [self.pool.null_block] * (end - first)
                request.num_skipped_blocks[g] = end

    def free(self, request: Request) -> None:
        """Take all blocks of a request away."""
        for table in request.blocks:
            self.pool.free_blocks(table)
            table.clear()
        request.num_skipped_blocks = [0] * self.num_groups
        request.num_cached_blocks = 0

    def num_slots(self, request: Request) -> int:
        return len(request.blocks[0]) * self.block_size

    # ---- prefix cache --------------------------------------------------------------------------

    def cache_blocks(self, request: Request, step_id: int) -> None:
        """Enter what is full, known, and computed by the steps up to `step_id` into the prefix cache."""
        if not self._enable_prefix_caching:
            return
        first = request.num_cached_blocks
        end = request.num_cacheable_tokens // self.block_size
        if end <= first:
            return
        self._hasher.extend(request)
        for g, table in enumerate(request.blocks):
            stored = self._cache_group_blocks(request, g, table, range(first, end), step_id)
            if self.pool.record_events:
                self._record_stored(request, g, stored)
        request.num_cached_blocks = end

    def _cache_group_blocks(
        self, request: Request, g: int, table: list[KVCacheBlock], block_idxs: range, step_id: int
    ) -> list[int]:
        """Cache the blocks of one table; returns the indices of those whose content was not there before."""
        suffix, null_block, stored = self._suffixes[g], self.pool.null_block, []
        for block_idx in block_idxs:
            block = table[block_idx]
            if block is null_block:
                continue
            key = request.block_hashes[block_idx] + suffix
            if self.pool.cache(block, key):
                stored.append(block_idx)
            self._unconfirmed.append((step_id, block, key))
        return stored

    def _record_stored(self, request: Request, g: int, block_idxs: list[int]) -> None:
        """One event for every run of consecutive blocks."""
        start = 0
        for i in range(1, len(block_idxs) + 1):
            if i == len(block_idxs) or block_idxs[i] != block_idxs[i - 1] + 1:
                self.pool.events.append(self._stored_event(request, g, block_idxs[start], block_idxs[i - 1] + 1))
                start = i

    def _stored_event(self, request: Request, g: int, first: int, end: int) -> BlockStored:
        window = self.coordinator.groups[g].window
        keys = [extra_keys(request, block_idx, self.block_size) for block_idx in range(first, end)]
        # A key is published without its tag: the adapter's name, [content hash, offset], or the salt.
        untagged = [k and [key[1] if len(key) == 2 else list(key[1:]) for key in k] for k in keys]
        return BlockStored(
            block_hashes=request.block_hashes[first:end],
            parent_block_hash=request.block_hashes[first - 1] if first else None,
            token_ids=request.all_token_ids[first * self.block_size : end * self.block_size],
            block_size=self.block_size,
            lora_name=request.lora_name,
            extra_keys=untagged if any(untagged) else None,
            group_idx=g,
            kv_cache_spec_kind="full_attention" if window is None else "sliding_window",
            kv_cache_spec_sliding_window=window,
        )

    def confirm(self, step_id: int) -> None:
        """All steps up to `step_id` are done: what they were to write is written."""
        unconfirmed = self._unconfirmed
        while unconfirmed and unconfirmed[0][0] <= step_id:
            unconfirmed.popleft()

    def revoke(self, step_id: int) -> None:
        """Step `step_id` and those after it have failed: forget what they were to write."""
        while self._unconfirmed and self._unconfirmed[-1][0] >= step_id:
            _, block, key = self._unconfirmed.pop()
            if block.cache_key == key:
                self.pool.uncache(block)

    def uncache_request(self, request: Request) -> None:
        """Forget everything that a request's blocks hold: its computation went wrong somewhere."""
        for table in request.blocks:
            for block in table:
                if block.cache_key is not None:
                    self.pool.uncache(block)

    def reset_prefix_cache(self) -> bool:
        """Forget all content. False, and nothing changed, while any request holds a block."""
        if not self.pool.reset_prefix_cache():
            return False
        self._unconfirmed.clear()
        return True

    def take_events(self) -> list[KVCacheEvent]:
        """The events since the last call."""
        events, self.pool.events = self.pool.events, []
        return events

    def block_map(self, requests: Sequence[Request], most: int | None = None) -> KVBlockMap:
        """Who holds which block now. `requests` are all that hold any, the oldest first.

        With `most` the beginning, at least an eighth of `most` and all blocks that were ever used, and if these are
        still more, evenly spaced ones of them.
        """
        num_shown, stride = self.pool.num_usable_blocks, 1
        if most is not None:
            num_shown = min(num_shown, max(self.pool.last_given, most // 8))
            stride = max(-(-num_shown // most), 1)
        owner_B = np.full(len(self.pool.blocks), -1, np.int32)
        for i in reversed(range(len(requests))):
            for table in requests[i].blocks:
                owner_B[[block.block_id for block in table]] = i
        owner_B[self.pool.null_block.block_id] = -1
        shown = [self.pool.null_block, *self.pool.blocks[1 : num_shown + 1 : stride]]
        return KVBlockMap(
            block_size=self.block_size,
            request_ids=[request.request_id for request in requests],
            owner=np.concatenate([owner_B[:1], owner_B[1 : num_shown + 1 : stride]]),
            num_owners=np.array([block.ref_cnt for block in shown], np.int32),
            cached=np.array([block.cache_key is not None for block in shown]),
            stride=stride,
        )

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Assert that the blocks in the tables of `requests` and the free blocks are all there are."""
        owners: Counter[int] = Counter()
        for request in requests:
            assert len({len(table) for table in request.blocks}) == 1, f"{request}: tables of unequal length"
            for g, table in enumerate(request.blocks):
                nulls = [block is self.pool.null_block for block in table]
                assert sum(nulls) == sum(nulls[: request.num_skipped_blocks[g]]) == request.num_skipped_blocks[g]
                owners.update(block.block_id for block, null in zip(table, nulls) if not null)
        self.pool.check_integrity(owners)
