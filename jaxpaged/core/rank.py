"""One attention rank's part of each step: which of its requests compute how many tokens.

Most engines have one rank, which has all requests. With data-parallel attention each rank has requests, KV blocks and a
token budget of its own, and the parts of all ranks are computed together (`scheduler.py`).

There is no prefill phase and no decode phase. A request knows a number of tokens and has computed some of them; a step
moves the second number towards the first. `schedule` may be called while steps are in flight: a request that samples
gets a placeholder for its unknown token, and may be scheduled again at once to compute it. `kv_cache/manager.py` tells
why blocks need almost no fence for that.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jaxpaged.config import SchedulerConfig, settled
from jaxpaged.core.kv_cache.manager import KVCacheManager
from jaxpaged.core.kv_transfer.transfers import KVTransfers
from jaxpaged.core.lora.slots import AdapterSlots
from jaxpaged.core.pictures import Pictures
from jaxpaged.core.prefill import PrefillScheduler
from jaxpaged.core.request import Request, RequestStatus
from jaxpaged.core.request_queue import AGES, RequestQueue, priority_order, waiting_queue
from jaxpaged.kv_cache_spec import EncoderCacheConfig, KVCacheConfig
from jaxpaged.kv_connector.base import KVConnection
from jaxpaged.messages import NewRequestData, SchedulerOutput, SchedulerStats

MultiStep = list[tuple[Request, int]]
"""The requests of a multi-step decode, and how many tokens each of them may get."""


class ScheduledTokens(NamedTuple):
    """A request's part of a step, where it is more than one decoded token in a slot that the request has."""

    num_tokens: int
    max_sampled_tokens: int
    new_block_ids: tuple[list[int], ...] | None


class StepBuilder:
    """The `SchedulerOutput` that is being built. `scheduled` is by a request's index in `requests`; requests without
    an entry decode one token."""

    def __init__(self, max_tokens: int, num_running: int = 0, num_pools: int = 1, most_drafts: int = 0):
        self.max_tokens = max_tokens
        self.most_drafts = min(max_tokens - num_running, most_drafts)  # the own token of every request comes first
        self.requests: list[Request] = []
        self.scheduled: dict[int, ScheduledTokens] = {}
        self.num_more = 0  # tokens besides the first one of each request
        self.new_requests: list[NewRequestData] = []
        self.num_reserved_blocks = [0] * num_pools  # that running requests need to finish their prompts
        self.preempted = False

    @property
    def budget(self) -> int:
        """Tokens that are left."""
        return self.max_tokens - len(self.requests) - self.num_more

    def add(self, request: Request, scheduled: ScheduledTokens) -> None:
        self.scheduled[len(self.requests)] = scheduled
        self.requests.append(request)
        self.num_more += scheduled.num_tokens - 1

    def discard(self, request: Request) -> None:
        """Take a request out if it is in, and its tokens back."""
        if request in self.requests:
            index = self.requests.index(request)
            del self.requests[index]
            if removed := self.scheduled.pop(index, None):
                self.num_more -= removed.num_tokens - 1
            self.scheduled = {each - (each > index): scheduled for each, scheduled in self.scheduled.items()}


