"""The scheduler's half of KV transfer: which blocks are saved and loaded, and what becomes of what was loaded.

Saving. A block is noted when it enters the prefix cache, with the number of the step that computes it. It is copied off
the device behind that step, and before the next one that is dispatched: steps and copies are links of one chain, so
the block may be given out again at once (`worker/kv_transfer`).

Loading. A waiting request whose beginning is in a tier for longer than in the prefix cache is passed over until its
pages are in host memory; they are sent for where it would fit (`prompt_grants.py`). Only then do they get blocks,
which are written ahead of the next step, enter the prefix cache and are free again: the request finds them there as
if another had computed them. So nobody holds a block while bytes are fetched, a request can end meanwhile without
anything to undo, and pages that do not come are blocks to compute.
Of a group with a window only the blocks are loaded that the next token sees.

This module knows neither bytes nor devices.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from jaxpaged.core.kv_cache.events import BlockRemoved, BlockStored, KVCacheEvent
from jaxpaged.core.kv_cache.groups import CacheGroup
from jaxpaged.core.kv_cache.manager import CacheHit, KVCacheManager
from jaxpaged.core.kv_transfer.chunks import Chunks
from jaxpaged.core.kv_transfer.handovers import Handovers
from jaxpaged.core.kv_transfer.rates import Rates
from jaxpaged.core.request import Request, RequestStatus
from jaxpaged.kv_store.changes import Change
from jaxpaged.kv_store.content import ChunkTiers, PageContent
from jaxpaged.kv_store.handover import RemoteSource
from jaxpaged.kv_store.page import PageKey
from jaxpaged.kv_store.prefix_file import PlacedPage
from jaxpaged.kv_store.tier import Lookup

LookUp = Callable[[Sequence[PageKey]], list[Lookup]]
Where = Callable[[Sequence[PageKey]], list[str]]
Expect = Callable[[Sequence[PageKey], RemoteSource], None]


class Save(NamedTuple):
    """A block whose content is computed by the steps up to `step_id`."""

    step_id: int
    content: PageContent
    block_id: int


@dataclass(eq=False)
class Load:
    """Pages that are on their way for a request, which has `num_tokens` more of its beginning with them. `ends`: of the
    page's tokens in the request; `news`: when one came last, which whoever fetches them says; monotonic."""

    request: Request
    num_tokens: int
    pages: tuple[PageContent, ...]
    block_idxs: tuple[int, ...]
    ends: tuple[int, ...]
    news: float


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
    """What travels. `lookup` answers at once whether pages are in a tier, `where` in which; `expect` is told which ones
    another engine lends, `chunk_tiers` of texts."""

    def __init__(
        self, manager: KVCacheManager, lookup: LookUp, where: Where, expect: Expect | None = None,
        chunk_tiers: ChunkTiers | None = None,
    ):  # fmt: skip
        self._manager, self._lookup, self._where, self._expect = manager, lookup, where, expect
        self._chunks = None
        if chunk_tiers is not None and chunk_tiers.chunk_tokens is not None:
            self._chunks = Chunks(manager, chunk_tiers, chunk_tiers.chunk_tokens)
        self.handovers = Handovers()
        self._groups = manager.groups
        self.rates, self.patience = Rates(), PATIENCE
        self.saves: list[Save] = []
        self.lost: set[bytes] = set()  # cache keys whose content is in doubt
        self.loading: dict[str, Load] = {}
        self._begun: list[Load] = []
        self._asked: dict[int, int] = {}  # a request's number -> how often it had been preempted when it was asked for
        self._asking: dict[int, Question] = {}  # by the request's number
        self._has_come: dict[int, Request] = {}  # whose pages are on the device, and who may still wait, by number
        self.num_queries = self.num_hits = 0  # tokens

    # ---- saving --------------------------------------------------------------------------------

    def note_stored(self, request: Request, g: int, block_idxs: Sequence[int], step_id: int) -> None:
        """Blocks of a request have entered the prefix cache, computed by the steps up to `step_id`."""
        table = request.blocks[g]
        if self._chunks is not None:
            block_idxs = self._chunks.with_whole(request, g, block_idxs)
        for idx in block_idxs:
            self.saves.append(Save(step_id, self._content(request, g, idx), table[idx].block_id))

    def take_saves(self, before: int | None = None) -> list[Save]:
        """What steps before number `before` have computed, None: all steps."""
        taken = [save for save in self.saves if before is None or save.step_id < before]
        self.saves = [] if len(taken) == len(self.saves) else self.saves[len(taken) :]
        return taken

    def take_lost(self) -> list[PageKey]:
        """What must not be kept: a request computed it that failed."""
        lost = [PageKey(key[:-4], int.from_bytes(key[-4:], "big")) for key in self.lost]
        self.lost.clear()
        self.saves = [save for save in self.saves if save.content.key not in lost]
        return lost

    def beginning(self, request: Request) -> tuple[int, list[tuple[PlacedPage, int]]]:
        """How many tokens of a request, which may have ended, the prefix cache has, and the pages, each with the id of
        its block now, that whoever goes on behind them needs."""
        hit = self._manager.get_computed_blocks(request)
        pages = [
            (PlacedPage(self._content(request, g, idx), idx * group.block_size), hit.tables[g][idx].block_id)
            for g, group in enumerate(self._groups.groups)
            for idx in range(*read_range(group, hit.num_tokens))
        ]
        return hit.num_tokens, pages

    def _content(self, request: Request, g: int, block_idx: int) -> PageContent:
        group = self._groups.groups[g]
        size, units, hashes = group.block_size, group.units, request.block_hashes
        tokens = request.all_token_ids[block_idx * size : (block_idx + 1) * size]
        parent = hashes[block_idx * units - 1] if block_idx else None
        return PageContent(PageKey(hashes[(block_idx + 1) * units - 1], g), parent, tuple(tokens))

    # ---- other engines -------------------------------------------------------------------------

    def lent_pages(self, request: Request) -> tuple[int, list[tuple[PageContent, int]]]:
        """What to lend of a request that begins, or has ended: how many tokens, and the pages that whoever goes on
        behind its prompt needs, each with the id of the block that has it, 0 where none does yet."""
        pages: list[tuple[PageContent, int]] = []
        if not request.reads_prefix_cache:
            return 0, pages
        self._manager.get_computed_blocks(request)  # its hashes are those of the weights as they are now
        num_prompt = request.num_prompt_tokens
        num_tokens = self._groups.align(num_prompt)
        first_end = self._groups.align(num_prompt - 1)  # the last token is always computed
        for g, group in enumerate(self._groups.groups):
            for idx in range(read_range(group, first_end)[0], num_tokens // group.block_size):
                block = group.cached_block(request.block_hashes, idx)
                pages.append((self._content(request, g, idx), 0 if block is None else block.block_id))
        return num_tokens, pages

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
        groups, hashes, most = self._groups.groups, request.block_hashes, request.num_tokens - 1
        missing = [
            (g, idx)
            for g, group in enumerate(groups)
            for idx in range(most // group.block_size)
            if group.cached_block(hashes, idx) is None
        ]
        if not missing:
            return None, ()
        keys = [PageKey(hashes[(idx + 1) * groups[g].units - 1], g) for g, idx in missing]
        if self._chunks is not None:
            self._chunks.introduce(request, most)
        source = self.handovers.source(request)
        if source is not None and self._expect is not None:
            ends = [(idx + 1) * groups[g].block_size for g, idx in missing]
            self._expect([key for key, end in zip(keys, ends) if end <= source.num_tokens], source)
        states = dict(zip(missing, self._lookup(keys)))
        found = {place for place, state in states.items() if state is Lookup.HIT}
        end = self._reach(most, set(missing) - found)
        unknown = {place for place, state in states.items() if state is Lookup.PENDING}
        open_keys: tuple[PageKey, ...] = ()
        if unknown and self._reach(most, set(missing) - found - unknown) > max(end, hit.num_tokens):
            open_keys = tuple(key for place, key in zip(missing, keys) if place in unknown)
        if end <= hit.num_tokens:
            return None, open_keys
        needed = [
            (g, idx) for g, group in enumerate(groups) for idx in range(*read_range(group, end)) if (g, idx) in found
        ]
        pages = tuple(self._content(request, g, idx) for g, idx in needed)
        idxs = tuple(idx for _, idx in needed)
        page_ends = tuple((idx + 1) * groups[g].block_size for g, idx in needed)
        return Load(request, end - hit.num_tokens, pages, idxs, page_ends, time.monotonic()), open_keys

    def _reach(self, most: int, lost: set[tuple[int, int]]) -> int:
        """Tokens of the longest beginning that needs no lost block, of `most` at most."""
        end = self._groups.align(most)
        while True:
            wanted = end
            for g, group in enumerate(self._groups.groups):
                lacking = [idx for idx in range(*read_range(group, end)) if (g, idx) in lost]
                if lacking:  # with a window the run may begin behind a lost block, but not hold one
                    end = self._groups.align((lacking[0] if group.spec.num_read_blocks is None else lacking[-1])
                                             * group.block_size)  # fmt: skip
            if end == wanted:
                return end

    def events_of(self, changes: Sequence[Change]) -> list[KVCacheEvent]:
        """What routers are told: an event for every run of changes of one kind. Tokens and parents are told with the
        device's blocks of the same hashes."""
        events: list[KVCacheEvent] = []
        kind = lambda change: (change.medium, change.key.group, change.is_there)
        for (medium, g, is_there), run in groupby(changes, kind):
            if g >= len(self._groups):
                continue  # a file that somebody put there
            hashes, group = [change.key.block_hash for change in run], self._groups.groups[g]
            if not is_there:
                events.append(BlockRemoved(block_hashes=hashes, medium=medium, group_idx=g))
                continue
            events.append(
                BlockStored(
                    block_hashes=hashes, parent_block_hash=None, token_ids=[], block_size=group.block_size,
                    medium=medium, group_idx=g, kv_cache_spec_kind=group.spec.kind,
                    kv_cache_spec_sliding_window=getattr(group.spec, "window", None),
                )
            )  # fmt: skip
        return events

    def fetch_stages(self) -> list[int]:
        """Requests whose pages are asked for, are on their way, and have come while the requests wait on."""
        waits = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        self._has_come = {number: each for number, each in self._has_come.items() if each.status in waits}
        num_loading = sum(not load.request.is_finished for load in self.loading.values())
        return [len(self._asking) if self.is_asking else 0, num_loading, len(self._has_come)]

    def arrived(self, load: Load, came: Sequence[bool], sources: Sequence[str]) -> list[int] | None:
        """Give blocks to the pages that came, from tiers with these names: their ids, 0 for those that did not.

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
        if any(self._content(request, p.key.group, i) != p for p, i in zip(load.pages, load.block_idxs)):
            return None
        places = [(page.key.group, idx) for page, idx, ok in zip(load.pages, load.block_idxs, came) if ok]
        ids = self._enter(request, places)
        if ids is None:
            return None
        gained = self._manager.get_computed_blocks(request).num_tokens - before.num_tokens
        self.num_hits += gained
        self._has_come[request.arrival_order] = request
        if request.num_cached_tokens < 0:
            request.loaded = shared_out(gained, [source for source, ok in zip(sources, came) if ok])
        given = iter(ids)
        return [next(given) if ok else 0 for ok in came]

    def _enter(self, request: Request, places: Sequence[tuple[int, int]]) -> list[int] | None:
        """Ids of free blocks that are cached from now on as what (group, block index) of a request must hold. They stay
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
    for source, count in sorted(Counter(sources).items()):
        told += count
        ends[source] = num_tokens * told // len(sources)
    starts = [0, *ends.values()]
    return {source: end - start for (source, end), start in zip(ends.items(), starts) if end > start}


def read_range(group: CacheGroup, end: int) -> tuple[int, int]:
    """(first, end) of the blocks of a group that the token behind the first `end` sees."""
    num_blocks, num_read = end // group.block_size, group.spec.num_read_blocks
    return (0 if num_read is None else max(num_blocks - num_read, 0)), num_blocks
