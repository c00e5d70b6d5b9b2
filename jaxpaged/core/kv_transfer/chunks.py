"""Chunks of several blocks, which tiers such as LMCache's name by their tokens: when they are told of, and saved whole.

A chunk is told of when somebody looks for its blocks. Once a request has computed its end all of its blocks are saved,
those too that were in the prefix cache already: a chunk may share its beginning with another one. The request
holds them then, so they are still what they were.
"""

from collections.abc import Sequence

from jaxpaged.core.kv_cache.block_hash import NONE_HASH
from jaxpaged.core.kv_cache.manager import KVCacheManager
from jaxpaged.core.request import Request
from jaxpaged.kv_store.content import ChunkTiers


class Chunks:
    """What `tiers` are told of the texts of requests."""

    def __init__(self, manager: KVCacheManager, tiers: ChunkTiers, chunk_tokens: int):
        self._manager, self._groups, self._tiers, self._size = manager, manager.groups.groups, tiers, chunk_tokens

    def introduce(self, request: Request, end: int) -> None:
        """The chunks of the first `end` tokens of a request are looked for."""
        if self._is_plain(request):
            self._tiers.introduce(request.all_token_ids, request.block_hashes, end)

    def with_whole(self, request: Request, g: int, block_idxs: Sequence[int]) -> Sequence[int]:
        """Blocks of a group that a request has filled, and those that are in chunks with them which are whole now."""
        if not block_idxs or not self._is_plain(request):
            return block_idxs
        per_chunk = self._size // self._groups[g].block_size
        wanted = {*block_idxs}
        for number in {idx // per_chunk for idx in block_idxs}:
            if self._is_whole(request, number) and self._collect(request, number):
                wanted.update(range(number * per_chunk, (number + 1) * per_chunk))
        return sorted(wanted)

    def _collect(self, request: Request, number: int) -> bool:
        return self._tiers.collect(request.all_token_ids, request.block_hashes, (number + 1) * self._size)

    def _is_whole(self, request: Request, number: int) -> bool:
        """Whether a request has computed, and holds, all blocks of a chunk. A window may have left some behind."""
        size = self._size
        if (number + 1) * size > request.num_cacheable_tokens:
            return False
        for group, table in zip(self._groups, request.blocks):
            blocks = table[number * size // group.block_size : (number + 1) * size // group.block_size]
            if any(block is group.pool.null_block for block in blocks):
                return False
        return True

    def _is_plain(self, request: Request) -> bool:
        """Whether keys and values follow from the tokens and the first weights alone: names say nothing else."""
        only_tokens = request.lora_name is None and request.cache_salt is None and not request.mm_hashes
        return only_tokens and self._manager.hasher.root == NONE_HASH