class Rank:
    """One token budget for all requests; KV blocks from shared pools; preemption by recomputing."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache_config: KVCacheConfig,
        stats: SchedulerStats,
        *,
        enable_prefix_caching: bool,
        enable_kv_cache_events: bool = False,
        num_stages: int = 1,
        connection: KVConnection | None = None,
        load_failure_policy: str = "recompute",
        encoder_cache_config: EncoderCacheConfig | None = None,
        slots: AdapterSlots | None = None,
    ):
        """`config` is resolved. `stats` counts preemptions and hits of caches. `num_stages`: of the pipeline.
        `connection`, `load_failure_policy`, `encoder_cache_config`: see `Scheduler`. `slots`: those of all ranks; None:
        requests have no adapters."""
        self._max_num_batched_tokens = settled(config.max_num_batched_tokens)
        self._max_num_seqs = settled(config.max_num_seqs)
        self._chunked_prefill = config.enable_chunked_prefill
        self._by_priority = config.scheduling_policy == "priority"
        self._stats = stats
        self.kv_cache_manager = KVCacheManager(
            kv_cache_config,
            max_num_batched_tokens=self._max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            enable_kv_cache_events=enable_kv_cache_events,
        )
        self.transfers: KVTransfers | None = None  # None: nothing is kept besides the device
        if connection is not None:
            fails = load_failure_policy == "fail"
            self.transfers = KVTransfers(self.kv_cache_manager, *connection, fails=fails)
        self._prefill = PrefillScheduler(config, self.kv_cache_manager, self.transfers)
        self._microbatches = PipelineMicrobatches(num_stages) if num_stages > 1 else None
        self.pictures: Pictures | None = None  # None: requests have none
        if encoder_cache_config is not None:
            assert num_stages == 1, "the stages of a pipeline see no pictures"
            self.pictures = Pictures(
                encoder_cache_config, stats, AGES[config.scheduling_policy], is_cut=config.enable_chunked_prefill
            )
        self.running: list[Request] = []  # in order of admission
        self._slots = slots
        self.waiting: RequestQueue = (
            waiting_queue(config) if slots is None else slots.queue(waiting_queue(config, by_age=True))
        )
        self.last_step_id = 0
        self.last_requests: dict[str, Request] = {}  # of the last step
        self._last_request_list: list[Request] = []
        self._last_request_ids: list[str] = []
        self.removed_request_ids: list[str] = []  # that the runner has not heard of

    # ---- a step --------------------------------------------------------------------------------

    def schedule(self, max_tokens: int | None = None, most_drafts: int = 0) -> SchedulerOutput:
        """Decide how many tokens every request computes in the next step.

        Requests that decode go first, then prompts, as `prefill.py` says. When blocks run out the youngest request is
        preempted and recomputed later, or under the priority policy the least important one. Waiting requests are
        admitted when nothing was preempted, each only if all of its tokens would get blocks. Prompts that may be cut
        get `max_tokens` at most; None: only the budget of a step limits them.
        """
        most = self._max_num_batched_tokens
        if max_tokens is not None and self._chunked_prefill:
            most = min(most, max(max_tokens, len(self.running)))
        if self.pictures is not None:
            return self._schedule_with_pictures(self.pictures, most, most_drafts)
        step = StepBuilder(most, len(self.running), len(self.kv_cache_manager.pools), most_drafts)
        turns = tuple(self.running) if self._microbatches is None else self._microbatches.next(self.running)
        prompts = self._schedule_decodes(turns, step)
        if (prompts or self.waiting) and step.budget:
            self._schedule_prompts(prompts, step)
        return self._commit(step)

    def _schedule_with_pictures(self, pictures: Pictures, most: int, most_drafts: int) -> SchedulerOutput:
        """The same where prompts may have pictures."""
        pictures.begin_step()
        next_waiting = next(iter(self.waiting), None) if len(self.running) < self._max_num_seqs else None
        turns, most = pictures.make_room(self.running, next_waiting, most, self._max_num_batched_tokens)
        num_kept = len(self.running) + pictures.longest
        step = StepBuilder(most, num_kept, len(self.kv_cache_manager.pools), most_drafts)
        prompts = self._schedule_decodes(turns, step)
        if (prompts or self.waiting) and step.budget:
            self._schedule_prompts(prompts, step)
        scheduled = self._commit(step)
        pictures.commit(scheduled, step.requests)
        return scheduled

    def _schedule_decodes(self, turns: Sequence[Request], step: StepBuilder) -> list[Request]:
        """Schedule those of some running requests that lack only their newest token; returns the others.

        All of them fit the budget, which is no smaller than the number of running requests. Both may be preempted.
        """
        prompts, append = [], step.requests.append
        for request in turns:
            num_computed, num_known = request.num_computed_tokens, request.num_tokens_with_placeholders
            if num_known > num_computed + 1:
                prompts.append(request)
            elif num_computed < request.decode_limit:
                append(request)
            elif request.status is RequestStatus.RUNNING:  # not preempted just now
                self._schedule_decode(request, step)
        return prompts

    def _schedule_decode(self, request: Request, step: StepBuilder) -> None:
        """A request that needs a slot, or may draft, or is about to end."""
        if request.num_tokens_with_placeholders >= request.max_total_tokens:
            return  # its last token is being sampled
        self.kv_cache_manager.cache_blocks(request, self.last_step_id)
        num_tokens = 1 + (self._num_drafts(request, step) if request.num_drafts else 0)
        self._schedule_running(request, num_tokens, num_tokens, step)

    def _num_drafts(self, request: Request, step: StepBuilder) -> int:
        """How many drafts of a decoding request go into a step: only as many as there is spare room for."""
        num_left = request.max_total_tokens - request.num_tokens_with_placeholders
        num_drafts = min(request.num_drafts, num_left - 1, step.most_drafts)
        if num_drafts <= 0 or not self.kv_cache_manager.can_allocate([(request, 1 + num_drafts)]):
            return 0
        step.most_drafts -= num_drafts
        return num_drafts

    def _schedule_running(self, request: Request, num_tokens: int, max_sampled_tokens: int, step: StepBuilder) -> None:
        """Schedule tokens of a running request, with slots for them, unless it has to be preempted."""
        new_block_ids = self._allocate_or_preempt(request, num_tokens, step)
        if new_block_ids is not None:
            block_ids = new_block_ids if any(new_block_ids) else None
            step.add(request, ScheduledTokens(num_tokens, max_sampled_tokens, block_ids))
            self._set_decode_limit(request)

    def _schedule_prompts(self, prompts: list[Request], step: StepBuilder) -> None:
        """Divide the rest of the budget among the prompts of running and of waiting requests."""
        manager, running = self.kv_cache_manager, RequestStatus.RUNNING
        prompts = [request for request in prompts if request.status is running]
        num_rows = 0 if step.preempted else self._max_num_seqs - len(self.running)
        is_alone = len(self.running) + len(self.waiting) == 1
        divided = self._prefill.divide(prompts, self.waiting, num_rows, step.budget, is_alone=is_alone)
        if self.pictures is not None:
            divided = self.pictures.fit(divided, step.budget)
        for (request, num_lacking, *_), num_tokens in divided:
            if num_tokens and request.status is running:
                manager.cache_blocks(request, self.last_step_id)
                self._schedule_running(request, num_tokens, int(num_tokens == num_lacking), step)
            if num_tokens < num_lacking and request.status is running:
                manager.reserve_rest(request, step.num_reserved_blocks)
        for (request, *_), num_tokens in divided:
            waits = request.status is not running
            if step.preempted or (waits and num_tokens and not self._admit(request, num_tokens, step)):
                break

    def _admit(self, request: Request, num_tokens: int, step: StepBuilder) -> bool:
        """Move a waiting request into the step. False, and nothing changed, when others took its blocks."""
        manager = self.kv_cache_manager
        hit = manager.get_computed_blocks(request)
        num_lacking = request.num_tokens - hit.num_tokens
        num_tokens = min(num_tokens, num_lacking)
        if self.pictures is not None and request.mm_features:  # the hit may be another one than a moment ago
            num_tokens = self.pictures.window(request, hit.num_tokens, num_tokens)
            if not num_tokens:
                return False
        is_cut = num_tokens < num_lacking and not self._chunked_prefill
        if is_cut or not manager.fits_whole(request, hit, step.num_reserved_blocks):
            return False
        manager.adopt_hit(request, hit)
        if manager.allocate_slots(request, num_tokens) is None:
            manager.free(request)
            request.num_computed_tokens = 0
            return False
        self.waiting.remove(request)
        self.running.append(request)
        request.status = RequestStatus.RUNNING
        if self._slots is not None and request.adapter is not None:
            self._slots.begin_row(request.adapter)
        self._set_decode_limit(request)
        self._note_admission(request, hit.num_tokens)
        step.add(request, ScheduledTokens(num_tokens, int(num_tokens == num_lacking), None))
        step.new_requests.append(request.to_new_request_data())
        if num_tokens < num_lacking:
            manager.reserve_rest(request, step.num_reserved_blocks)
        if self.transfers is not None:
            self.transfers.begin_request(request)
        return True

    def _note_admission(self, request: Request, num_cached_tokens: int) -> None:
        """Count a prefix cache hit. A request that comes back after preemption is not counted again."""
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_cached_tokens
            request.note_admission()
            if request.reads_prefix_cache:
                self._stats.prefix_cache_queries += request.num_tokens
                self._stats.prefix_cache_hits += num_cached_tokens

    def _set_decode_limit(self, request: Request) -> None:
        limit = 0 if request.num_drafts else self.kv_cache_manager.num_slots(request)
        request.decode_limit = min(limit, request.max_total_tokens - 1)

    # ---- a multi-step decode -------------------------------------------------------------------

    def find_multi_step(self, max_steps: int) -> MultiStep | None:
        """How many tokens each request may get in a multi-step decode of at most `max_steps` steps.

        None when this rank must compute a single step: a request waits or computes its prompt, drafts tokens, needs a
        mask, which comes from the host, or blocks are too few.
        """
        if self.waiting:
            return None
        found: MultiStep = []
        for request in self.running:
            num_known = request.num_tokens_with_placeholders
            num_left = request.max_total_tokens - num_known
            if num_left <= 0:
                continue  # its last token is being sampled
            if request.num_drafts:
                return None  # its drafts are worth more
            matcher = request.matcher
            num_free = num_left if matcher is None else matcher.num_free(request.num_output_placeholders)
            if num_known != request.num_computed_tokens + 1 or not num_free:
                return None
            found.append((request, min(max_steps, num_left, num_free)))
        return found if not found or self.kv_cache_manager.can_allocate(found) else None

    def schedule_multi_step(self, found: MultiStep) -> SchedulerOutput:
        """The multi-step decode that `find_multi_step` has just found possible; requests may have one token, or none
        may take part."""
        step = StepBuilder(self._max_num_batched_tokens)
        for request, num_tokens in found:
            self.kv_cache_manager.cache_blocks(request, self.last_step_id)
            block_ids = self.kv_cache_manager.allocate_slots(request, num_tokens)
            assert block_ids is not None, "can_allocate has said that there are blocks"
            step.add(request, ScheduledTokens(num_tokens, num_tokens, block_ids if any(block_ids) else None))
        scheduled = self._commit(step)
        scheduled.num_steps = max(scheduled.num_scheduled_tokens, default=1)
        return scheduled

    def _commit(self, step: StepBuilder) -> SchedulerOutput:
        """Turn the step into a message, and advance the requests as if the step were done."""
        self.last_step_id += 1
        requests, num_requests = step.requests, len(step.requests)
        num_tokens, max_sampled_tokens = [1] * num_requests, [1] * num_requests
        new_block_ids: list[tuple[list[int], ...] | None] = [None] * num_requests
        for i, scheduled in step.scheduled.items():
            num_tokens[i], max_sampled_tokens[i], new_block_ids[i] = scheduled
        num_computed = [request.num_computed_tokens for request in requests]
        for request, n, most in zip(requests, num_tokens, max_sampled_tokens):
            request.num_computed_tokens += n
            request.num_tokens_with_placeholders += most
        for i, scheduled in step.scheduled.items():
            if scheduled.num_tokens > 1:  # a single token fills a block that its next step, needing another, enters
                self.kv_cache_manager.cache_blocks(requests[i], self.last_step_id)
        removed: list[str] = []
        if requests:  # a step without tokens may never reach the runner
            removed, self.removed_request_ids = self.removed_request_ids, []
        if requests != self._last_request_list:  # while all decode they are those of the step before
            self.last_requests = {request.request_id: request for request in requests}
            self._last_request_list, self._last_request_ids = requests, list(self.last_requests)
        return SchedulerOutput(
            self.last_step_id,
            step.new_requests,
            removed,
            self._last_request_ids,
            num_tokens,
            num_computed,
            max_sampled_tokens,
            new_block_ids,
            num_requests + step.num_more,
        )

    # ---- preemption and the end of requests ----------------------------------------------------

    def _allocate_or_preempt(
        self, request: Request, num_tokens: int, step: StepBuilder
    ) -> tuple[list[int], ...] | None:
        """Slots for a running request, taken from less important ones if need be. None: it was preempted itself."""
        while (block_ids := self.kv_cache_manager.allocate_slots(request, num_tokens)) is None:
            victim = max(self.running, key=priority_order) if self._by_priority else self.running[-1]
            step.discard(victim)
            step.preempted = True
            self._preempt(victim)
            if victim is request:
                return None
        return block_ids

    def _preempt(self, request: Request) -> None:
        """Take a running request's blocks and put it back in the queue. Its tokens in flight stay valid."""
        self.running.remove(request)
        self._release(request)
        request.num_computed_tokens = 0
        request.decode_limit = 0
        request.has_old_kv = False
        request.num_preemptions += 1
        self._stats.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        self.waiting.add_preempted(request)

    def preempt_all(self) -> None:
        """Take the blocks of all requests, with no step in flight. They go on later in the same order."""
        for request in self.running[::-1]:
            self._preempt(request)

    def preempt_seeing(self) -> None:
        """The same of those that have not read all embeddings of their pictures."""
        for request in self.running[::-1]:
            if self.pictures is not None and self.pictures.are_held_by(request):
                self._preempt(request)

    def remove(self, request: Request) -> None:
        """A request that runs or waits has ended. Its results in flight will be dropped."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._release(request)
        else:
            self.waiting.remove(request)

    def _release(self, request: Request) -> None:
        """Free a running request's blocks and its row on the runner. Their content stays in the prefix cache."""
        self.kv_cache_manager.cache_blocks(request, self.last_step_id)
        self.kv_cache_manager.free(request)
        self.removed_request_ids.append(request.request_id)
        if self._slots is not None and request.adapter is not None:
            self._slots.end_row(request.adapter)
        if self.pictures is not None:
            self.pictures.release(request)

    def lose_content(self) -> None:
        """Forget all cached content. No request holds any, and no step is in flight."""
        self.kv_cache_manager.lose_content()
        if self.pictures is not None:
            self.pictures.cache.lose_content()

    def check_integrity(self) -> None:
        """Assert that every block and every placeholder is accounted for."""
        run, wait = set(self.running), set(self.waiting)
        assert len(run) == len(self.running) <= self._max_num_seqs
        assert not run & wait
        assert all(r.status is RequestStatus.RUNNING for r in run)
        assert all(r.status is not RequestStatus.RUNNING for r in wait)
        assert all(not any(r.blocks) and r.num_computed_tokens == r.decode_limit == 0 for r in wait)
        assert all(r.num_tokens_with_placeholders <= r.max_total_tokens for r in run | wait)
        assert all(r.num_computed_tokens <= self.kv_cache_manager.num_slots(r) for r in run)
        self.kv_cache_manager.check_integrity(run)
        if self.pictures is not None:
            self.pictures.check_integrity(run)


