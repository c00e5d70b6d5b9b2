"""Which blocks are saved to a connector and loaded from it, and what becomes of what was loaded.

Saving. A piece (`pieces.py`: a block, or several) is noted when its last block enters the prefix cache, with the number
of the step that computes it. It is copied off the device behind that step, and before the first step that writes to its
blocks again: steps and copies are links of one chain. Until then the piece waits (`saves.py`) for room.

Loading. A waiting request whose beginning the connector has for longer than the prefix cache is passed over until its
pages are in host memory. They are fetched only where the request would fit (`prefill.py`). Once they have come they get
blocks, which are written ahead of the next step, enter the prefix cache and are free again. The request finds them as
if another request had computed them. So nobody holds a block while bytes are fetched, and a request can end meanwhile
without anything to undo. A piece of which a page does not come is computed. For sliding-window layers only blocks
inside the window are loaded.

A step carries to the worker's side what is to be done (`build_connector_meta`), and its result says what has become of
loads and saves (`update_connector_output`). Between steps the engine core carries both.

This module knows neither bytes nor devices.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple

from jaxpaged.core.kv_cache.events import KVCacheEvent
from jaxpaged.core.kv_cache.manager import CacheHit, KVCacheManager
from jaxpaged.core.kv_transfer.chunks import Chunks
from jaxpaged.core.kv_transfer.page_events import PageEvents
from jaxpaged.core.kv_transfer.pieces import Matching, Missing, Pieces, Place, read_range
from jaxpaged.core.kv_transfer.rates import Rates
from jaxpaged.core.kv_transfer.saves import Gathers, Save, Saves
from jaxpaged.core.request import Request, RequestStatus
from jaxpaged.kv_connector.base import (
    FinishedFetch,
    KVCacheLayout,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorScheduler,
    KVFetch,
    KVSave,
    KVWrite,
    LookUp,
)
from jaxpaged.kv_store.page import PageContent, PageKey
from jaxpaged.kv_store.pieces import Piece
from jaxpaged.kv_store.prefix_file import PlacedPage
from jaxpaged.kv_store.tier import Lookup
from jaxpaged.kv_store.transfer_params import PARAMS
from jaxpaged.messages import EngineCoreOutput, SchedulerStats, StepRecord
from jaxpaged.sampling_params import RequestOutputKind


@dataclass(eq=False)
class Load:
    """Pages that are on their way for a request, which has `num_tokens` more of its beginning with them, up to `end`.
    `places` and `pieces`: where they belong, and the pages of each; `ends`: of each page in the request; `news`: when
    one came last; monotonic."""

    load_id: int
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
MOST_PIECES = 64
"""That are offered for copies at a time."""


class KVTransfers:
    """What travels between the KV cache of `manager` and a connector. With `fails` a request whose pages do not come
    ends with an error, instead of being computed."""

    def __init__(
        self, manager: KVCacheManager, connector: KVConnectorScheduler, layout: KVCacheLayout, *, fails: bool = False
    ):
        self.connector, self.patience = connector, PATIENCE
        self._manager, self._groups, self._fails = manager, manager.groups, fails
        self._pieces, self._chunks = Pieces(manager, layout.page_tokens), None
        self._matching = Matching(self._groups, self._pieces)
        if (tiers := connector.chunk_tiers) is not None and tiers.chunk_tokens is not None:
            self._chunks = Chunks(manager, self._pieces, tiers, tiers.chunk_tokens)
        self.events = PageEvents(self._groups.groups, self._pieces, manager.records_events)
        self.rates = Rates()
        self.saves, self.gathers = Saves(self._groups.groups), Gathers(connector, layout)
        self.lost: set[PageKey] = set()  # whose content is in doubt
        self.loading: dict[str, Load] = {}  # by the request that waits for it
        self._loads: dict[int, Load] = {}  # all that are under way, by number
        self._load_ids = count()
        self._begun: list[Load] = []
        self._before_step: list[KVSave | KVWrite] = []  # copies ahead of the next step
        self._given_up: list[PageKey] = []
        self._last_step_id = 0
        self._asked: dict[int, int] = {}  # a request's number -> how often it had been preempted when it was asked for
        self._asking: dict[int, Question] = {}  # by the request's number
        self._has_come: dict[int, Request] = {}  # whose pages are on the device, and who may still wait, by number
        self.num_queries = self.num_hits = 0  # tokens
        self._num_copied = [0, 0]  # blocks since `observe`: off the device, and to it
        manager.listen(self)

    # ---- requests come and go ------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """It was queued."""
        self.connector.on_new_request(RequestView(request, self))

    def refuse_request(self, extra_args: Mapping[str, Any] | None) -> None:
        """A request with these arguments was refused."""
        if params := (extra_args or {}).get(PARAMS):
            self.connector.expect_request(params, False)

    def begin_request(self, request: Request) -> None:
        """It has blocks, and its next step is being scheduled."""
        self.connector.update_state_after_alloc(RequestView(request, self), (), 0)

    def finish_request(self, request: Request) -> dict[str, Any] | None:
        """It has ended. Returns the `kv_transfer_params` of its last output, if it has any."""
        is_computed = request.finish_reason in ("stop", "length")
        return self.connector.request_finished(RequestView(request, self), is_computed)

    def say_early(self, outputs: list[EngineCoreOutput], requests: Mapping[str, Request]) -> list[EngineCoreOutput]:
        """Add to the outputs of a step what clients that read a stream are to hear before the end. `requests`: all that
        have not ended."""
        if not (told := self.connector.take_params()):
            return outputs
        by_id = {output.request_id: output for output in outputs}
        for request_id, params in told.items():
            request = requests.get(request_id)
            if request is None or request.sampling_params.output_kind is RequestOutputKind.FINAL_ONLY:
                continue
            output = by_id.get(request_id)
            if output is None:
                output = EngineCoreOutput(request_id, [], max(request.num_cached_tokens, 0), request.num_preemptions)
                outputs.append(output)
            output.kv_transfer_params = params
        return outputs

    def prompt_pieces(self, request: Request) -> tuple[int, list[Piece]]:
        """How many tokens of a prompt are whole pages, and the pieces that whoever goes on behind it needs, those too
        that no blocks hold yet. None where weights changed under way."""
        if not request.reads_prefix_cache or request.has_old_kv:
            return 0, []
        pieces, num_tokens = self._pieces, self._pieces.align(request.num_prompt_tokens)
        needed = (
            (g, number)
            for g, piece_size in enumerate(pieces.piece_sizes)  # the last token is always computed
            for number in range(pieces.first_needed(g, request.num_prompt_tokens - 1), num_tokens // piece_size.tokens)
            if self._groups.groups[g].wants_block((number + 1) * piece_size.tokens, request.num_prompt_tokens, -1)
        )
        return num_tokens, [pieces.piece(request, g, number) for g, number in needed]

    def save_prompt(self, request: Request) -> None:
        """Save the pieces of a prompt that are there, before all others. What is still computed is saved behind the
        step that computes it."""
        step_id = -1 if request.is_finished else self._last_step_id
        saves = [Save(step_id, piece) for piece in self.prompt_pieces(request)[1] if piece.block_ids]
        self.saves.add_first([save for save in saves if save.key not in self.saves])

    # ---- what is said to the worker's side, and what comes back ---------------------------------

    def build_connector_meta(
        self, confirmed: int, step_id: int | None = None, before: int | None = None
    ) -> KVConnectorMetadata | None:
        """What goes with step `step_id`, or, None, between steps. The steps before number `confirmed` are done. What
        steps before number `before` compute is saved, None: what all compute that are dispatched. Returns None where
        there is nothing to say, nor to hear."""
        discarded = self.take_lost()
        self._begin_urgent()
        saves: list[KVSave] = []
        while self.saves and self.gathers.has_room and (some := self.saves.take(before, MOST_PIECES)):
            begun, left = self.gathers.begin(some)
            saves += begun
            self.saves.add_first(left)
        self._num_copied[0] += sum(len(save.block_ids) for save in saves)
        metadata = KVConnectorMetadata(
            confirmed=confirmed,
            discarded=discarded,
            given_up=self._given_up,
            before_step=self._before_step,
            after_step=saves,
            fetches=[KVFetch(load.load_id, load.request.request_id, list(map(list, load.pieces)), list(load.ends))
                     for load in self._begun],
            connector=self.connector.build_connector_meta(),
        )  # fmt: skip
        self._given_up, self._before_step, self._begun = [], [], []
        if step_id is not None:
            self._last_step_id = step_id
        return metadata if self.gathers or self._loads or metadata != KVConnectorMetadata(confirmed) else None

    @property
    def outlives_engine(self) -> bool:
        """Whether pages are there when this engine has ended."""
        return self.connector.outlives_engine

    @property
    def is_outstanding(self) -> bool:
        """Whether something was begun of which the end is not known, or has not."""
        return bool(self.saves or self.gathers or self._loads or self._begun or self._before_step or self.lost)

    def _begin_urgent(self) -> None:
        """Copy ahead of the next step what is overwritten next, and give up what finds no room."""
        if urgent := self.saves.take_urgent():
            begun, left = self.gathers.begin(urgent)
            self._before_step += begun
            self._num_copied[0] += sum(len(save.block_ids) for save in begun)
            self.give_up(left)

    def give_up(self, saves: Sequence[Save]) -> None:
        """These will not be saved: their content is lost next."""
        keys = [page.key for save in saves for page in save.piece.pages]
        self._given_up += [key for key, is_lacking in zip(keys, self.gathers.lacks(saves)) if is_lacking]

    def update_connector_output(self, output: KVConnectorOutput) -> list[tuple[Request, str]]:
        """Loads and saves have ended. Returns requests that have failed for it, and why."""
        for save_id in output.finished_saves:
            self.gathers.end(save_id)
        for load_id in output.progressed:
            if load_id in self._loads:
                self._loads[load_id].news = time.monotonic()
        failed = [self._finish_load(self._loads.pop(each.load_id), each) for each in output.finished_fetches]
        return [each for each in failed if each is not None]

    def _finish_load(self, load: Load, fetch: FinishedFetch) -> tuple[Request, str] | None:
        """Give blocks to what came. A request that fails for what did not come, and why."""
        came = list(map(bool, fetch.sources))
        is_waiting = self.loading.get(load.request.request_id) is load and not load.request.is_finished
        failed = None
        if all(came):
            self.rates.observe_load(load.num_tokens, fetch.seconds, fetch.sources)
        elif self._fails and is_waiting:
            failed = load.request, f"{came.count(False)} of {len(came)} pages of its beginning were not loaded"
            del self.loading[load.request.request_id]
        block_ids = self.arrived(load, came, fetch.sources) if failed is None else None
        if block_ids is None:
            self._before_step.append(KVWrite(load.load_id, []))
        else:
            self._begin_urgent()
            self._before_step.append(KVWrite(load.load_id, block_ids))
            self._num_copied[1] += sum(block_id > 0 for ids in block_ids for block_id in ids)
        return failed

    def revoke(self) -> None:
        """A step has failed: what is not confirmed is not kept, and what was not written is not there."""
        self.saves.clear()
        for each in self._before_step:
            if isinstance(each, KVSave):
                self.gathers.end(each.save_id)
        self._before_step = [KVWrite(each.load_id, []) for each in self._before_step if isinstance(each, KVWrite)]

    def take_events(self) -> list[KVCacheEvent]:
        """What routers are told of pages that can be loaded, and of those that cannot any more."""
        return self.events.of(self.connector.take_events())

    def observe(self, record: StepRecord) -> None:
        """A step is done."""
        (record.pages_saved, record.pages_loaded), self._num_copied = self._num_copied, [0, 0]
        begin = record.schedule_end + record.program_wait  # a CPU may compute while it is dispatched
        self.rates.observe_step(record.num_tokens, record.num_sampled, begin, record.result_ready)

    def count_in(self, stats: SchedulerStats) -> None:
        """Say what was looked for, and who waits for it now."""
        stats.external_prefix_cache_queries, stats.external_prefix_cache_hits = self.num_queries, self.num_hits
        stats.num_kv_fetches = self.fetch_stages()

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
    def num_groups(self) -> int:
        """Of the KV cache."""
        return len(self._groups)

    @property
    def has_snapshots(self) -> bool:
        """Whether some layers have recurrent states."""
        return self._groups.have_snapshots

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

    # ---- loading -------------------------------------------------------------------------------

    def is_loading(self, request: Request, hit: CacheHit, may_begin: bool) -> bool:
        """Whether a waiting request waits for pages, or to hear whether they are there. Once it may begin to, they are
        sent for, where that pays, once since it began to wait."""
        load, number = self.loading.get(request.request_id), request.arrival_order
        if load is not None and load.request is request:
            if time.monotonic() < load.news + self.patience:
                return True
            del self.loading[request.request_id]
            self.connector.load_finished(RequestView(request, self))
        if not may_begin:
            self._asking.pop(number, None)  # it waits for something else, which is not to use up its patience
            return False
        if not request.reads_prefix_cache or self._asked.get(number) == request.num_preemptions:
            return False
        asked, now = self._asking.get(number), time.monotonic()
        has_patience = asked is None or now < asked.begin + self.patience
        if asked is not None and has_patience and asked.num_hit == hit.num_tokens and self._is_open(asked):
            return True
        load, open_keys = self._find(request, hit)
        if open_keys is not None and has_patience:
            self._asking[number] = Question(request, hit.num_tokens, open_keys, now if asked is None else asked.begin)
            return True
        self._asking.pop(number, None)
        if len(self._asked) > MOST_REMEMBERED:
            self._asked.clear()  # who still waits may be asked for once more
        self._asked[number] = request.num_preemptions
        self.num_queries += request.num_tokens - hit.num_tokens
        view = RequestView(request, self)
        if load is None or not self._pays(load, view):
            self.connector.load_finished(view)
            return False
        self.events.note(request, load.pages)
        self.connector.update_state_after_alloc(view, load.pages, load.num_tokens)
        self.loading[request.request_id] = self._loads[load.load_id] = load
        self._begun.append(load)
        return True

    def pass_over(self, requests: Iterable[Request]) -> None:
        """Requests wait behind one for which there is no room: what they asked a store for is asked anew once there is,
        since waiting for something else is not to use up their patience."""
        if self._asking:
            for request in requests:
                self._asking.pop(request.arrival_order, None)

    def _pays(self, load: Load, view: "RequestView") -> bool:
        """Whether to load rather than to compute."""
        if self.connector.must_load(view):
            return True
        return self.rates.pays(self.connector.where([page.key for page in load.pages]))

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

    def _is_open(self, question: Question) -> bool:
        """Whether nothing of it is answered. Much cheaper than to find out anew what could be loaded."""
        keys = question.keys
        return bool(keys) and all(state is Lookup.PENDING for state in self.connector.look_up(keys))

    def _find(self, request: Request, hit: CacheHit) -> tuple[Load | None, tuple[PageKey, ...] | None]:
        """What can be loaded beyond a hit, if anything; and, where it may be more once a store has answered, the keys
        that this is asked for, as far as they are known."""
        pieces, missing = self._pieces, self._matching.missing(request, hit)
        if not missing.keys:
            return None, None
        if self._chunks is not None:
            self._chunks.introduce(request, request.num_findable_tokens)
        ends = [zip(keys, pieces.ends(*place)) for place, keys in missing.keys.items()]
        view = RequestView(request, self, missing)
        self.connector.before_look_up(view, [each for pairs in ends for each in pairs])
        num_new = self.connector.get_num_new_matched_tokens(view, hit.num_tokens)
        end = (
            missing.end
            if num_new is None
            else self._groups.align(min(hit.num_tokens + num_new, request.num_findable_tokens))
        )
        open_keys = missing.open_keys if num_new is None else None
        if end <= hit.num_tokens:
            return None, open_keys
        reads = [range(*read_range(group, end)) for group in self._groups.groups]
        needed = tuple(place for place in missing.keys if any(i in reads[place[0]] for i in missing.blocks[place]))
        pages = tuple(pieces.pages(request, *place) for place in needed)
        page_ends = tuple(each for place in needed for each in pieces.ends(*place))
        now = time.monotonic()
        num_tokens = end - hit.num_tokens
        return Load(next(self._load_ids), request, num_tokens, end, needed, pages, page_ends, now), open_keys

    def num_matched_tokens(self, request: Request, missing: Missing | None, look_up: LookUp) -> int | None:
        """See `KVRequest`."""
        if missing is None:
            missing = self._matching.missing(request, self._manager.get_computed_blocks(request))
        return self._matching.match(missing, look_up)

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
        self.connector.load_finished(RequestView(request, self))
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


class RequestView:
    """What a connector sees of a request: see `KVRequest`."""

    def __init__(self, request: Request, transfers: KVTransfers, missing: Missing | None = None):
        self._request, self._transfers, self._missing = request, transfers, missing

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def token_ids(self) -> Sequence[int]:
        return self._request.all_token_ids

    @property
    def num_prompt_tokens(self) -> int:
        return self._request.num_prompt_tokens

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        return (self._request.sampling_params.extra_args or {}).get(PARAMS)

    def num_matched_tokens(self, look_up: LookUp) -> int | None:
        return self._transfers.num_matched_tokens(self._request, self._missing, look_up)

    def prompt_pieces(self) -> tuple[int, Sequence[Piece]]:
        return self._transfers.prompt_pieces(self._request)

    def save_prompt(self) -> None:
        self._transfers.save_prompt(self._request)


def shared_out(num_tokens: int, sources: Sequence[str]) -> dict[str, int]:
    """Tokens by where their pages came from: each page counts alike, and what is left over counts for the last."""
    ends, told = {}, 0
    for source, num_pages in sorted(Counter(sources).items()):
        told += num_pages
        ends[source] = num_tokens * told // len(sources)
    starts = [0, *ends.values()]
    return {source: end - start for (source, end), start in zip(ends.items(), starts) if end > start}
