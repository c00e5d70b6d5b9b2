"""Which requests compute how many tokens in the next step, and what becomes of the tokens that come back.

There is no prefill phase and no decode phase: a request has tokens and computed tokens, a step moves the second
number towards the first. Scheduling is asynchronous by nature: `schedule` may be called while steps are in flight.
A request that samples gets a placeholder for the unknown token and may be scheduled again at once to compute it.
Why blocks need almost no fence for that is told in `kv_cache/manager.py`.

This module knows no model, no device and no text.
"""

from collections.abc import Callable, Iterable, Sequence

from jaxpaged.config import SchedulerConfig, settled
from jaxpaged.core.constrained import ConstrainedRequests
from jaxpaged.core.counters import Counters
from jaxpaged.core.drafts import DraftLengths
from jaxpaged.core.grammar.matcher import Grammars
from jaxpaged.core.intake import check_request
from jaxpaged.core.integrity import check_books
from jaxpaged.core.kv_cache.manager import KVCacheManager
from jaxpaged.core.logprob_lines import collect_prompt_logprobs
from jaxpaged.core.new_tokens import Run, fault_of, is_long, num_drafts_in_step, run_of, step_of_run, take_tokens
from jaxpaged.core.preparation import Preparation
from jaxpaged.core.prompt_grants import PromptGrants
from jaxpaged.core.request import Request, RequestStatus
from jaxpaged.core.request_queue import priority_order
from jaxpaged.core.short_requests import waiting_queue
from jaxpaged.core.steps import Grant, NewStep, StepsInFlight
from jaxpaged.core.turns import Turns
from jaxpaged.errors import ConfigError
from jaxpaged.kv_cache_spec import KVCacheConfig
from jaxpaged.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    ModelRunnerOutput,
    SchedulerOutput,
    SchedulerStats,
)
from jaxpaged.sampling_params.features import Extra


