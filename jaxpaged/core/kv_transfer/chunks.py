"""Chunks of several pages, which tiers such as LMCache's name by their tokens: when they are told of, and saved whole.

A chunk is told of when somebody looks for its pages. Once a request has computed its end all of its pieces are saved,
those too that were in the prefix cache already: a chunk may share its beginning with another one. Where a window is
shorter than a chunk, the blocks of its beginning may be others' by then. So pieces of a prompt are saved as they are
computed, and those behind it as long as the prefix cache has the whole chunk.
"""

from collections.abc import Iterable

from jaxpaged.core.kv_cache.groups import CacheGroup
from jaxpaged.core.kv_cache.manager import KVCacheManager
from jaxpaged.core.kv_transfer.pieces import Pieces
from jaxpaged.core.request import Request
from jaxpaged.kv_store.tier import ChunkTiers


class Chunks:
    """What `tiers` are told of the texts of requests."""

    def __init__(self, manager: KVCacheManager, pieces: Pieces, tiers: ChunkTiers, chunk_tokens: int):
        """`chunk_tokens` are whole pieces."""
        self._manager, self._groups, self._tiers, self._size = manager, manager.groups.groups, tiers, chunk_tokens
        self._pieces = pieces
        self._leaves_some = any(window < chunk_tokens for window in windows_of(self._groups))

    def introduce(self, request: Request, end: int) -> None:
        """The chunks of the first `end` tokens of a request are looked for."""
        if self._is_plain(request):
            self._tiers.introduce(request.all_token_ids, self._pieces.hashes(request), end)

    def with_whole(self, request: Request, g: int, numbers: list[int]) -> list[int]:
        """Pieces of a group that a request has filled, and those that are in chunks with them which are whole now."""
        if not self._is_plain(request):
            return numbers
        per_chunk = self._size // self._pieces.piece_sizes[g].tokens
        wanted = {*numbers}
        for chunk in {number // per_chunk for number in numbers}:
            end = (chunk + 1) * self._size
            is_wanted = self._is_whole(request, chunk) or (self._leaves_some and end <= request.num_prompt_tokens)
            if is_wanted and self._collect(request, chunk):
                wanted.update(range(chunk * per_chunk, (chunk + 1) * per_chunk))
        return sorted(wanted)

    def _collect(self, request: Request, chunk: int) -> bool:
        return self._tiers.collect(request.all_token_ids, self._pieces.hashes(request), (chunk + 1) * self._size)

    def _is_whole(self, request: Request, chunk: int) -> bool:
        """Whether a request has computed all of a chunk, and the prefix cache has all of its pieces."""
        size = self._size
        return (chunk + 1) * size <= request.num_cacheable_tokens and all(
            self._pieces.whole(request, g, number) is not None
            for g, piece_size in enumerate(self._pieces.piece_sizes)
            for number in range(chunk * size // piece_size.tokens, (chunk + 1) * size // piece_size.tokens)
        )

    def _is_plain(self, request: Request) -> bool:
        """Whether keys and values follow from the tokens and the first weights alone: names say nothing else."""
        return request.has_only_tokens and self._manager.hasher.root == self._manager.first_root


def windows_of(groups: Iterable[CacheGroup]) -> list[int]:
    """Tokens that the groups which leave blocks behind keep at least."""
    return [group.spec.num_read_blocks * group.block_size for group in groups if group.spec.num_read_blocks is not None]
