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
* A snapshot of a recurrent state is such content, too: whoever computes the last token of a block writes it, so one
  that was written behind tokens that a row did not get is written anew. The state of the row itself is no block. It
  stands behind the tokens that the row has got, since what a row keeps lets it go on behind any of its newest tokens.
* What a failed step was to write must leave the cache. That is the one fence by step number: blocks entered since
  a step was scheduled stay on record until that step is confirmed, and are taken out when it is revoked.

This module decides nothing about who gets blocks; that is the scheduler's.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence, Set
from itertools import takewhile
from typing import NamedTuple, Protocol

from jaxpaged.core.kv_cache.block_hash import BlockHasher, extra_keys, first_root, root_of
from jaxpaged.core.kv_cache.block_pool import BlockPool, KVCacheBlock
from jaxpaged.core.kv_cache.events import BlockStored, KVCacheEvent, of_weights
from jaxpaged.core.kv_cache.groups import CacheGroup, CacheGroups
from jaxpaged.core.request import Request
from jaxpaged.kv_cache_spec import KVCacheConfig


class CacheHit(NamedTuple):
    """The beginning of a request that the prefix cache has: one table a KV group, and its length in tokens.

    `branch` is where it would end if snapshots of states were everywhere.
    """

    tables: tuple[list[KVCacheBlock], ...]
    num_tokens: int
    branch: int


class Hold:
    """Blocks with an owner that is no request: somebody reads or writes them from outside. `reason` says who, and for
    what. `is_intact` until what the blocks held is lost, as it is when the engine sleeps deeply or a step fails."""

    def __init__(self, reason: str, blocks: Sequence[Sequence[KVCacheBlock]]):
        self.reason = reason
        self.blocks = tuple(map(tuple, blocks))  # of each KV group
        self.is_intact = True


class CacheListener(Protocol):
    """What hears of the blocks of requests that enter the prefix cache, so that their content can be kept elsewhere."""

    def note_stored(self, request: Request, block_idxs: Sequence[Sequence[int]], step_id: int) -> None:
        """Blocks of a request, some of each group, have entered, computed by the steps up to `step_id`."""
        ...

    def note_lost(self, request: Request, g: int, block_idx: int) -> None:
        """What a block of a request holds, which the prefix cache has, is in doubt."""
        ...


