"""The scheduler's half of KV transfer: which blocks are saved and loaded, and what becomes of what was loaded.

Saving. A piece (`pieces.py`: a block, or several) is noted when the last of it enters the prefix cache, with the number
of the step that computes that. It is copied off the device behind that step, and before the first one that writes to
its blocks again: steps and copies are links of one chain (`worker/kv_transfer`). Until then it waits (`saves.py`).

Loading. A waiting request whose beginning is in a tier for longer than in the prefix cache is passed over until its
pages are in host memory; they are sent for where it would fit (`prompt_grants.py`). Only then do they get blocks,
which are written ahead of the next step, enter the prefix cache and are free again: the request finds them there as
if another had computed them. So nobody holds a block while bytes are fetched, a request can end meanwhile without
anything to undo, and a piece of which a page does not come is to be computed.
Of a group with a window only the blocks are loaded that the next token sees.

This module knows neither bytes nor devices.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import NamedTuple

from jaxpaged.core.kv_cache.manager import CacheHit, KVCacheManager
from jaxpaged.core.kv_transfer.chunks import Chunks
from jaxpaged.core.kv_transfer.handovers import Handovers
from jaxpaged.core.kv_transfer.page_events import PageEvents
from jaxpaged.core.kv_transfer.pieces import Pieces, read_range
from jaxpaged.core.kv_transfer.rates import Rates
from jaxpaged.core.kv_transfer.saves import Save, Saves
from jaxpaged.core.request import Request, RequestStatus
from jaxpaged.kv_store.page import PageContent, PageKey
from jaxpaged.kv_store.pieces import Piece
from jaxpaged.kv_store.prefix_file import PlacedPage
from jaxpaged.kv_store.tier import ChunkTiers, Lookup
from jaxpaged.kv_store.transfer_params import RemoteSource

LookUp = Callable[[Sequence[PageKey]], list[Lookup]]
Where = Callable[[Sequence[PageKey]], list[str]]
Expect = Callable[[Sequence[PageKey], RemoteSource], None]


Place = tuple[int, int]
"""A group, and the number of a piece, or the index of a block, of a request."""


@dataclass(eq=False)
class Load:
    """Pages that are on their way for a request, which has `num_tokens` more of its beginning with them, up to `end`.
    `places` and `pieces`: where they belong, and the pages of each; `ends`: of each page in the request; `news`: when
    one came last, which whoever fetches them says; monotonic."""

    request: Request
    num_tokens: int
    end: int
    places: tuple[Place, ...]
    pieces: tuple[tuple[PageContent, ...], ...]
    ends: tuple[int, ...]
    news: float

    @cached_property
    def pages(self) -> tuple[PageContent, ...]:
        return tuple(page for piece in self.pieces for page in piece)


class Question(NamedTuple):
    """Keys that a store elsewhere is asked for, beyond what the prefix cache had of a request."""

    request: Request
    num_hit: int
    keys: tuple[PageKey, ...]
    begin: float  # monotonic


PATIENCE = 10.0
"""Seconds that a request waits for pages, of which none comes, before it is computed without them."""
MOST_REMEMBERED = 4096


class KVTransfers:
    """What travels, in pages of `page_tokens`. `lookup` answers at once whether pages are in a tier, `where` in which;
    `expect` is told which ones another engine lends, `chunk_tiers` of texts."""

    def __init__(
        self,
        manager: KVCacheManager,
        page_tokens: int,
        lookup: LookUp,
        where: Where,
        expect: Expect | None = None,
        chunk_tiers: ChunkTiers | None = None,
    ):
        self._manager, self._lookup, self._where, self._expect = manager, lookup, where, expect
        self._pieces, self._chunks = Pieces(manager, page_tokens), None
        if chunk_tiers is not None and chunk_tiers.chunk_tokens is not None:
            self._chunks = Chunks(manager, self._pieces, chunk_tiers, chunk_tiers.chunk_tokens)
        self._groups, self.handovers = manager.groups, Handovers()
        self.events = PageEvents(self._groups.groups, self._pieces, manager.records_events)
        self.rates, self.patience = Rates(), PATIENCE
        self.saves = Saves(self._groups.groups)
        self.lost: set[PageKey] = set()  # whose content is in doubt
        self.loading: dict[str, Load] = {}
        self._begun: list[Load] = []
        self._asked: dict[int, int] = {}  # a request's number -> how often it had been preempted when it was asked for
        self._asking: dict[int, Question] = {}  # by the request's number
        self._has_come: dict[int, Request] = {}  # whose pages are on the device, and who may still wait, by number
        self.num_queries = self.num_hits = 0  # tokens

    # ---- saving --------------------------------------------------------------------------------

    def note_stored(self, request: Request, block_idxs: Sequence[Sequence[int]], step_id: int) -> None:
        """Blocks of a request, some of each group, have entered the prefix cache, computed by the steps up to
        `step_id`."""
        places = [
            (number * piece_size.tokens, g, number)
            for g, piece_size in enumerate(self._pieces.piece_sizes)
            for number in self._stored_pieces(request, g, block_idxs[g])
        ]
        for _, g, number in sorted(places):  # of all groups in the order of the tokens
            if (piece := self._pieces.whole(request, g, number)) is not None:
                self.saves.add(Save(step_id, piece))
                self.events.note(request, piece.pages)

    def _stored_pieces(self, request: Request, g: int, block_idxs: Sequence[int]) -> list[int]:
        """The numbers of those that may be saved once these blocks are there."""
        numbers = self._pieces.numbers(g, block_idxs)
        return numbers if self._chunks is None or not numbers else self._chunks.with_whole(request, g, numbers)

    def note_lost(self, request: Request, g: int, block_idx: int) -> None:
        """What a block of a request holds, which the prefix cache has, is in doubt."""
        for number in self._pieces.numbers(g, [block_idx]):
            self.lost.update(self._pieces.keys(request, g, number))

    def take_lost(self) -> list[PageKey]:
        """What must not be kept: a request computed it that failed."""
        lost, self.lost = self.lost, set()
        self.saves.discard(lost)
        return list(lost)

    @property
    def alignment(self) -> int:
        """Tokens of the shortest beginning that is whole blocks and pages."""
        return self._pieces.alignment

    def align(self, num_tokens: int) -> int:
        """How many of so many tokens can be kept besides the device: those of whole blocks and pages."""
        return self._pieces.align(num_tokens)

    def beginning(self, request: Request) -> tuple[int, list[tuple[list[PlacedPage], tuple[int, ...]]]]:
        """How many tokens of a request, which may have ended and of which `align` leaves all but one, the prefix cache
        has, and for each piece that whoever goes on behind them needs its pages, and the ids of its blocks now."""
        num_tokens, found = self._manager.get_computed_blocks(request).num_tokens, []
        for g, (group, piece_size) in enumerate(zip(self._groups.groups, self._pieces.piece_sizes)):
            seen = range(*read_range(group, num_tokens))
            first = self._pieces.first_needed(g, num_tokens - 1)  # the last token of a prompt is always computed
            for number in range(first, num_tokens // piece_size.tokens):
                piece, starts = (
                    self._pieces.piece(request, g, number),
                    count(number * piece_size.tokens, piece_size.page_tokens),
                )
                if piece.block_ids:
                    found.append(([*map(PlacedPage, piece.pages, starts)], piece.block_ids))
                elif any(idx in seen for idx in self._pieces.blocks(g, number)):
                    return 0, []
        return num_tokens, found

    # ---- other engines -------------------------------------------------------------------------

    def lent_pieces(self, request: Request) -> tuple[int, list[Piece]]:
        """What to lend of a request that begins, or has ended: how many tokens, and the pieces that whoever goes on
        behind its prompt needs, those too that no blocks hold yet."""
        if not request.reads_prefix_cache:
            return 0, []
        pieces, num_tokens = self._pieces, self._pieces.align(request.num_prompt_tokens)
        return num_tokens, [
            pieces.piece(request, g, number)
            for g, piece_size in enumerate(pieces.piece_sizes)  # the last token is always computed
            for number in range(pieces.first_needed(g, request.num_prompt_tokens - 1), num_tokens // piece_size.tokens)
        ]

    # ---- loading -------------------------------------------------------------------------------

    def is_loading(self, request: Request, hit: CacheHit, may_begin: bool) -> bool:
        """Whether a waiting request waits for pages, or to hear whether they are there. Once it may begin to, they are
        sent for, where that pays, once since it began to wait."""
        load, number = self.loading.get(request.request_id), request.arrival_order
        if load is not None and load.request is request:
            if time.monotonic() < load.news + self.patience:
                return True
            del self.loading[request.request_id]
            self.handovers.give_back(request)
        if not may_begin:
            self._asking.pop(number, None)  # it waits for something else, which is not to use up its patience
            return False
        if not request.reads_prefix_cache or self._asked.get(number) == request.num_preemptions:
            return False
        asked, now = self._asking.get(number), time.monotonic()
        has_patience = asked is None or now < asked.begin + self.patience
        if asked is not None and has_patience and asked.num_hit == hit.num_tokens and self._is_open(asked):
            return True
        load, unknown = self._find(request, hit)
        if unknown and has_patience:
            self._asking[number] = Question(request, hit.num_tokens, unknown, now if asked is None else asked.begin)
            return True
        self._asking.pop(number, None)
        if len(self._asked) > MOST_REMEMBERED:
            self._asked.clear()  # who still waits may be asked for once more
        self._asked[number] = request.num_preemptions
        self.num_queries += request.num_tokens - hit.num_tokens
        if load is None or not self._pays(load):
            self.handovers.give_back(request)
            return False
        self.events.note(request, load.pages)
        self.loading[request.request_id] = load
        self._begun.append(load)
        return True

    def pass_over(self, requests: Iterable[Request]) -> None:
        """Requests wait behind one for which there is no room: what they asked a store for is asked anew once there is,
        since waiting for something else is not to use up their patience."""
        if self._asking:
            for request in requests:
                self._asking.pop(request.arrival_order, None)

    def _pays(self, load: Load) -> bool:
        """Whether to load rather than to compute. What another engine has computed for the request always is."""
        if self.handovers.source(load.request) is not None:
            return True
        return self.rates.pays(self._where([page.key for page in load.pages]))

    def num_tokens_loading(self, request: Request) -> int:
        """How many tokens of its beginning are on their way for a request."""
        load = self.loading.get(request.request_id)
        return load.num_tokens if load is not None and load.request is request else 0

    @property
    def is_waited_for(self) -> bool:
        """Whether any request waits for pages."""
        return any(not load.request.is_finished for load in self.loading.values())

    @property
    def is_asking(self) -> bool:
        """Whether any request waits for a store's answer, which nobody announces."""
        self._asking = {number: each for number, each in self._asking.items() if not each.request.is_finished}
        return bool(self._asking)

    def take_begun(self) -> list[Load]:
        """Loads that nobody has begun yet."""
        begun, self._begun = self._begun, []
        return begun

    def _is_open(self, question: Question) -> bool:
        """Whether nothing of it is answered. Much cheaper than to find out anew what could be loaded."""
        return all(state is Lookup.PENDING for state in self._lookup(question.keys))

    def _find(self, request: Request, hit: CacheHit) -> tuple[Load | None, tuple[PageKey, ...]]:
        """What the tiers have beyond a hit, if anything, and the keys that a store is asked for, if it may be more once
        that has answered."""
        pieces, most = self._pieces, request.num_tokens - 1
        missing: dict[Place, list[int]] = {}  # pieces, and which blocks of each
        for g, group in enumerate(self._groups.groups):
            per_piece = pieces.piece_sizes[g].num_blocks
            for idx in range(most // group.block_size):
                if group.cached_block(request.block_hashes, idx) is None:
                    missing.setdefault((g, idx // per_piece), []).append(idx)
        keys = {place: pieces.keys(request, *place) for place in missing if pieces.ends(*place)[-1] <= most}
        if not keys:
            return None, ()
        if self._chunks is not None:
            self._chunks.introduce(request, most)
        source = self.handovers.source(request)
        if source is not None and self._expect is not None:
            lent = [zip(some, pieces.ends(*place)) for place, some in keys.items()]
            self._expect([key for each in lent for key, end in each if end <= source.num_tokens], source)
        every = [key for some in keys.values() for key in some]
        states = dict(zip(every, self._lookup(every)))
        found = {place for place, some in keys.items() if all(states[key] is Lookup.HIT for key in some)}
        unknown = {place for place, some in keys.items() if all(states[key] is not Lookup.MISS for key in some)} - found
        blocks_of = lambda places: {(g, idx) for g, number in places for idx in missing[g, number]}
        end = self._reach(most, blocks_of(missing.keys() - found))
        open_keys: tuple[PageKey, ...] = ()
        if unknown and self._reach(most, blocks_of(missing.keys() - found - unknown)) > max(end, hit.num_tokens):
            open_keys = tuple(key for place in unknown for key in keys[place] if states[key] is Lookup.PENDING)
        if end <= hit.num_tokens:
            return None, open_keys
        reads = [range(*read_range(group, end)) for group in self._groups.groups]
        needed = tuple(
            (g, number) for g, number in keys if (g, number) in found and any(i in reads[g] for i in missing[g, number])
        )
        pages = tuple(pieces.pages(request, *place) for place in needed)
        ends = tuple(each for place in needed for each in pieces.ends(*place))
        return Load(request, end - hit.num_tokens, end, needed, pages, ends, time.monotonic()), open_keys

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

    def fetch_stages(self) -> list[int]:
        """Requests whose pages are asked for, are on their way, and have come while the requests wait on."""
        waits = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        self._has_come = {number: each for number, each in self._has_come.items() if each.status in waits}
        num_loading = sum(not load.request.is_finished for load in self.loading.values())
        return [len(self._asking) if self.is_asking else 0, num_loading, len(self._has_come)]

    def arrived(self, load: Load, came: Sequence[bool], sources: Sequence[str]) -> list[list[int]] | None:
        """Give blocks to the pages that came, from tiers with these names: of each piece the ids of its blocks, 0 for
        those that did not come, or need not.

        None: nothing is to be done, since the request has ended, or its hashes are others, or too few blocks are free.
        What is written to these blocks must be dispatched before anything else.
        """
        request = load.request
        if self.loading.get(request.request_id) is not load:
            return None
        del self.loading[request.request_id]
        self.handovers.give_back(request)
        if request.is_finished or not any(came):
            return None
        before = self._manager.get_computed_blocks(request)  # its hashes are those of the weights as they are now
        if any(self._pieces.pages(request, *place) != pages for place, pages in zip(load.places, load.pieces)):
            return None
        lost = {page.key for page, ok in zip(load.pages, came) if not ok}
        blocks = [
            (g, idx)
            for (g, number), pages in zip(load.places, load.pieces)
            if lost.isdisjoint(page.key for page in pages)
            for idx in self._lacking(request, g, number, load.end)
        ]
        ids = self._enter(request, blocks)
        if ids is None:
            return None
        gained = self._manager.get_computed_blocks(request).num_tokens - before.num_tokens
        self.num_hits += gained
        self._has_come[request.arrival_order] = request
        if request.num_cached_tokens < 0:
            request.loaded = shared_out(gained, [source for source, ok in zip(sources, came) if ok])
        given = dict(zip(blocks, ids))
        return [[given.get((g, idx), 0) for idx in self._pieces.blocks(g, number)] for g, number in load.places]

    def _lacking(self, request: Request, g: int, number: int, end: int) -> list[int]:
        """The blocks of a piece that the prefix cache does not have, if who goes on behind `end` tokens needs one of
        them: those that a window does not see besides, so that the piece can be lent and saved again."""
        group, seen = self._groups.groups[g], range(*read_range(self._groups.groups[g], end))
        blocks = self._pieces.blocks(g, number)
        lacking = [idx for idx in blocks if group.cached_block(request.block_hashes, idx) is None]
        return lacking if any(idx in seen for idx in lacking) else []

    def _enter(self, request: Request, places: Sequence[Place]) -> list[int] | None:
        """Ids of free blocks that are cached from now on as what these blocks of a request must hold. They stay
        free, to be reused last. None where too few are."""
        manager, groups = self._manager, self._groups.groups
        hold = manager.hold("loading", manager.get_computed_blocks(request).tables)
        num_new = [sum(g in members for g, _ in places) for members in self._groups.groups_of_pool]
        blocks = []
        if all(n <= pool.num_free_blocks for n, pool in zip(num_new, manager.pools)):
            blocks = [groups[g].pool.get_new_blocks(1)[0] for g, _ in places]
            for (g, idx), block in zip(places, blocks):
                key = request.block_hashes[(idx + 1) * groups[g].units - 1] + groups[g].suffix
                if groups[g].pool.cache(block, key):
                    manager.record_stored(request, g, [idx])
            for (g, _), block in reversed(list(zip(places, blocks))):
                groups[g].pool.free_blocks([block])
        manager.release(hold)
        return [block.block_id for block in blocks] or None


def shared_out(num_tokens: int, sources: Sequence[str]) -> dict[str, int]:
    """Tokens by where their pages came from: each page counts alike, and what is left over counts for the last."""
    ends, told = {}, 0
    for source, num_pages in sorted(Counter(sources).items()):
        told += num_pages
        ends[source] = num_tokens * told // len(sources)
    starts = [0, *ends.values()]
    return {source: end - start for (source, end), start in zip(ends.items(), starts) if end > start}
