"""How far the beginning of a request goes once pages are loaded: what the device lacks of it, and what can be found.

In a group with a window the next token sees the last blocks only, so a beginning may go on behind a block that is lost,
but not end within a window that needs it.
"""

from dataclasses import dataclass

from jaxpaged.core.kv_cache.groups import CacheGroups
from jaxpaged.core.kv_cache.manager import CacheHit
from jaxpaged.core.kv_transfer.pieces import Pieces, read_range
from jaxpaged.core.request import Request
from jaxpaged.kv_connector.base import LookUp
from jaxpaged.kv_store.page import PageKey
from jaxpaged.kv_store.tier import Lookup

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
        pieces, most = self._pieces, request.num_tokens - 1
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
                lacking = [idx for idx in range(*read_range(group, end)) if (g, idx) in lost]
                if lacking:  # with a window the run may begin behind a lost block, but not hold one
                    end = self._groups.align(
                        (lacking[0] if group.spec.num_read_blocks is None else lacking[-1]) * group.block_size
                    )
            if end == wanted:
                return end
