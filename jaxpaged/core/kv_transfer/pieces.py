"""What travels of a request: pieces, which are whole blocks on the device and whole pages elsewhere, and their names.

Pages are named by content hashes as blocks are (`kv_cache/block_hash.py`), chained by the tokens of a page. So they
have the names that an engine with blocks of this size gives these, whatever the size of blocks here. Where it is the
same, pages and blocks have one chain.

A snapshot of a recurrent state is one block and one page: that which ends where the snapshot lies.

`Matching` says how far the beginning of a request goes once pages are loaded. In a group with a window the next token
sees the last blocks only, so a beginning may go on behind a block that is lost, but not end where a window needs it. Of
a recurrent state it sees one snapshot: a beginning ends behind one.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from jaxpaged.core.kv_cache.block_hash import BlockHasher
from jaxpaged.core.kv_cache.groups import CacheGroup, CacheGroups
from jaxpaged.core.kv_cache.manager import CacheHit, KVCacheManager
from jaxpaged.core.request import Request
from jaxpaged.kv_connector.base import LookUp
from jaxpaged.kv_store.page import PageContent, PageKey
from jaxpaged.kv_store.pieces import Piece, PieceSize
from jaxpaged.kv_store.tier import Lookup

MOST_PAGES = 4
"""Pages that a block of another engine has at most: what its windows need behind its last whole block is lent to it,
and is in a file."""


class Pieces:
    """Those of the blocks of `manager` and pages of `page_tokens`. A piece is named by its group and its number."""

    def __init__(self, manager: KVCacheManager, page_tokens: int):
        self._manager, self.page_tokens, self._groups = manager, page_tokens, manager.groups.groups
        self.piece_sizes = tuple(
            PieceSize(group.block_size, page_tokens, is_end=not group.needs_blocks) for group in self._groups
        )
        self.alignment = math.lcm(*(piece_size.tokens for piece_size in self.piece_sizes))
        self._hasher = BlockHasher(page_tokens) if page_tokens != manager.hasher.block_size else None

    @property
    def are_named_alike(self) -> bool:
        """Whether a page has the hash of a block."""
        return self._hasher is None

    def align(self, num_tokens: int) -> int:
        """The longest beginning of so many tokens at most that is whole pieces of all groups."""
        return num_tokens // self.alignment * self.alignment

    def hashes(self, request: Request) -> list[bytes]:
        """Of all full pages of known tokens."""
        if self._hasher is None:
            self._manager.hasher.extend(request)
            return request.block_hashes
        self._hasher.root = self._manager.hasher.root
        self._hasher.extend_list(request.page_hashes, request)
        return request.page_hashes

    def numbers(self, g: int, block_idxs: Iterable[int]) -> list[int]:
        """The pieces that these blocks, in their order, are part of."""
        num_blocks = self.piece_sizes[g].num_blocks
        return list(dict.fromkeys(idx // num_blocks for idx in block_idxs))

    def blocks(self, g: int, number: int) -> range:
        """The indices of a piece's blocks."""
        num_blocks = self.piece_sizes[g].num_blocks
        return range(number * num_blocks, (number + 1) * num_blocks)

    def keys(self, request: Request, g: int, number: int) -> list[PageKey]:
        """Of the pages of a piece."""
        idxs = self.piece_sizes[g].page_idxs(number)
        return [PageKey(each, g) for each in self.hashes(request)[idxs.start : idxs.stop]]

    def ends(self, g: int, number: int) -> range:
        """Behind which tokens the pages of a piece end."""
        idxs, size = self.piece_sizes[g].page_idxs(number), self.page_tokens
        return range((idxs.start + 1) * size, idxs.stop * size + 1, size)

    def pages(self, request: Request, g: int, number: int) -> tuple[PageContent, ...]:
        """What a piece has; all its tokens are known."""
        size, hashes, tokens = self.page_tokens, self.hashes(request), request.all_token_ids
        return tuple(
            PageContent(
                PageKey(hashes[idx], g), hashes[idx - 1] if idx else None, tuple(tokens[idx * size : (idx + 1) * size])
            )
            for idx in self.piece_sizes[g].page_idxs(number)
        )

    def piece(self, request: Request, g: int, number: int) -> Piece:
        """With the blocks that the prefix cache has of it."""
        return Piece(self.pages(request, g, number), self._block_ids(request, g, number))

    def whole(self, request: Request, g: int, number: int) -> Piece | None:
        """The same, if the prefix cache has all of it."""
        if (number + 1) * self.piece_sizes[g].tokens > request.num_tokens or not (
            ids := self._block_ids(request, g, number)
        ):
            return None
        return Piece(self.pages(request, g, number), ids)

    def _block_ids(self, request: Request, g: int, number: int) -> tuple[int, ...]:
        group, hashes = self._groups[g], request.block_hashes
        blocks = [group.cached_block(hashes, idx) for idx in self.blocks(g, number)]
        return () if None in blocks else tuple(block.block_id for block in blocks if block is not None)

    def first_needed(self, g: int, num_tokens: int) -> int:
        """The first piece of a group that is needed by who goes on behind so many tokens, or behind the last whole
        block of them, however large that is up to MOST_PAGES."""
        group, piece_size = self._groups[g], self.piece_sizes[g]
        if group.spec.num_read_blocks is None:
            return 0
        largest = math.lcm(MOST_PAGES * self.page_tokens, self.alignment)
        end = num_tokens // largest * largest
        seen = (group.spec.num_read_blocks + 1) * group.block_size  # whole blocks, wherever these begin
        return max(end - seen, 0) // largest * largest // piece_size.tokens