class Scheduler:
    """One token budget for all requests; KV blocks from shared pools; preemption by recomputing.

    A request is refused at intake when it could not run even alone, so the oldest request always finishes.
    """

    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        kv_cache_config: KVCacheConfig,
        *,
        max_model_len: int,
        enable_prefix_caching: bool,
        enable_kv_cache_events: bool = False,
        grammars: Grammars | None = None,
        can_run: Callable[[Extra], bool] = lambda extra: True,
        num_drafts: int = 0,
        token_buckets: Sequence[int] = (),
        num_stages: int = 1,
    ):
        """`scheduler_config` is resolved. `can_run`: see `Executor`. `num_drafts`: of a request and step, at most.
        `num_stages`: steps that are computed at a time, see `turns.py`. Raises ConfigError when options contradict."""
        if scheduler_config.long_prefill_token_threshold and not scheduler_config.enable_chunked_prefill:
            raise ConfigError(
                f"long_prefill_token_threshold is {scheduler_config.long_prefill_token_threshold}, but chunked "
                "prefill is off, so no prompt can be cut. Set it to 0, or leave chunked prefill on."
            )
        self._max_num_batched_tokens = settled(scheduler_config.max_num_batched_tokens)
        self._max_num_seqs = settled(scheduler_config.max_num_seqs)
        self._chunked_prefill = scheduler_config.enable_chunked_prefill
        self._by_priority = scheduler_config.scheduling_policy == "priority"
        self._max_model_len = max_model_len
        self.kv_cache_manager = KVCacheManager(
            kv_cache_config,
            max_num_batched_tokens=self._max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            enable_kv_cache_events=enable_kv_cache_events,
        )
        self._prompt_grants = PromptGrants(scheduler_config, self.kv_cache_manager)
        self.requests: dict[str, Request] = {}  # all that are unfinished
        self.running: list[Request] = []  # in order of admission
        self.waiting = waiting_queue(scheduler_config)
        self.constrained = ConstrainedRequests(grammars)
        self.preparation = Preparation(self.constrained, can_run)
        self._steps = StepsInFlight()
        self._removed_request_ids: list[str] = []  # that the runner has not heard of
        self._last_step_id = 0
        self._num_arrivals = 0
        self._num_scheduled_tokens = 0  # of the last step
        self._counters = Counters()
        self.draft_lengths = DraftLengths(num_drafts, self._counters, token_buckets)
        self._turns = Turns(num_stages)

    # ---- intake and questions ------------------------------------------------------------------

    def add_request(self, message: EngineCoreRequest) -> None:
        """Queue a request. Raises RequestError when its id is in use or when it could never be served."""
        check_request(
            message,
            live_request_ids=self.requests.keys(),
            max_model_len=self._max_model_len,
            max_prompt_step=None if self._chunked_prefill else self._max_num_batched_tokens,
            manager=self.kv_cache_manager,
        )
        self.constrained.check(message)
        request = Request(message, self._max_model_len, self._num_arrivals, self.kv_cache_manager.num_groups)
        if not self.preparation.add(request):
            self.waiting.add(request)
        self._num_arrivals += 1
        self.requests[request.request_id] = request
        self.kv_cache_manager.note(request, has_ended=False)

    def admit_prepared(self) -> list[EngineCoreOutput]:
        """Queue requests for which all is compiled that they need. Returns the last outputs of failed ones."""
        ready, failed = self.preparation.take_ready()
        for request in ready:
            self.waiting.add(request)
        return [self._fail(request, str(error), error.parameter) for request, error in failed]

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def get_num_unfinished_requests(self) -> int:
        return len(self.requests)

    # ---- schedule ------------------------------------------------------------------------------

    def schedule(self, max_steps: int = 1, max_tokens: int = 1 << 30) -> SchedulerOutput:
        """What is computed next: a run of at most `max_steps` decode steps (`new_tokens.py`), or a step."""
        return self.schedule_run(run) if is_long(run := self.find_run(max_steps)) else self.schedule_step(max_tokens)

    def find_run(self, max_steps: int) -> Run | None:
        """What a run of at most `max_steps` would be, or that there is none, as when somebody waits."""
        return None if self.waiting or max_steps == 1 else run_of(self.running, max_steps, self.kv_cache_manager)

    def schedule_run(self, run: Run) -> SchedulerOutput:
        """The run that `find_run` has just found, even if it has no step."""
        return self._commit(step_of_run(run, self._max_num_batched_tokens, self.kv_cache_manager, self._last_step_id))

    def schedule_step(self, max_tokens: int = 1 << 30) -> SchedulerOutput:
        """Decide how many tokens every request computes in the next step.

        Requests that decode go first, then prompts, as `prompt_grants.py` says. When blocks run out the youngest is
        preempted and recomputed later, or under the priority policy the least important. Waiting requests are admitted
        when nothing was preempted, each only if all of its tokens would get blocks. A step without tokens need not be
        executed; what the runner must know waits for the next one. Prompts that may be cut get `max_tokens` at most.
        """
        most = max(max_tokens, len(self.running)) if self._chunked_prefill else self._max_num_batched_tokens
        num_pools, most_drafts = len(self.kv_cache_manager.pools), self.draft_lengths.most_in_step
        step = NewStep(min(most, self._max_num_batched_tokens), len(self.running), num_pools, most_drafts)
        lacking = self._schedule_decodes(step)
        if step.budget and (lacking or self.waiting):
            self._schedule_prompts(lacking, step)
        return self._commit(step)

    def _schedule_decodes(self, step: NewStep) -> list[Request]:
        """Running requests that lack nothing but their newest token; returns the others. Both may be preempted."""
        lacking = []
        budget, append = step.budget, step.requests.append
        for request in self._turns.of_step(self.running):
            computed, num_known = request.num_computed_tokens, request.num_tokens_with_placeholders
            if num_known > computed + 1:
                lacking.append(request)
            elif not budget:
                continue
            elif computed < request.decode_limit:
                append(request)
                budget -= 1
            elif request.status is RequestStatus.RUNNING:  # not preempted just now
                step.budget = budget
                self._schedule_decode(request, step)
                budget = step.budget
        step.budget = budget
        return lacking

    def _schedule_decode(self, request: Request, step: NewStep) -> None:
        """A request that needs a slot, or may draft, or is about to end."""
        if request.num_tokens_with_placeholders >= request.max_total_tokens:
            return  # its last token is being sampled
        self.kv_cache_manager.cache_blocks(request, self._last_step_id)
        num_drafts = num_drafts_in_step(request, step, self.kv_cache_manager) if request.num_drafts else 0
        self._schedule_running(request, 1 + num_drafts, 1 + num_drafts, step)

    def _schedule_running(self, request: Request, num_tokens: int, max_sampled_tokens: int, step: NewStep) -> None:
        """Give a running request a grant, and slots for it, unless it has to be preempted."""
        new_block_ids = self._allocate_or_preempt(request, num_tokens, step)
        if new_block_ids is not None:
            step.add(request, Grant(num_tokens, max_sampled_tokens, new_block_ids if any(new_block_ids) else None))
            self._set_decode_limit(request)

    def _schedule_prompts(self, lacking: list[Request], step: NewStep) -> None:
        """Divide what decoding leaves among those of the running requests that do not, and those that wait."""
        manager, running = self.kv_cache_manager, RequestStatus.RUNNING
        lacking = [request for request in lacking if request.status is running]
        num_rows = 0 if step.preempted else self._max_num_seqs - len(self.running)
        granted = self._prompt_grants.of_step(
            lacking, self.waiting, num_rows, step.budget, alone=len(self.requests) == 1
        )
        for (request, num_lacking, *_), num_tokens in granted:
            if num_tokens and request.status is running:
                manager.cache_blocks(request, self._last_step_id)
                self._schedule_running(request, num_tokens, int(num_tokens == num_lacking), step)
            if num_tokens < num_lacking and request.status is running:
                manager.reserve_rest(request, step.num_reserved_blocks)
        for (request, *_), num_tokens in granted:
            waits = request.status is not running
            if step.preempted or (waits and num_tokens and not self._admit(request, num_tokens, step)):
                break

    def _set_decode_limit(self, request: Request) -> None:
        limit = 0 if request.num_drafts else self.kv_cache_manager.num_slots(request)
        request.decode_limit = min(limit, request.max_total_tokens - 1)

    def _allocate_or_preempt(self, request: Request, num_tokens: int, step: NewStep) -> tuple[list[int], ...] | None:
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
        """Take a running request's blocks and put it back in the queue. Tokens in flight for it stay valid."""
        self.running.remove(request)
        self._release(request)
        request.num_computed_tokens = 0
        request.decode_limit = 0
        request.num_preemptions += 1
        self._counters.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        self.waiting.add_preempted(request)

    def preempt_all(self) -> None:
        """Take everybody's blocks; with no step in flight. Whoever ran goes on in the same order."""
        for request in self.running[::-1]:
            self._preempt(request)

    def _release(self, request: Request) -> None:
        """Free what a running request holds, here and on the runner, keeping its content in the prefix cache."""
        self.kv_cache_manager.cache_blocks(request, self._last_step_id)
        self.kv_cache_manager.free(request)
        self._removed_request_ids.append(request.request_id)

    def _admit(self, request: Request, num_tokens: int, step: NewStep) -> bool:
        """Move a waiting request into the step. False, and nothing changed, when others took what it was to get."""
        manager = self.kv_cache_manager
        hit = manager.get_computed_blocks(request)
        lacking = request.num_tokens - hit.num_tokens
        num_tokens = min(num_tokens, lacking)
        is_cut = num_tokens < lacking and not self._chunked_prefill
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
        self._set_decode_limit(request)
        self._counters.count_hit(request, hit.num_tokens)
        self.draft_lengths.begin(request)
        step.add(request, Grant(num_tokens, int(num_tokens == lacking), None))
        step.new_requests.append(request.to_new_request_data())
        if num_tokens < lacking:
            manager.reserve_rest(request, step.num_reserved_blocks)
        return True

    def _commit(self, step: NewStep) -> SchedulerOutput:
        """Turn the step into a message, and advance the requests as if the step were done."""
        self._last_step_id += 1
        requests, num_requests = step.requests, len(step.requests)
        num_tokens, max_sampled_tokens = [1] * num_requests, [1] * num_requests
        new_block_ids: list[tuple[list[int], ...] | None] = [None] * num_requests
        for i, grant in step.grants.items():
            num_tokens[i], max_sampled_tokens[i], new_block_ids[i] = grant
        num_computed = [request.num_computed_tokens for request in requests]
        for request, n, most in zip(requests, num_tokens, max_sampled_tokens):
            request.num_computed_tokens += n
            request.num_tokens_with_placeholders += most
        for i, grant in step.grants.items():
            if grant.num_tokens > 1:  # a single token fills a block that its next step, needing another, enters
                self.kv_cache_manager.cache_blocks(requests[i], self._last_step_id)
        removed: list[str] = []
        if requests:  # a step without tokens may never reach the runner
            removed, self._removed_request_ids = self._removed_request_ids, []
        self._num_scheduled_tokens = step.most - step.budget
        scheduled = SchedulerOutput(
            self._last_step_id,
            step.new_requests,
            removed,
            self._steps.ids_of(requests),
            num_tokens,
            num_computed,
            max_sampled_tokens,
            new_block_ids,
            self._num_scheduled_tokens,
            step.num_steps,
            self.constrained.need_masks(requests, max_sampled_tokens),
        )
        if requests:
            self._steps.add(scheduled)
            self.draft_lengths.note(self._last_step_id)
        return scheduled

    # ---- what comes back -----------------------------------------------------------------------

    def update_from_output(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Hand out the tokens of a step, and end the requests that are complete.

        Results of requests that ended meanwhile are dropped. Raises EngineError when the output does not belong
        to the oldest step in flight.
        """
        step = self._steps.take(scheduled, output)
        if step is None:
            return []
        self.kv_cache_manager.confirm(scheduled.step_id)
        self._counters.count_corrupted(step.requests[request_id] for request_id in output.corrupted)
        collect_prompt_logprobs(output, step.requests)
        self.draft_lengths.observe(step.requests, scheduled, output)
        results, ended = take_tokens(step.requests, output)
        for request, result in ended:
            if result.error is not None:
                self._fail(request, result.error)
            else:
                assert result.finish_reason is not None
                self._finish(request, result.finish_reason)
        failed = [(step.requests[request_id], reason) for request_id, reason in output.failed.items()]
        return results + [self._fail(each, *fault_of(each, reason)) for each, reason in failed if not each.is_finished]

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """End a request, whatever it is doing. Its results in flight will be dropped."""
        del self.requests[request.request_id]
        was_prepared = self.preparation.forget(request)
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._release(request)
        elif not was_prepared:
            self.waiting.remove(request)
        request.finish(reason)
        self.kv_cache_manager.note(request, has_ended=True)

    # ---- abort and failure ---------------------------------------------------------------------

    def abort_requests(self, request_ids: Iterable[str]) -> list[EngineCoreOutput]:
        """End requests at their client's wish. Unknown ids, and those that ended already, are passed over."""
        outputs = []
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                self._finish(request, "abort")
                outputs.append(request.to_last_output())
        return outputs

    def fail_requests(self, failed: Iterable[str] | SchedulerOutput, reason: str) -> list[EngineCoreOutput]:
        """End requests by id, or those of a failed step and of all steps after it, which compute with what it left.

        Nothing that the requests hold, or that the steps were to write, stays in the prefix cache.
        """
        if isinstance(failed, SchedulerOutput):
            requests = self._revoke_steps(failed.step_id)
        else:
            requests = [self.requests[request_id] for request_id in failed if request_id in self.requests]
        return [self._fail(request, reason) for request in requests if not request.is_finished]

    def _revoke_steps(self, first_step_id: int) -> list[Request]:
        """Forget the steps from `first_step_id` on; returns their requests."""
        self.kv_cache_manager.revoke(first_step_id)
        requests: dict[Request, None] = {}
        for step in self._steps.revoke(first_step_id):
            requests.update(dict.fromkeys(step.requests.values()))
            self._removed_request_ids += step.scheduled.removed_request_ids  # the runner may not have got that far
        return list(requests)

    def forget_steps(self) -> None:
        """No output will come for any step in flight, and nobody runs: who waits for a token of one draws it again."""
        for request in self._revoke_steps(0):
            request.num_tokens_with_placeholders = request.num_tokens

    def _fail(self, request: Request, reason: str, parameter: str | None = None) -> EngineCoreOutput:
        self.kv_cache_manager.uncache_request(request)
        request.num_computed_tokens = 0  # so that nothing of it is cached when it is released
        self._finish(request, "error")
        output = request.to_last_output()
        output.error, output.error_parameter = reason, parameter
        return output

    # ---- cache and statistics ------------------------------------------------------------------

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content. False, and nothing changed, while any request holds blocks."""
        return self.kv_cache_manager.reset_prefix_cache()

    def make_stats(self, step: SchedulerOutput | None = None) -> SchedulerStats:
        """Queues and cache as they are now; id and tokens are those of `step`, or of the last step."""
        return SchedulerStats(
            step_id=self._last_step_id if step is None else step.step_id,
            num_running_reqs=len(self.running),
            num_waiting_reqs=len(self.waiting) + len(self.preparation.requests),
            kv_cache_usage=self.kv_cache_manager.usage,
            num_scheduled_tokens=self._num_scheduled_tokens if step is None else step.total_num_scheduled_tokens,
            num_steps=1 if step is None else step.num_steps,
            **vars(self._counters),
        )

    def check_integrity(self) -> None:
        """Assert that every block, every request and every placeholder is accounted for."""
        assert len(self.running) <= self._max_num_seqs
        waiting = [*self.waiting, *self.preparation.requests]
        check_books(self.requests.values(), self.running, waiting, self.kv_cache_manager)
