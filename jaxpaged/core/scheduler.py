"""Requests from their arrival to their end: which tokens the next step computes, and what its output means.

The scheduler has one or more attention ranks, and each of them decides its part of a step (`rank.py`). A request
belongs to one rank from its arrival to its end: one that has little to do, or has cached the beginning of the prompt
(`balancer.py`). Scheduling is asynchronous: steps may be in flight while the next one is scheduled.

This module knows no model, no device and no text.
"""

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any

import msgspec

from jaxpaged.config import SchedulerConfig, settled
from jaxpaged.core.balancer import Balancer, Load
from jaxpaged.core.grammar.matcher import Grammars
from jaxpaged.core.kv_cache.block_map import map_blocks
from jaxpaged.core.kv_cache.events import KVCacheEvent
from jaxpaged.core.kv_cache.manager import KVCacheManager
from jaxpaged.core.lora.book import AdapterBook
from jaxpaged.core.output import collect_prompt_logprobs, count_back, fault_of, take_tokens
from jaxpaged.core.rank import MultiStep, Rank
from jaxpaged.core.request import Request, check_request
from jaxpaged.core.routed_experts import RoutedExperts
from jaxpaged.core.speculative import DraftLengths
from jaxpaged.core.structured_output import StructuredOutputManager
from jaxpaged.errors import ConfigError, EngineError, RequestError
from jaxpaged.kv_cache_spec import EncoderCacheConfig, KVCacheConfig
from jaxpaged.kv_connector.base import KVConnection, KVConnectorMetadata, KVConnectorOutput
from jaxpaged.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    KVBlockMap,
    LoRAInfo,
    ModelRunnerOutput,
    SchedulerOutput,
    SchedulerStats,
    WeightStats,
)
from jaxpaged.sampling_params.features import Extra