def read_range(group: CacheGroup, end: int) -> tuple[int, int]:
    """(first, end) of the blocks of a group that the token behind the first `end` sees."""
    num_blocks, num_read = end // group.block_size, group.spec.num_read_blocks
    return (0 if num_read is None else max(num_blocks - num_read, 0)), num_blocks


Place = tuple[int, int]
"""A group, and the number of a piece, or the index of a block, of a request."""


@dataclass
class Missing:
    """What the device lacks of a request, of which `most` tokens could be there and `num_hit` are: blocks by the piece
    that they are in, and the keys of those pieces that could be loaded. What was found: its beginning up to `end`;
    more, once it is known of `open_keys` whether they are there."""

    blocks: dict[Place, list[int]]
    keys: dict[Place, list[PageKey]]
    most: int
    num_hit: int
    end: int = 0
    open_keys: tuple[PageKey, ...] = ()


class Matching:
    """In the groups of a cache, cut into `pieces`."""

    def __init__(self, groups: CacheGroups, pieces: Pieces):
        self._groups, self._pieces = groups, pieces

    def missing(self, request: Request, hit: CacheHit) -> Missing:
        """What the prefix cache lacks of a request, of which it has `hit`."""
        pieces, most = self._pieces, request.num_findable_tokens
        blocks: dict[Place, list[int]] = {}
        for g, group in enumerate(self._groups.groups):
            per_piece = pieces.piece_sizes[g].num_blocks
            for idx in range(most // group.block_size):
                if group.cached_block(request.block_hashes, idx) is None:
                    blocks.setdefault((g, idx // per_piece), []).append(idx)
        keys = {place: pieces.keys(request, *place) for place in blocks if pieces.ends(*place)[-1] <= most}
        return Missing(blocks, keys, most, hit.num_tokens)

    def match(self, missing: Missing, look_up: LookUp) -> int | None:
        """How many tokens there would be if all were loaded that `look_up` finds. None: it may be more later."""
        keys = missing.keys
        every = [key for some in keys.values() for key in some]
        states = dict(zip(every, look_up(every), strict=True))
        found = {place for place, some in keys.items() if all(states[key] is Lookup.HIT for key in some)}
        unknown = {place for place, some in keys.items() if all(states[key] is not Lookup.MISS for key in some)} - found
        blocks_of = lambda places: {(g, idx) for g, number in places for idx in missing.blocks[g, number]}
        lost = missing.blocks.keys() - found
        missing.end = max(self._reach(missing.most, blocks_of(lost)), missing.num_hit)
        if not unknown or self._reach(missing.most, blocks_of(lost - unknown)) <= missing.end:
            return missing.end
        missing.open_keys = tuple(key for place in unknown for key in keys[place] if states[key] is Lookup.PENDING)
        return None

    def _reach(self, most: int, lost: set[Place]) -> int:
        """Tokens of the longest beginning that needs no lost block, of `most` at most."""
        end = self._groups.align(most)
        while True:
            wanted = end
            for g, group in enumerate(self._groups.groups):
                # With a window the run may begin behind a lost block, but not hold one. Of snapshots, most are lost.
                while lacking := [idx for idx in range(*read_range(group, end)) if (g, idx) in lost]:
                    end = self._groups.align(
                        (lacking[0] if group.spec.num_read_blocks is None else lacking[-1]) * group.block_size
                    )
            if end == wanted:
                return end
