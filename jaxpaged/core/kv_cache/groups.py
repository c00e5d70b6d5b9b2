"""KV groups: where in the cache each finds the beginning of a request, and hits on which all groups agree.

A group is a set of layers with one block table. What a query reads follows from the group's spec; blocks come from the
pool of all groups that store alike, and may have another size than those of other groups. Lengths are in tokens, and
content hashes come for every `unit` of tokens, which divides all block sizes. Nothing here knows requests.

Snapshots of recurrent states
-----------------------------
A hit needs a snapshot exactly at its end, and a snapshot is as large as thousands of tokens of keys and values. So they
are taken where a later request is likely to begin, on the last block border before each of these places:

* The end of the prompt: the same question again, another sample, the next turn of a chat.
* The place where this prompt leaves what other groups have in the cache: somebody had the same beginning before, so
  others will. The state there is computed on the way anyhow.
* The newest place in the answer, where the next turn of a chat begins. Only the newest: when an answer has a further
  snapshot, the one before it is forgotten.

A snapshot takes a free block, if there is one, and never preempts anybody.
"""

import math
from collections.abc import Sequence

from jaxpaged.core.kv_cache.block_pool import BlockPool, KVCacheBlock
from jaxpaged.kv_cache_spec import CacheSpec, KVCacheGroup, pool_layouts


class CacheGroup:
    """One group over the pool that it shares. `suffix` ends its cache keys; `units` of tokens fill a block.

    `needs_blocks`: each entry of a table must have a block until no query reads it any more.
    """

    needs_blocks = True

    def __init__(self, group_idx: int, spec: CacheSpec, pool: BlockPool, unit: int):
        self.spec = spec
        self.pool = pool
        self.suffix = group_idx.to_bytes(4, "big")
        self.block_size = spec.block_size
        self.units = spec.block_size // unit
        self._num_read_blocks = spec.num_read_blocks

    def cached_block(self, hashes: Sequence[bytes], block_idx: int) -> KVCacheBlock | None:
        """The block that holds what block `block_idx` of a request with these hashes must hold."""
        return self.pool.get_cached_block(hashes[(block_idx + 1) * self.units - 1] + self.suffix)

    def find_longest_hit(self, hashes: Sequence[bytes], max_blocks: int) -> list[KVCacheBlock]:
        """The table of the longest cached beginning of at most `max_blocks`; null blocks where no query reads."""
        end = min(max_blocks, len(hashes) // self.units)
        if self._num_read_blocks is None:
            return self._find_all(hashes, end)
        run: list[KVCacheBlock] = []  # right to left: the first run that is long enough, or reaches the beginning
        for block_idx in range(end - 1, -1, -1):
            if len(run) == self._num_read_blocks:
                break
            block = self.cached_block(hashes, block_idx)
            if block is None:
                end, run = block_idx, []
            else:
                run.append(block)
        return [self.pool.null_block] * (end - len(run)) + run[::-1]

    def _find_all(self, hashes: Sequence[bytes], end: int) -> list[KVCacheBlock]:
        """From the left: every block up to the first that is missing."""
        get, suffix, units, hit = self.pool.get_cached_block, self.suffix, self.units, []
        for block_hash in hashes[units - 1 : end * units : units]:
            block = get(block_hash + suffix)
            if block is None:
                break
            hit.append(block)
        return hit

    def new_blocks(self, first: int, num_blocks: int, num_prompt_tokens: int, branch: int) -> list[KVCacheBlock]:
        """Entries `first` and after of a table."""
        return self.pool.get_new_blocks(num_blocks)

    def wants_block(self, end: int, num_prompt_tokens: int, branch: int) -> bool:
        """Whether what ends behind `end` tokens of a request gets a block, if one is free."""
        return True

    def forget_replaced(self, hashes: Sequence[bytes], block_idx: int, num_prompt_tokens: int) -> None:
        """Block `block_idx` of a request is cached: forget the block that it replaces, if it does."""


class SnapshotGroup(CacheGroup):
    """A group of layers with recurrent states, whose blocks are snapshots of them."""

    needs_blocks = False

    def new_blocks(self, first: int, num_blocks: int, num_prompt_tokens: int, branch: int) -> list[KVCacheBlock]:
        """Blocks where a snapshot is wanted, and a block is free; the null block elsewhere."""
        blocks = []
        for end in range((first + 1) * self.block_size, (first + num_blocks + 1) * self.block_size, self.block_size):
            wanted = self.wants_block(end, num_prompt_tokens, branch) and self.pool.num_free_blocks
            blocks += self.pool.get_new_blocks(1) if wanted else [self.pool.null_block]
        return blocks

    def wants_block(self, end: int, num_prompt_tokens: int, branch: int) -> bool:
        """Whether the state after `end` tokens is worth a block: see above. `branch` is where others' prompts end."""
        return any(end <= place < end + self.block_size for place in (num_prompt_tokens - 1, branch)) or (
            end >= num_prompt_tokens
        )

    def forget_replaced(self, hashes: Sequence[bytes], block_idx: int, num_prompt_tokens: int) -> None:
        """Of an answer only the newest snapshot is kept."""
        if block_idx * self.block_size >= num_prompt_tokens:
            older = self.cached_block(hashes, block_idx - 1)
            if older is not None:
                self.pool.forget(older)


class CacheGroups:
    """All groups of a KV cache, each over the pool of its kind of block."""

    def __init__(self, groups: Sequence[KVCacheGroup], pools: Sequence[BlockPool], max_num_batched_tokens: int):
        sizes = [group.spec.block_size for group in groups]
        self.unit = math.gcd(*sizes)  # tokens of one content hash
        self._alignment = math.lcm(*sizes)  # of hits
        self._max_num_batched_tokens = max_num_batched_tokens
        self._layouts = pool_layouts(groups)
        pool_of = {g: pool for layout, pool in zip(self._layouts, pools, strict=True) for g in layout.group_idxs}
        kind_of = lambda spec: CacheGroup if spec.needs_blocks else SnapshotGroup
        self.groups = tuple(kind_of(each.spec)(g, each.spec, pool_of[g], self.unit) for g, each in enumerate(groups))
        self.have_snapshots = not all(group.needs_blocks for group in self.groups)
        self.groups_of_pool = tuple(layout.group_idxs for layout in self._layouts)

    def __iter__(self):
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    def align(self, num_tokens: int) -> int:
        """The longest hit of so many tokens at most."""
        return num_tokens // self._alignment * self._alignment

    def find_longest_hit(self, hashes: Sequence[bytes], max_tokens: int) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """(One table a group, all of the same number of tokens: the longest beginning that every group has; where it
        would have ended but for snapshots).

        A group narrows what those before it have found; since a shorter beginning may lack blocks that a window
        needs, this goes on until nobody narrows any more.
        """
        length, branch = max_tokens // self._alignment * self._alignment, -1
        while True:
            tables = []
            for group in self.groups:
                if not group.needs_blocks and branch < 0:
                    branch = length
                tables.append(group.find_longest_hit(hashes, length // group.block_size))
                length = len(tables[-1]) * group.block_size // self._alignment * self._alignment
            if all(len(table) * group.block_size == length for table, group in zip(tables, self.groups)):
                return tuple(tables), max(branch, length)

    def max_blocks(self, num_tokens: int) -> list[int]:
        """Blocks that a request must have at most, of each pool, while its first `num_tokens` are computed."""
        return [layout.max_blocks(num_tokens, self._max_num_batched_tokens) for layout in self._layouts]