class Scheduler:
    """All requests of an engine. One that could not run even alone is refused, so the oldest always finishes."""

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
        num_ranks: int = 1,
        connection: KVConnection | None = None,
        load_failure_policy: str = "recompute",
        encoder_cache_config: EncoderCacheConfig | None = None,
        adapters: AdapterBook | None = None,
        tells_experts: bool = False,
    ):
        """`scheduler_config` is resolved; it and `kv_cache_config` are those of each rank. `can_run`: see `Executor`.
        `num_drafts`: of a request and step, at most. `num_stages`: steps that a pipeline computes at a time.
        `connection`: to what keeps keys and values besides the device, of one rank only; `load_failure_policy`:
        "recompute", or "fail" requests whose pages do not come. `encoder_cache_config` None: no pictures. `adapters`
        None: requests have none. `tells_experts`: outputs say which experts tokens went to. Raises ConfigError when
        options contradict."""
        check_options(scheduler_config, num_ranks, sees=encoder_cache_config is not None)
        self._max_model_len = max_model_len
        self._max_num_batched_tokens = settled(scheduler_config.max_num_batched_tokens)
        self._max_prompt_step = None if scheduler_config.enable_chunked_prefill else self._max_num_batched_tokens
        self._stats = SchedulerStats()  # counted since the engine started
        self.adapters = adapters
        self.ranks = [
            Rank(
                scheduler_config,
                kv_cache_config,
                self._stats,
                enable_prefix_caching=enable_prefix_caching,
                enable_kv_cache_events=enable_kv_cache_events,
                num_stages=num_stages,
                connection=connection,
                load_failure_policy=load_failure_policy,
                encoder_cache_config=encoder_cache_config,
                slots=None if adapters is None else adapters.slots,
            )
            for _ in range(num_ranks)
        ]
        assert connection is None or num_ranks == 1, "attention ranks keep nothing besides the device"
        self.transfers = self.ranks[0].transfers  # None: nothing is kept besides the device
        block_size = self.ranks[0].kv_cache_manager.groups.unit if enable_prefix_caching else 0
        self._balancer = Balancer(num_ranks, block_size) if num_ranks > 1 else None
        self.requests: dict[str, Request] = {}  # all that are unfinished
        self.structured_output_manager = StructuredOutputManager(grammars, can_run)
        self.draft_lengths = DraftLengths(num_drafts, self._stats, token_buckets) if num_drafts else None
        # Steps in flight, oldest first, by their ids. Requests are kept as objects, since an id may be used again.
        self._in_flight: dict[int, tuple[dict[str, Request], SchedulerOutput]] = {}
        self._routed = RoutedExperts(kv_cache_config, num_ranks, enable_prefix_caching) if tells_experts else None
        self._num_arrivals = 0
        self._weights_label: str | None = None

    # ---- intake and questions ------------------------------------------------------------------

    def add_request(self, message: EngineCoreRequest) -> None:
        """Queue a request. Raises RequestError when its id is in use or when it could never be served."""
        try:
            self.check(message)
        except RequestError:
            if self.transfers is not None:
                self.transfers.refuse_request(message.sampling_params.extra_args)
            raise
        manager = self.ranks[0].kv_cache_manager  # all ranks are alike
        request = Request(message, self._max_model_len, self._num_arrivals, manager.num_groups)
        request.rank = 0 if self._balancer is None else self._choose_rank(self._balancer, message)
        if self._weights_label is not None:
            request.note_weights(self._weights_label)
        if self.adapters is not None and request.lora is not None:
            self.adapters.bind(request)
        if not self.structured_output_manager.add(request):
            self.ranks[request.rank].waiting.add(request)
        self._num_arrivals += 1
        self.requests[request.request_id] = request
        if self.transfers is not None:
            self.transfers.add_request(request)

    def check(self, message: EngineCoreRequest) -> None:
        """Raise RequestError for a request that `add_request` would refuse."""
        name = message.request_id
        if name in self.requests:
            raise RequestError(f"request id {name!r} is in use by an unfinished request. Choose another.", "request_id")
        shortage = self.ranks[0].kv_cache_manager.shortage  # all ranks are alike
        check_request(message, self._max_model_len, self._max_prompt_step, shortage)
        self.structured_output_manager.check(message)
        if message.mm_features:
            self._check_pictures(message)
        if message.lora is not None:
            self._check_adapter(message.lora, name)

    def _check_adapter(self, lora: LoRAInfo, request_id: str) -> None:
        if self.adapters is None:
            what = f"request {request_id!r} has the LoRA adapter {lora.lora_name!r}, but this engine takes none."
            raise RequestError(f"{what} Set enable_lora.", "lora_request")
        self.adapters.check(request_id, lora)

    def _check_pictures(self, message: EngineCoreRequest) -> None:
        pictures = self.ranks[0].pictures
        if pictures is None:
            what = f"request {message.request_id!r} has {len(message.mm_features)} pictures, but this engine sees none."
            raise RequestError(what, "multi_modal_data")
        pictures.check(message, self._max_num_batched_tokens)

    def is_encoded(self, key: bytes) -> bool:
        """Whether the encoder cache has the embeddings of this picture."""
        return self.ranks[0].pictures is not None and self.ranks[0].pictures.cache.size_of(key) is not None

    def _choose_rank(self, balancer: Balancer, message: EngineCoreRequest) -> int:
        num_waiting = [len(rank.waiting) for rank in self.ranks]
        for request in self.structured_output_manager.waiting:
            num_waiting[request.rank] += 1
        loads = [Load(len(rank.running), n) for rank, n in zip(self.ranks, num_waiting)]
        return balancer.choose(message.prompt_token_ids, message.cache_salt, loads)

    def admit_prepared(self) -> list[EngineCoreOutput]:
        """Queue requests whose grammars and programs are compiled. Returns the last outputs of those that failed."""
        ready, failed = self.structured_output_manager.take_ready()
        for request in ready:
            self.ranks[request.rank].waiting.add(request)
        return [self._fail(request, str(error), error.parameter) for request, error in failed]

    def admit_read(self) -> list[EngineCoreOutput]:
        """Let the requests wait for slots whose adapters were read. Returns the last outputs of those that fail."""
        assert self.adapters is not None
        outputs = [self._fail(request, reason, "lora_request") for request, reason in self.adapters.settle()]
        self.adapters.read_next()
        return outputs

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def get_num_unfinished_requests(self) -> int:
        return len(self.requests)

    @property
    def running(self) -> list[Request]:
        """The requests that run, in order of admission, rank by rank."""
        return [request for rank in self.ranks for request in rank.running]

    @property
    def waiting(self) -> list[Request]:
        """The requests in the queues, the next one first, rank by rank."""
        return [request for rank in self.ranks for request in rank.waiting]

    @property
    def kv_cache_manager(self) -> KVCacheManager:
        """The KV cache of the only rank."""
        (rank,) = self.ranks
        return rank.kv_cache_manager

    # ---- schedule ------------------------------------------------------------------------------

    def schedule(self, max_steps: int = 1, max_tokens: int | None = None) -> SchedulerOutput:
        """What is computed next: one step, or a multi-step decode of at most `max_steps` steps.

        Every rank decides its part, `max_tokens` and the token budget are those of each. A step without tokens need
        not be executed; what the runner must know waits for the next one.
        """
        if self.adapters is not None:
            self.adapters.slots.assign(lambda: self.running)
        found = self._find_multi_step(max_steps) if max_steps > 1 else None
        if found is not None:
            parts = [rank.schedule_multi_step(own) for rank, own in zip(self.ranks, found, strict=True)]
        else:
            most_drafts = 0 if self.draft_lengths is None else self.draft_lengths.most_in_step
            parts = [rank.schedule(max_tokens, most_drafts) for rank in self.ranks]
        scheduled = parts[0] if len(parts) == 1 else joined(parts)
        self._stats.num_scheduled_tokens = scheduled.total_num_scheduled_tokens
        if scheduled.request_ids:
            requests = self.ranks[0].last_requests
            for rank in self.ranks[1:]:
                requests = requests | rank.last_requests
            self._in_flight[scheduled.step_id] = requests, scheduled
            if self.adapters is not None and scheduled.new_requests:
                scheduled.lora_loads = self.adapters.slots.take_loads(
                    requests[each.request_id].adapter for each in scheduled.new_requests if each.lora_slot
                )
            if self.structured_output_manager.bound:
                scheduled.masked = self.structured_output_manager.need_masks(requests, scheduled)
            if self.draft_lengths is not None:
                self.draft_lengths.note(scheduled.step_id)
                for new in scheduled.new_requests:
                    self.draft_lengths.begin(requests[new.request_id])
            if self.transfers is not None:
                confirmed, step_id = self._num_confirmed, scheduled.step_id
                scheduled.kv_connector_metadata = self.transfers.build_connector_meta(confirmed, step_id)
        return scheduled

    def _find_multi_step(self, max_steps: int) -> list[MultiStep] | None:
        """The parts of all ranks in a multi-step decode; a rank without requests takes part with nothing. None where a
        request of any rank is in the way."""
        found = []
        for rank in self.ranks:
            own = rank.find_multi_step(max_steps)
            if own is None:
                return None
            found.append(own)
        return found

    # ---- what comes back -----------------------------------------------------------------------

    def update_from_output(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Hand out the tokens of a step, and end the requests that are complete.

        Results of requests that ended meanwhile are dropped. Raises EngineError when the output does not belong
        to the oldest step in flight.
        """
        requests = self._take_step(scheduled, output)
        if requests is None:
            return []
        count_back(requests, scheduled, output)
        for rank in self.ranks:
            rank.kv_cache_manager.confirm(scheduled.step_id)
        if output.corrupted:  # those that ended before are counted already
            self._stats.num_corrupted_reqs += sum(not requests[each].is_finished for each in output.corrupted)
        if output.prompt_logprobs:
            collect_prompt_logprobs(output, requests)
        if self.draft_lengths is not None:
            self.draft_lengths.observe(requests, scheduled, output)
        results, ended = take_tokens(requests, output)
        if self._routed is not None and output.routed_experts is not None:
            self._routed.take(requests, scheduled, output, results)
        for request, result in ended:
            if result.error is not None:
                self._fail(request, result.error)
            else:
                assert result.finish_reason is not None
                result.kv_transfer_params = self._finish(request, result.finish_reason)
        for request_id, reason in output.failed.items():
            if not requests[request_id].is_finished:
                results.append(self._fail(requests[request_id], *fault_of(requests[request_id], reason)))
        if self.transfers is not None:
            results += self.update_connector_output(output.kv_connector_output or KVConnectorOutput())
            results = self.transfers.say_early(results, self.requests)
        return results

    def _take_step(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> dict[str, Request] | None:
        """The requests of a step whose output is here; None when the step was empty, or revoked.

        Raises EngineError when the output belongs to another step, or when requests still wait for an older one: a
        step without output must have been reported as failed, request by request.
        """
        if output.step_id != scheduled.step_id:
            raise EngineError(
                f"the output of step {output.step_id} came for step {scheduled.step_id}. The executor must return "
                "outputs in the order of the steps."
            )
        while self._in_flight and (oldest := next(iter(self._in_flight))) < scheduled.step_id:
            requests, _ = self._in_flight.pop(oldest)
            if alive := [request.request_id for request in requests.values() if not request.is_finished]:
                raise EngineError(
                    f"no output came for step {oldest}, in which {alive[:5]} took part. The executor must return "
                    "outputs in the order of the steps, or report the step as failed."
                )
        step = self._in_flight.pop(scheduled.step_id, None)
        return None if step is None else step[0]

    def _finish(self, request: Request, reason: FinishReason) -> dict[str, Any] | None:
        """End a request, whatever it is doing. Its results in flight will be dropped. Returns the `kv_transfer_params`
        of its last output, if it has any."""
        del self.requests[request.request_id]
        rank = self.ranks[request.rank]
        if not self.structured_output_manager.forget(request):
            rank.remove(request)
        request.finish(reason)
        if self.adapters is not None and request.adapter is not None:
            self.adapters.end(request.adapter)
        return self.transfers.finish_request(request) if self.transfers is not None else None

    # ---- keys and values besides the device ----------------------------------------------------

    @property
    def _num_confirmed(self) -> int:
        """The steps before this number are done."""
        return next(iter(self._in_flight), self.ranks[0].last_step_id + 1)

    def build_connector_meta(self, *, only_confirmed: bool = False) -> KVConnectorMetadata | None:
        """What is said to the connector's worker side between steps; None: nothing. `only_confirmed`: what steps in
        flight compute is not saved yet."""
        assert self.transfers is not None
        done = self._num_confirmed
        return self.transfers.build_connector_meta(done, before=done if only_confirmed else None)

    def update_connector_output(self, output: KVConnectorOutput) -> list[EngineCoreOutput]:
        """What the connector's worker side has to say. Returns the last outputs of requests that fail for it."""
        assert self.transfers is not None
        return [self._fail(*each) for each in self.transfers.update_connector_output(output)]

    def take_events(self, rank: int) -> list[KVCacheEvent]:
        """What has entered and left the prefix cache of a rank, and what can be loaded, since the last call."""
        events = self.ranks[rank].kv_cache_manager.take_events()
        return events if self.transfers is None else events + self.transfers.take_events()

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
        for rank in self.ranks:
            rank.kv_cache_manager.revoke(first_step_id)
            if rank.pictures is not None:
                rank.pictures.cache.revoke(first_step_id)
        revoked: dict[Request, None] = {}
        for step_id in [each for each in self._in_flight if each >= first_step_id]:
            requests, scheduled = self._in_flight.pop(step_id)
            revoked.update(dict.fromkeys(requests.values()))
            for rank, part in zip(self.ranks, scheduled.parts, strict=True):
                rank.removed_request_ids += part.removed_request_ids  # the runner may not have got that far
        return list(revoked)

    def forget_steps(self) -> None:
        """No output will come for any step in flight, and no request runs: one that waits for a token samples it
        again."""
        for request in self._revoke_steps(0):
            request.num_tokens_with_placeholders = request.num_tokens
        self.lose_slots()
        if self.transfers is not None:
            self.transfers.revoke()

    def _fail(self, request: Request, reason: str, parameter: str | None = None) -> EngineCoreOutput:
        rank = self.ranks[request.rank]
        rank.kv_cache_manager.uncache_request(request)
        if rank.pictures is not None:
            rank.pictures.forget(request)
        request.num_computed_tokens = 0  # so that nothing of it is cached when it is released
        self._finish(request, "error")
        output = request.to_last_output()
        output.error, output.error_parameter = reason, parameter
        return output

    # ---- cache and statistics ------------------------------------------------------------------

    def preempt_all(self) -> None:
        """Take the blocks of all requests, with no step in flight. They go on later in the same order."""
        for rank in self.ranks:
            rank.preempt_all()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content. False, and nothing changed, while any request holds blocks."""
        if any(pool.num_held_blocks for rank in self.ranks for pool in rank.kv_cache_manager.pools):
            return False
        self.lose_content()
        return True

    def lose_content(self) -> None:
        """Forget all cached content. No request holds blocks, and no step is in flight."""
        for rank in self.ranks:
            rank.lose_content()
        self._forget_beginnings()

    def lose_slots(self) -> None:
        """The devices have no adapters in their slots any more. No request runs."""
        if self.adapters is not None:
            self.adapters.slots.lose()

    def change_weights(self, version: str, label: str | None) -> None:
        """Other weights compute from now on: cached content is lost, and never found again. No step is in flight.
        Requests that hold blocks go on over the old keys and values in them, but for those that have pictures to read
        yet. `label`: what clients know the weights by, None for those that the engine loaded."""
        self._weights_label = label
        num_before = 0 if self._stats.weights is None else self._stats.weights.num_updates
        self._stats.weights = WeightStats(label or "", num_before + (label is not None))
        for rank in self.ranks:
            rank.preempt_seeing()
        if not self.running:
            self.lose_slots()
        if self.transfers is not None:
            self.transfers.saves.clear()  # their blocks may have other content by the time that there is room
        for rank in self.ranks:
            rank.lose_content()
            rank.kv_cache_manager.change_root(version, self.requests.values())
        for request in self.requests.values():
            request.note_weights(label)
            if any(feature.embeds is not None for feature in request.mm_features):
                request.mm_features = [msgspec.structs.replace(each, embeds=None) for each in request.mm_features]
        self._forget_beginnings()

    def _forget_beginnings(self) -> None:
        """No rank has cached the beginning of any prompt."""
        if self._balancer is not None:
            for number in range(len(self.ranks)):
                self._balancer.forget(number)

    def block_map(self, most: int | None = None) -> KVBlockMap:
        """Which request holds which block now: the blocks of one rank after those of another. `most`: see
        `map_blocks`."""
        return map_blocks([(rank.kv_cache_manager, rank.running) for rank in self.ranks], most, self.ranks[0].pictures)

    def make_stats(self, step: SchedulerOutput | None = None) -> SchedulerStats:
        """Queues and caches of all ranks as they are now; id and tokens are those of `step`, or of the last step."""
        ranks = self.ranks
        stats = copy(self._stats)
        stats.step_id = ranks[0].last_step_id
        for rank in ranks:
            stats.num_running_reqs += len(rank.running)
            stats.num_waiting_reqs += len(rank.waiting)
            stats.kv_cache_usage += rank.kv_cache_manager.usage / len(ranks)
            if rank.pictures is not None:
                stats.mm_cache_usage = rank.pictures.cache.usage
        stats.num_waiting_reqs += len(self.structured_output_manager.waiting)
        if step is not None:
            stats.step_id, stats.num_steps = step.step_id, step.num_steps
            stats.num_scheduled_tokens = step.total_num_scheduled_tokens
        if self.transfers is not None:
            self.transfers.count_in(stats)
        if self.adapters is not None:
            stats.lora = self.adapters.stats()
        return stats

    def check_integrity(self) -> None:
        """Assert that every block, every request and every placeholder is accounted for."""
        for number, rank in enumerate(self.ranks):
            own = {request for request in self.requests.values() if request.rank == number}
            preparing = own.intersection(self.structured_output_manager.waiting)
            assert own == preparing.union(rank.running, rank.waiting)
            assert all(not any(request.blocks) and not request.num_computed_tokens for request in preparing)
            rank.check_integrity()
        if self.adapters is not None:
            self.adapters.check_integrity(self.requests.values())
            self.adapters.slots.check_integrity(self.running)


def check_options(scheduler_config: SchedulerConfig, num_ranks: int, *, sees: bool) -> None:
    """Raise ConfigError for options that contradict each other."""
    if scheduler_config.long_prefill_token_threshold and not scheduler_config.enable_chunked_prefill:
        raise ConfigError(
            f"long_prefill_token_threshold is {scheduler_config.long_prefill_token_threshold}, but chunked "
            "prefill is off, so no prompt can be cut. Set it to 0, or leave chunked prefill on."
        )
    if sees and num_ranks > 1:
        raise ConfigError(
            f"attention has {num_ranks} data-parallel ranks, which see no pictures. Give language_model_only."
        )


def joined(parts: list[SchedulerOutput]) -> SchedulerOutput:
    """The step whose parts the ranks compute."""
    step_id = parts[0].step_id
    assert all(part.step_id == step_id for part in parts), "ranks are at different steps"
    together = lambda name: [value for part in parts for value in getattr(part, name)]
    return SchedulerOutput(
        step_id,
        together("new_requests"),
        together("removed_request_ids"),
        together("request_ids"),
        together("num_scheduled_tokens"),
        together("num_computed_tokens"),
        together("max_sampled_tokens"),
        together("new_block_ids"),
        sum(part.total_num_scheduled_tokens for part in parts),
        num_steps=max(part.num_steps for part in parts),
        ranks=parts,
    )