class PipelineMicrobatches:
    """Chooses which requests decode in a step, where the stages of a pipeline compute several steps at the same time.

    A request's next step needs the token of its last one, so two steps overlap only if no request is in both. With n
    stages a step has one n-th of the decoding requests, those that have waited longest; n steps later their tokens are
    there. This is only about time: a request that is in two steps in a row waits on the device, and gets the same
    tokens.
    """

    def __init__(self, num_stages: int):
        self._num_stages = num_stages
        self._num_steps = 0
        self._last_steps: dict[str, int] = {}

    def next(self, running: Sequence[Request]) -> tuple[Request, ...]:
        """The requests of `running`, in its order, that may be in the next step: all that compute a prompt, and those
        decoding ones whose turn it is. Where all decode and no token would be there, some wait on the device."""
        self._num_steps += 1
        admitted = self._num_steps - 1  # the last step of a request that is not known yet
        last = {each.request_id: self._last_steps.get(each.request_id, admitted) for each in running}
        decoding = [each for each in running if is_decoding(each)]
        share = -(-len(decoding) // self._num_stages)
        ready = [each for each in decoding if self._num_steps - last[each.request_id] >= self._num_stages]
        if not ready and not any(each.is_computing_prompt for each in running):
            ready = decoding
        ready.sort(key=lambda each: last[each.request_id])
        waiting = set(decoding).difference(ready[:share])
        self._last_steps = last | {each.request_id: self._num_steps for each in running if each not in waiting}
        return tuple(each for each in running if each not in waiting)


def is_decoding(request: Request) -> bool:
    """Whether a request lacks one token only, and is not about to end with it."""
    num_known = request.num_tokens_with_placeholders
    return num_known <= request.num_computed_tokens + 1 and num_known < request.max_total_tokens