class KVCacheManager:
    """Block tables of requests over the pools of all KV groups, with prefix caching.

    Numbers of blocks are lists with a number for each pool.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        *,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool,
        enable_kv_cache_events: bool = False,
    ):
        self.pools = tuple(BlockPool(n, record_events=enable_kv_cache_events) for n in kv_cache_config.num_blocks)
        self._block_bytes = [layout.block_bytes(num_shards=1) for layout in kv_cache_config.pools]
        self._usable_bytes = sum(pool.num_usable_blocks * size for pool, size in zip(self.pools, self._block_bytes))
        self.groups = CacheGroups(kv_cache_config.groups, self.pools, max_num_batched_tokens)
        self.num_groups = len(self.groups)
        self._group_list = self.groups.groups
        self._block_sizes = [group.block_size for group in self.groups]
        numbered = list(enumerate(self.groups))
        self._skipping_groups = [(g, group) for g, group in numbered if group.spec.num_read_blocks is not None]
        # Which groups' new entries must have blocks, by pool: all but snapshots.
        needing = lambda pool: [g for g, group in numbered if group.pool is pool and group.needs_blocks]
        self._needing_groups = [(pool, needing(pool)) for pool in self.pools]
        self.enable_prefix_caching = enable_prefix_caching
        self.records_events = enable_kv_cache_events
        self.first_root = first_root(kv_cache_config.content)
        self.hasher = BlockHasher(self.groups.unit, self.first_root)
        self._no_hit = CacheHit(tuple([] for _ in range(self.num_groups)), 0, 0)
        self._unconfirmed: deque[tuple[int, BlockPool, KVCacheBlock, bytes]] = deque()  # (step, block, its key)
        self.holds: list[Hold] = []
        self._listener: CacheListener | None = None
        self.take_events()

    @property
    def usage(self) -> float:
        """Share of the bytes of all usable blocks that somebody holds, 0..1."""
        free = [pool.free_list.num_blocks * size for pool, size in zip(self.pools, self._block_bytes)]
        return (self._usable_bytes - sum(free)) / self._usable_bytes

    # ---- admission -----------------------------------------------------------------------------

    def get_computed_blocks(self, request: Request) -> CacheHit:
        """The longest cached beginning; the last known token is never part of it, since it must be computed."""
        if not self.enable_prefix_caching or not request.reads_prefix_cache:
            return self._no_hit
        self.hasher.extend(request)
        tables, branch = self.groups.find_longest_hit(request.block_hashes, request.num_findable_tokens)
        return CacheHit(tables, len(tables[0]) * self.groups.groups[0].block_size, branch)

    def hashes_filled(self, request: Request, num_new_tokens: int) -> list[bytes]:
        """Of the blocks that a request fills with its next, known tokens, and that others may find one step later."""
        if not self.enable_prefix_caching or num_new_tokens < 2 or request.has_old_kv:
            return []
        self.hasher.extend(request)
        first, end = request.num_computed_tokens, request.num_computed_tokens + num_new_tokens
        return request.block_hashes[first // self.groups.unit : end // self.groups.unit]

    def num_tokens_behind(self, request: Request, hit: CacheHit, hashes: Set[bytes]) -> int:
        """By how many tokens a hit would be longer if these blocks were cached. By none where it needs a snapshot, too,
        since there will hardly be one in the right place."""
        if not hashes or not request.reads_prefix_cache or self.groups.have_snapshots:
            return 0
        first, end = hit.num_tokens // self.groups.unit, request.num_findable_tokens // self.groups.unit
        behind = takewhile(hashes.__contains__, request.block_hashes[first:end])
        return sum(1 for _ in behind) * self.groups.unit

    def fits_whole(self, request: Request, hit: CacheHit, num_reserved: Sequence[int]) -> bool:
        """Whether all known tokens would get slots, with `num_reserved` of the free blocks left alone."""
        needed = self._num_needed(request, hit)
        return all(n <= pool.num_free_blocks - left for n, pool, left in zip(needed, self.pools, num_reserved))

    def reserve_whole(self, request: Request, hit: CacheHit, num_reserved: list[int]) -> None:
        """Add how many free blocks a waiting request would take until all its known tokens are computed."""
        for p, needed in enumerate(self._num_needed(request, hit)):
            num_reserved[p] += max(needed, 0)

    def _num_needed(self, request: Request, hit: CacheHit) -> list[int]:
        """Of the blocks that all known tokens need, those that are free now."""
        needed = self.groups.max_blocks(request.num_tokens)
        for p, members in enumerate(self.groups.groups_of_pool):
            needed[p] -= sum(block.ref_cnt > 0 for g in members for block in hit.tables[g])
        return needed

    def reserve_rest(self, request: Request, num_reserved: list[int]) -> None:
        """Add how many more blocks a partly computed request may take until all its known tokens are computed."""
        for p, most in enumerate(self.groups.max_blocks(request.num_tokens)):
            members = self.groups.groups_of_pool[p]
            num_held = sum(len(request.blocks[g]) - request.num_skipped_blocks[g] for g in members)
            num_reserved[p] += max(most - num_held, 0)

    def shortage(self, num_tokens: int) -> tuple[int, int, int] | None:
        """None, or if even a lone request of `num_tokens` would never fit: (blocks that it needs, their size in tokens,
        blocks that there are)."""
        for pool, needed in zip(self.pools, self.groups.max_blocks(num_tokens)):
            if needed > pool.num_usable_blocks:
                block_size = next(group.block_size for group in self.groups if group.pool is pool)
                return needed, block_size, pool.num_usable_blocks
        return None

    # ---- slots ---------------------------------------------------------------------------------

    def adopt_hit(self, request: Request, hit: CacheHit) -> None:
        """Start the tables of a request, which has none, with what the cache has."""
        for group, table, found in zip(self.groups, request.blocks, hit.tables):
            group.pool.touch(found)
            table.extend(found)
        request.num_computed_tokens = request.num_entered_tokens = hit.num_tokens
        request.branch = hit.branch

    def allocate_slots(self, request: Request, num_new_tokens: int) -> tuple[list[int], ...] | None:
        """Give slots to the next `num_new_tokens` tokens. Returns the appended block ids per group.

        Blocks that nobody reads any more are freed first. None, and nothing allocated, when too few are free.
        """
        if self._skipping_groups:
            self._free_skipped_blocks(request)
        num_new = self._num_new_entries(request, num_new_tokens)
        if not self._are_free(num_new):
            return None
        new_block_ids: list[list[int]] = []
        for group, table, n in zip(self._group_list, request.blocks, num_new):
            if not n:
                new_block_ids.append([])
                continue
            new_blocks = group.new_blocks(len(table), n, request.num_prompt_tokens, request.branch)
            table += new_blocks
            new_block_ids.append([block.block_id for block in new_blocks])
        return tuple(new_block_ids)

    def can_allocate(self, requests: Iterable[tuple[Request, int]]) -> bool:
        """Whether all of these requests would get slots for so many tokens."""
        num_new = [self._num_new_entries(request, num_new_tokens) for request, num_new_tokens in requests]
        return self._are_free([sum(column) for column in zip(*num_new)])

    def _num_new_entries(self, request: Request, num_new_tokens: int) -> list[int]:
        """How many entries each table needs for the next `num_new_tokens` tokens; none when it has slots to spare."""
        end = request.num_computed_tokens + num_new_tokens
        return [max(-(-end // size) - len(table), 0) for size, table in zip(self._block_sizes, request.blocks)]

    def _are_free(self, num_new: Sequence[int]) -> bool:
        """Whether there are blocks for as many new entries of the groups' tables. Snapshots do without."""
        for pool, members in self._needing_groups:
            num_needed = 0
            for g in members:
                num_needed += num_new[g]
            if num_needed > pool.num_free_blocks:
                return False
        return True

    def _free_skipped_blocks(self, request: Request) -> None:
        for g, group in self._skipping_groups:
            first, end = request.num_skipped_blocks[g], group.spec.num_skipped_blocks(request.num_confirmed_tokens)
            if first < end:
                table = request.blocks[g]
                group.pool.free_blocks(table[first:end])
                table[first:end] = [group.pool.null_block] * (end - first)
                request.num_skipped_blocks[g] = end

    def free(self, request: Request) -> None:
        """Take all blocks of a request away."""
        for group, table in zip(self.groups, request.blocks):
            group.pool.free_blocks(table)
            table.clear()
        request.num_skipped_blocks = [0] * self.num_groups
        request.num_entered_tokens = 0

    def hold(self, reason: str, blocks: Sequence[Sequence[KVCacheBlock]]) -> Hold:
        """Keep blocks, some of each KV group, from being given out until `release`, whoever else gives them back."""
        hold = Hold(reason, blocks)
        for group, held in zip(self.groups, hold.blocks, strict=True):
            group.pool.touch(held)
        self.holds.append(hold)
        return hold

    def release(self, hold: Hold) -> None:
        self.holds.remove(hold)
        for group, held in zip(self.groups, hold.blocks):
            group.pool.free_blocks(held)

    def num_slots(self, request: Request) -> int:
        return min([len(table) * size for size, table in zip(self._block_sizes, request.blocks)])

    def listen(self, listener: CacheListener) -> None:
        """Tell somebody of what enters the prefix cache from now on."""
        self._listener = listener

    # ---- prefix cache --------------------------------------------------------------------------

    def cache_blocks(self, request: Request, step_id: int) -> None:
        """Enter what is full, known, and computed by the steps up to `step_id` into the prefix cache."""
        if not self.enable_prefix_caching or request.has_old_kv:
            return
        first, end = request.num_entered_tokens, request.num_cacheable_tokens
        if end - first < self.groups.unit:
            return
        self.hasher.extend(request)
        stored = []
        for g, table in enumerate(request.blocks):
            stored.append(self._cache_group_blocks(request, self._group_list[g], table, first, end, step_id))
            self.record_stored(request, g, stored[g])
        if self._listener is not None:
            self._listener.note_stored(request, stored, step_id)
        request.num_entered_tokens = end // self.groups.unit * self.groups.unit

    def _cache_group_blocks(
        self, request: Request, group: CacheGroup, table: list[KVCacheBlock], first: int, end: int, step_id: int
    ) -> list[int]:
        """Cache the blocks that end between two tokens; returns the indices of those whose content was not there."""
        pool, hashes, units, size, stored = group.pool, request.block_hashes, group.units, group.block_size, []
        for block_idx in range(first // size, end // size):
            block = table[block_idx]
            if block is pool.null_block:
                continue
            key = hashes[(block_idx + 1) * units - 1] + group.suffix
            if pool.cache(block, key):
                stored.append(block_idx)
            self._unconfirmed.append((step_id, pool, block, key))
            group.forget_replaced(hashes, block_idx, request.num_prompt_tokens)
        return stored

    def record_stored(self, request: Request, g: int, block_idxs: list[int]) -> None:
        """One event, where anybody wants them, for every run of consecutive blocks."""
        start = 0
        if not self.records_events:
            return
        for i in range(1, len(block_idxs) + 1):
            if i == len(block_idxs) or block_idxs[i] != block_idxs[i - 1] + 1:
                self._events.append(self._stored_event(request, g, block_idxs[start], block_idxs[i - 1] + 1))
                start = i

    def _stored_event(self, request: Request, g: int, first: int, end: int) -> BlockStored:
        group = self.groups.groups[g]
        size, units, lora = group.block_size, group.units, request.lora
        keys = [extra_keys(request, block_idx, size) for block_idx in range(first, end)]
        # A key is published without its tag: the adapter's name, [content hash, offset], or the salt.
        untagged = [None if k is None else [key[1] if len(key) == 2 else list(key[1:]) for key in k] for k in keys]
        stored = BlockStored(
            block_hashes=request.block_hashes[(first + 1) * units - 1 : end * units : units],
            parent_block_hash=request.block_hashes[first * units - 1] if first else None,
            token_ids=request.all_token_ids[first * size : end * size],
            block_size=size,
            lora_id=lora.lora_int_id if lora else None,
            lora_name=lora.lora_name if lora else None,
            extra_keys=untagged if any(untagged) else None,
            group_idx=g,
            kv_cache_spec_kind=group.spec.kind,
            kv_cache_spec_sliding_window=group.spec.window,
        )
        return of_weights(stored, request.weights_label)

    def confirm(self, step_id: int) -> None:
        """All steps up to `step_id` are done: what they were to write is written."""
        unconfirmed = self._unconfirmed
        while unconfirmed and unconfirmed[0][0] <= step_id:
            unconfirmed.popleft()

    def revoke(self, step_id: int) -> None:
        """Step `step_id` and those after it have failed: forget what they were to write."""
        while self._unconfirmed and self._unconfirmed[-1][0] >= step_id:
            _, pool, block, key = self._unconfirmed.pop()
            if block.cache_key == key:
                pool.uncache(block)

    def uncache_request(self, request: Request) -> None:
        """Forget everything that a request's blocks hold: its computation went wrong somewhere."""
        for g, (group, table) in enumerate(zip(self.groups, request.blocks)):
            for block_idx, block in enumerate(table):
                if block.cache_key is not None:
                    if self._listener is not None:
                        self._listener.note_lost(request, g, block_idx)
                    group.pool.uncache(block)

    def lose_content(self) -> None:
        """Forget all content, whoever holds its blocks. No step is in flight."""
        for pool in self.pools:
            pool.lose_content()
        for hold in self.holds:
            hold.is_intact = False
        self._unconfirmed.clear()

    def change_root(self, weights_version: str, requests: Iterable[Request]) -> None:
        """Other weights compute from now on: what was computed is never found again. `requests` are all that there are;
        those that hold blocks go on over what is in them. No step is in flight."""
        self.lose_content()
        for request in requests:
            request.forget_hashes()
            request.has_old_kv = any(request.blocks)
        self.hasher.root = root_of(weights_version, self.first_root)

    def take_events(self) -> list[KVCacheEvent]:
        """The events since the last call, of all pools in the order in which they came."""
        taken = self.pools[0].events
        self._events: list[KVCacheEvent] = []
        for pool in self.pools:
            pool.events = self._events
        return taken

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Assert that the blocks in the tables of `requests`, those on hold, and the free blocks are all there are."""
        owners: dict[BlockPool, Counter[int]] = {pool: Counter() for pool in self.pools}
        for hold in self.holds:
            for group, held in zip(self.groups, hold.blocks):
                owners[group.pool].update(block.block_id for block in held if block is not group.pool.null_block)
        for request in requests:
            ends = [(len(table) - 1, len(table), group) for group, table in zip(self.groups, request.blocks)]
            slots = [range(before * group.block_size, end * group.block_size) for before, end, group in ends]
            assert max(each.start for each in slots) < self.num_slots(request), f"{request}: tables of unequal length"
            for g, (group, table) in enumerate(zip(self.groups, request.blocks)):
                nulls = [block is group.pool.null_block for block in table]
                assert all(nulls[: request.num_skipped_blocks[g]])
                assert not group.needs_blocks or sum(nulls) == request.num_skipped_blocks[g]
                owners[group.pool].update(block.block_id for block, null in zip(table, nulls) if not null)
        for pool, counts in owners.items():
            pool.check_integrity(counts)
