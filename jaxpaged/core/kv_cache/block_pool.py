"""The KV blocks of one pool: which are free, in what order they are reused, who shares them, and what they hold.

Block 0 is the null block: it stands where a table needs an entry and no block, and is never given out. A free
block may still hold content that is in the prefix cache; it is forgotten when the block is given out again.
Nothing here knows requests or tokens: keys are opaque bytes.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from jaxpaged.core.kv_cache.events import AllBlocksCleared, BlockRemoved, KVCacheEvent


class KVCacheBlock:
    """One block. `cache_key` is set while its content can be found in the prefix cache. In no list it is its own
    neighbour."""

    __slots__ = ("block_id", "cache_key", "next_free", "prev_free", "ref_cnt")

    def __init__(self, block_id: int):
        self.block_id = block_id
        self.ref_cnt = 0
        self.cache_key: bytes | None = None
        self.prev_free = self.next_free = self

    def __repr__(self) -> str:
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}, cached={self.cache_key is not None})"


class FreeBlockList:
    """A doubly linked list through the blocks themselves: removal from the middle is O(1)."""

    def __init__(self, blocks: Iterable[KVCacheBlock]):
        self._head, self._tail = KVCacheBlock(-1), KVCacheBlock(-2)
        self._head.next_free, self._tail.prev_free = self._tail, self._head
        self.num_blocks = 0
        for block in blocks:
            self.append(block)

    def append(self, block: KVCacheBlock) -> None:
        self._link(self._tail.prev_free, block, self._tail)

    def prepend(self, block: KVCacheBlock) -> None:
        self._link(self._head, block, self._head.next_free)

    def popleft(self) -> KVCacheBlock:
        head, block = self._head, self._head.next_free
        after = head.next_free = block.next_free
        after.prev_free = head
        block.prev_free = block.next_free = block
        self.num_blocks -= 1
        return block

    def remove(self, block: KVCacheBlock) -> None:
        before, after = block.prev_free, block.next_free
        before.next_free, after.prev_free = after, before
        block.prev_free = block.next_free = block
        self.num_blocks -= 1

    def _link(self, before: KVCacheBlock, block: KVCacheBlock, after: KVCacheBlock) -> None:
        block.prev_free, block.next_free = before, after
        before.next_free = after.prev_free = block
        self.num_blocks += 1

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self._head.next_free
        while block is not self._tail:
            yield block
            block = block.next_free


class BlockPool:
    """Gives blocks out and takes them back; finds blocks by content.

    Cache keys are a block's content hash and the 4-byte big-endian index of its KV group. Several blocks may
    hold the same content: the map shows one of them, the others are kept aside.
    """

    def __init__(self, num_blocks: int, record_events: bool = False):
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.num_usable_blocks = num_blocks - 1  # all but the null block
        self.free_list = FreeBlockList(self.blocks[1:])
        self._cached: dict[bytes, KVCacheBlock] = {}
        self._duplicates: dict[bytes, list[KVCacheBlock]] = {}
        self.reused: list[KVCacheBlock] | None = None  # that had content when they were given out, if anybody asks
        self.last_given = 0  # the largest id that was ever given out: blocks after it are as new
        self.record_events = record_events
        self.events: list[KVCacheEvent] = []

    @property
    def num_free_blocks(self) -> int:
        return self.free_list.num_blocks

    @property
    def num_held_blocks(self) -> int:
        return self.num_usable_blocks - self.free_list.num_blocks

    def get_cached_block(self, cache_key: bytes) -> KVCacheBlock | None:
        return self._cached.get(cache_key)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take blocks from the front of the free list, each with one owner; their old content is forgotten."""
        assert num_blocks <= self.free_list.num_blocks, f"{num_blocks} blocks asked, {self.free_list.num_blocks} free"
        new_blocks = []
        for _ in range(num_blocks):
            block = self.free_list.popleft()
            if block.cache_key is not None:
                if self.reused is not None:
                    self.reused.append(block)
                self.uncache(block)
            block.ref_cnt = 1
            new_blocks.append(block)
        if new_blocks:  # those never used come in the order of their ids, after all others
            self.last_given = max(self.last_given, new_blocks[-1].block_id)
        return new_blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One more owner for every block that a request found in the cache; null blocks have no owners."""
        for block in blocks:
            if block is self.null_block:
                continue
            if block.ref_cnt == 0:
                self.free_list.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, blocks: Sequence[KVCacheBlock]) -> None:
        """One owner less for each of a request's blocks, given in table order.

        Blocks without cached content are reused first. The others go to the back of the free list, the last of
        the table first, so that a chain of content is forgotten from its end.
        """
        for block in reversed(blocks):
            if block is self.null_block:
                continue
            assert block.ref_cnt > 0, f"{block} is freed, but nobody owns it"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                if block.cache_key is None:
                    self.free_list.prepend(block)
                else:
                    self.free_list.append(block)

    def cache(self, block: KVCacheBlock, cache_key: bytes) -> bool:
        """Let `block` be found by its content. True when nothing with that content was there before."""
        assert block.cache_key is None, f"{block} holds other content already"
        assert block is not self.null_block, "the null block holds nothing"
        block.cache_key = cache_key
        if cache_key in self._cached:
            self._duplicates.setdefault(cache_key, []).append(block)
            return False
        self._cached[cache_key] = block
        return True

    def uncache(self, block: KVCacheBlock) -> None:
        """Forget the content of a block, held or free."""
        cache_key, block.cache_key = block.cache_key, None
        assert cache_key is not None, f"{block} holds nothing to be forgotten"
        copies = self._duplicates.get(cache_key, [])
        if self._cached[cache_key] is not block:
            copies.remove(block)
        elif copies:
            self._cached[cache_key] = copies.pop()
        else:
            del self._cached[cache_key]
            if self.record_events:
                self._record_removal(cache_key)
        if not copies:
            self._duplicates.pop(cache_key, None)

    def forget(self, block: KVCacheBlock) -> None:
        """Uncache a block that nobody needs to find any more; if it is free, it is the next to be reused."""
        self.uncache(block)
        if block.ref_cnt == 0:
            self.free_list.remove(block)
            self.free_list.prepend(block)

    def _record_removal(self, cache_key: bytes) -> None:
        group_idx = int.from_bytes(cache_key[-4:], "big")
        self.events.append(BlockRemoved(block_hashes=[cache_key[:-4]], group_idx=group_idx))

    def lose_content(self) -> None:
        """Forget all content: the memory that had it is gone, or means something else. Owners keep their blocks."""
        for block in self.blocks:
            block.cache_key = None
        self._cached.clear()
        self._duplicates.clear()
        if self.record_events:
            self.events.append(AllBlocksCleared())

    def check_integrity(self, owners: Counter[int]) -> None:
        """Assert that every block is accounted for. `owners[block_id]` is in how many tables a block stands; holds are
        such tables, too."""
        free = {block.block_id for block in self.free_list}
        assert len(free) == self.free_list.num_blocks, f"{len(free)} blocks linked, {self.free_list.num_blocks} counted"
        assert self.null_block.block_id not in free, "the null block is free"
        assert self.null_block.ref_cnt == 0, f"the null block has owners: {self.null_block}"
        for block in self.blocks[1:]:
            count = owners[block.block_id]
            assert block.ref_cnt == count, f"{block} stands in {count} tables"
            assert (block.block_id in free) == (count == 0), f"{block}: free and held must exclude each other"
        self._check_cache_map()

    def _check_cache_map(self) -> None:
        mapped = Counter(block.block_id for block in self._cached.values())
        mapped.update(block.block_id for copies in self._duplicates.values() for block in copies)
        assert all(block.cache_key == key for key, block in self._cached.items())
        assert all(b.cache_key == key for key, copies in self._duplicates.items() for b in copies)
        keyed = Counter(block.block_id for block in self.blocks if block.cache_key is not None)
        assert mapped == keyed, f"blocks in the map {mapped} are not those with a key {keyed}"
