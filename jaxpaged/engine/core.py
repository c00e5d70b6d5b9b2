"""The engine core: admit, schedule, execute, update. Token ids in, token ids out.

With asynchronous scheduling a step is scheduled and dispatched before the one ahead of it is awaited, so the device
never waits for the host. This module knows neither text nor devices.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import numpy as np

from jaxpaged.config import EngineConfig
from jaxpaged.core.grammar.matcher import Grammars
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.engine.adapter_desk import AdapterDesk, given, open_desk
from jaxpaged.engine.core_calls import CoreCall, EngineCoreClient
from jaxpaged.engine.embeds_desk import EmbedsDesk
from jaxpaged.engine.in_flight import InFlight, StepPacer
from jaxpaged.engine.kv_connector import NO_FILES, save_all, save_prefix, seconds_to_wait
from jaxpaged.engine.merged_outputs import merged, without
from jaxpaged.engine.observability.snapshot import take_snapshot
from jaxpaged.engine.observability.step_log import StepLog
from jaxpaged.engine.processed_items import PixelDesk
from jaxpaged.engine.sleep import PARTS, TAGS, SleepRecord, check_sleep, check_tags
from jaxpaged.engine.weight_updates import WeightUpdates
from jaxpaged.errors import EngineDeadError, ProgramError, RequestError, UsageError
from jaxpaged.executor.base import Executor, KVTransferWorker
from jaxpaged.interrupts import accepted_interrupts, holding_interrupts
from jaxpaged.kv_connector.base import KVConnection
from jaxpaged.kv_store.prefix_file import PrefixInfo
from jaxpaged.kv_store.transfer_params import PARAMS, source_of, transfer_params
from jaxpaged.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineSnapshot,
    KVBlockMap,
    LoRAInfo,
    SchedulerOutput,
    SchedulerStats,
    StepRecord,
)
from jaxpaged.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxpaged.engine.observability.kv_event_publisher import KVEventPublisher

logger = logging.getLogger(__name__)
COMPILE_WAIT = 0.05
"""Seconds that a step sleeps at most with nothing to do but to wait for a grammar or a program."""


class Books:
    """Around what must not fail: after an error in such a block the books are wrong, so the engine stops. Then every
    such block raises EngineDeadError."""

    def __init__(self) -> None:
        self.death: BaseException | None = None  # why the engine has stopped

    def __enter__(self) -> None:
        if self.death is not None:
            self.refuse()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            self.death = error
            if isinstance(error, Exception):
                raise EngineDeadError(f"the engine broke down and stops: {error!r}. Start a new one.") from error

    def refuse(self) -> NoReturn:
        """Raise EngineDeadError: the engine has stopped."""
        raise EngineDeadError(f"the engine has stopped: {self.death!r}. Start a new one.") from self.death


class EngineCore(EngineCoreClient):
    """One scheduler, or one of each attention rank, and one executor. `config` is resolved.

    A step that fails ends the requests that were running; the engine goes on. When the scheduler's own invariants
    break, or the device does not recover, this and every further call raises EngineDeadError.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        grammars: Grammars | None = None,
        publishers: "Sequence[KVEventPublisher]" = (),
        kv_transfer: KVTransferWorker | None = None,
        embeds: EmbedsDesk | None = None,
    ):
        """`grammars` None: requests with structured outputs are refused. `publishers`: hear what a rank's cache holds.
        `kv_transfer`: carries keys and values to what keeps them elsewhere. `embeds`: finds those of other engines."""
        self.executor, self._grammars, self._publishers = executor, grammars, publishers
        self._adapters = open_desk(config, executor.workers)  # None: requests have no adapters
        self._scheduler = Scheduler(
            config.scheduler,
            executor.kv_cache_config,
            max_model_len=config.max_model_len,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            enable_kv_cache_events=bool(publishers),
            grammars=grammars,
            can_run=executor.can_run,
            num_drafts=config.speculative.num_drafts,
            token_buckets=executor.token_buckets if config.speculative.num_drafts else (),
            num_stages=config.parallel.pipeline_parallel_size,
            num_ranks=config.parallel.num_ranks,
            connection=None if kv_transfer is None else KVConnection(kv_transfer.connector, kv_transfer.layout),
            load_failure_policy=config.cache.load_failure_policy,
            encoder_cache_config=executor.encoder_cache_config,
            adapters=None if self._adapters is None else self._adapters.book,
            tells_experts=config.model.enable_return_routed_experts,
        )
        self._kv_transfer, self.transfers = kv_transfer, self._scheduler.transfers  # None: nothing besides the device
        # One step is computed on each stage, and one waits for a device.
        depth = config.parallel.pipeline_parallel_size + 1 if config.scheduler.async_scheduling else 1
        self._in_flight = InFlight(depth)
        self._pacer = StepPacer(config.scheduler.num_scheduler_steps, depth)
        self._outputs: list[EngineCoreOutput] = []  # what `step` has not returned yet
        self._books, self._weights_version = Books(), executor.weights_version
        self._sleep, self._is_shut_down = SleepRecord(), False
        self.weights = WeightUpdates(executor, self._await_all, self.note_weight_update, self._sleep.lose_weights)
        self.pixels = PixelDesk(embeds)
        self._most_kept = config.multimodal.core_cache_bytes(config.parallel.num_cores)
        self.embeds, self._encodes_only = embeds, config.multimodal.mm_encoder_only
        self.step_log = StepLog()

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request, or, where it has pictures without pixels that are not kept here, let it wait for them.

        Raises RequestError when it can never fit the KV cache, and while its id is in use: until `step` has returned
        the last that another one of this id said, or that one was aborted.
        """
        is_known = any(output.request_id == request.request_id for output in self._outputs)
        is_known = is_known or request.request_id in self.pixels.waiting
        if is_known or (self.embeds is not None and request.request_id in self.embeds.waiting):
            what = f"request id {request.request_id!r} is in use: its results were not taken. Choose another."
            raise RequestError(what, "request_id")
        if self._encodes_only:  # it ends where a token would be drawn
            request.sampling_params = SamplingParams(max_tokens=1, seed=0, ignore_eos=True, detokenize=False)
        refusal = None
        with self._books:
            try:
                if request.mm_features:
                    self._scheduler.check(request)
                if not request.mm_features:
                    self._scheduler.add_request(request)
                elif self.pixels.take(request):
                    self._add_complete(request)
            except RequestError as error:  # which changes nothing
                refusal = error
        if refusal is not None:
            raise refusal

    def _add_complete(self, request: EngineCoreRequest) -> None:
        """Queue a request that has the pixels of its pictures, once it is known whether embeddings are found too."""
        if self.embeds is None or self.embeds.take(request, self._scheduler.is_encoded):
            self._scheduler.add_request(request)

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        """`add_request` for each; those before one that is refused are queued."""
        for request in requests:
            self.add_request(request)

    def keep_pixels(self) -> None:
        """From now on pixels that come are kept for later requests, since front ends elsewhere send them once."""
        self.pixels.items.capacity = self._most_kept

    def add_pixels(self, key: bytes, pixels: np.ndarray) -> None:
        """Pixels of a picture, uint8, for requests that wait for them, and for later ones."""
        with self._books:
            self._admit(self.pixels.bring(key, pixels), self._add_complete)

    def _admit(self, requests: Sequence[EngineCoreRequest], add: Callable[[EngineCoreRequest], None]) -> None:
        """Queue requests that have waited."""
        for request in requests:
            try:
                add(request)
            except RequestError as error:  # another one has come before it
                failed = EngineCoreOutput(request.request_id, [], finish_reason="error")
                failed.error, failed.error_parameter = str(error), error.parameter
                self._tell([failed])

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Stop requests at once, and say nothing more of them; those that are unknown or ended already pass."""
        self.pixels.remove(request_ids)
        with self._books:
            self._scheduler.abort_requests(request_ids)
        self._outputs = without(self._outputs, request_ids)

    def call[R](self, call: CoreCall[R]) -> R:
        """Call one of the methods that `core_calls.py` lists."""
        desk = getattr(self, call.desk) if call.desk else self
        return getattr(desk, call.name())(**msgspec.structs.asdict(call))

    def step(self) -> EngineCoreOutputs:
        """Admit what is ready, schedule, execute, take the oldest result, update.

        The device is kept busy: steps are dispatched until as many are in flight as may be, and then the oldest one is
        awaited. While the engine sleeps, a step only returns what is left from before.
        """
        done = None
        if self._sleep.level is None:
            self._admit_ready()
            while self._in_flight.has_room and self._execute_next():
                pass
            done = self._update_from_oldest()
            if done is None:
                self._wait_for_work()
        if self._publishers:
            self._publish_events()
        outputs, self._outputs = self._outputs, []
        return EngineCoreOutputs(outputs, self.stats(done))

    def _admit_ready(self) -> None:
        """Queue requests whose grammars and programs are compiled, and those whose adapters are read."""
        if self._adapters is not None and self._adapters.book.is_busy:
            with self._books:
                self._tell(self._scheduler.admit_read())
        if self._scheduler.structured_output_manager.waiting:
            with self._books:
                self._tell(self._scheduler.admit_prepared())
        if self.embeds is not None and self.embeds.waiting:
            with self._books:
                self._admit(self.embeds.ready(), self._scheduler.add_request)

    def _execute_next(self) -> bool:
        """Schedule a step and dispatch it. False: there is nothing to compute, or it failed."""
        begin, scheduled = time.perf_counter(), None
        try:
            max_steps = self._pacer.num_steps
            if max_steps > 1:
                max_steps = min(max_steps, self.executor.max_decode_steps())
            max_tokens = self.executor.max_step_tokens()
            with self._books:
                scheduled = self._scheduler.schedule(max_steps, max_tokens)
            if not scheduled.total_num_scheduled_tokens:
                if self.transfers is not None:
                    self._exchange_kv()
                return False
            end = time.perf_counter()
            pending = self.executor.execute_model(scheduled)
        except BaseException as error:  # an interrupt too leaves the device half way
            self._recover(error, scheduled)
            return False
        self._in_flight.push(scheduled, pending, (begin, end, time.perf_counter()))
        if scheduled.masked:
            self._sample_masked()
        return True

    def _sample_masked(self) -> None:
        """Let the newest step sample once it is the only one in flight: its masks follow from all tokens before it."""
        scheduled = self._in_flight.oldest
        if scheduled is None or not self._in_flight.masks_are_due:
            return
        try:
            drafts = self._in_flight.wait_for_drafts()
        except Exception as error:
            self._recover(error, scheduled)
            return
        with self._books:
            manager, requests = self._scheduler.structured_output_manager, self._scheduler.requests
            masks = manager.grammar_bitmask(scheduled, requests, drafts)
        try:
            self._in_flight.sampled(self.executor.sample_tokens(masks))
        except BaseException as error:
            self._recover(error, scheduled)

    def _update_from_oldest(self) -> SchedulerOutput | None:
        """Wait for the oldest step in flight, and tell what it gives. Returns that step, None if there is none.

        When the wait is interrupted the step stays in flight. The forward pass of a masked step runs meanwhile; it
        samples as soon as it is the only one.
        """
        oldest = self._in_flight.oldest
        if oldest is None:
            return None
        if self._in_flight.awaits_masks:
            self._sample_masked()  # it was interrupted
            if not self._in_flight:
                return oldest  # it failed
        try:
            done = self._in_flight.wait()
        except Exception as error:
            self._recover(error, oldest)
            return oldest
        with self._books:
            outputs = self._scheduler.update_from_output(oldest, done.result)
            self._tell(outputs)
        num_unfinished = self._scheduler.get_num_unfinished_requests()
        record = self.step_log.add(oldest, done.result, num_unfinished, done.times)
        self._pacer.observe(record)
        if self.transfers is not None:
            self.transfers.observe(record)
            if not self._in_flight:
                self._exchange_kv()
        if self._in_flight.awaits_masks:
            self._sample_masked()
        return oldest

    def _wait_for_work(self) -> None:
        """Nothing is in flight: keep what was computed, and wait for grammars, programs, keys and values."""
        if self.transfers is not None:
            seconds = 0.0 if self._outputs else seconds_to_wait(self.transfers, COMPILE_WAIT)
            self._exchange_kv(seconds)
            if seconds:
                return
        if self.embeds is not None and self.embeds.waiting:
            with accepted_interrupts():
                self.embeds.wait(0.0 if self._outputs else COMPILE_WAIT)
        elif not self._outputs:
            with accepted_interrupts():
                if self._adapters is None or not self._adapters.book.wait(COMPILE_WAIT):
                    self._scheduler.structured_output_manager.wait(COMPILE_WAIT)

    def has_work(self) -> bool:
        """Whether another step could give something: requests are unfinished, or what they gave was not returned."""
        if self._sleep.level is not None:
            return bool(self._outputs)
        if self.embeds is not None and self.embeds.waiting:
            return True
        return bool(self._in_flight or self._outputs or self._scheduler.get_num_unfinished_requests())

    def save_idle(self) -> bool:
        """While there is no work: go on to keep what was computed besides the device. Whether there is more of that to
        do, later."""
        if self._sleep.level is not None or self.transfers is None or not self.transfers.is_outstanding:
            return False
        self._exchange_kv()
        return self.transfers.is_outstanding

    def unfinished(self) -> frozenset[str]:
        """The ids of all requests that have not ended."""
        return frozenset(self._scheduler.requests).union(self.pixels.waiting_ids)

    def stats(self, awaited: SchedulerOutput | None = None) -> SchedulerStats:
        """Queues and KV cache as they are now; step and tokens are those of `awaited`, or of the last step."""
        if self._books.death is not None:
            self._books.refuse()
        stats = self._scheduler.make_stats(awaited)
        stats.sleep_level = self._sleep.level
        return stats

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prompt beginnings; False while requests hold blocks. With `reset_running_requests` those
        that run give theirs back first, and are computed again from their first token.

        Steps in flight hold blocks of requests that ended meanwhile, so they are awaited first, and so is what is to be
        kept besides the device.
        """
        self._await_all()
        self._save_all_kv()
        with self._books:
            if reset_running_requests:
                self._scheduler.preempt_all()
                self._exchange_kv()
            done = self._scheduler.reset_prefix_cache()
        self._publish_events()
        return done

    @property
    def sleep_level(self) -> int | None:
        """How deep the engine sleeps, see `sleep`; None while it is awake."""
        return self._sleep.level

    def is_sleeping(self) -> bool:
        """Whether anything has to be woken before the next step."""
        return self._sleep.level is not None

    def sleep(self, level: int = 1, mode: str = "abort") -> SchedulerStats:
        """Stop computing; returns how the core is afterwards. What was computed is returned by the next `step`.

        Level 0 frees nothing. Level 1 frees the KV cache, and the weights leave the device; at level 2 the host
        forgets them too. Mode "abort" ends the requests under way, "wait" finishes them first, "keep" lets them go on
        after waking, with the tokens that they would have had. In a sleeping engine requests are queued, whatever the
        mode, and only a deeper level changes anything. Raises UsageError.
        """
        check_sleep(level, mode)
        if self._sleep.level is None:
            if mode == "wait":
                self._finish(frozenset(self._scheduler.requests))
            self._await_all()
            if mode == "abort":
                waited = self.pixels.remove(list(self.pixels.waiting_ids))
                with self._books:
                    self._tell([EngineCoreOutput(each, [], finish_reason="abort") for each in waited])
                    self._tell(self._scheduler.abort_requests(self.unfinished()))
        if level > 0:
            with self._books:
                self._scheduler.preempt_all()
                self._save_all_kv()
                self._scheduler.lose_content()
                self._scheduler.lose_slots()
        self._sleep.deepen(level)  # also when the executor fails to: nobody knows how much of it is freed
        self._pacer.interrupt()
        self._publish_events()
        if level > 0:
            self.executor.workers.sleep(discard=level == 2)
        return self.stats()

    def wake_up(self, tags: Collection[str] | None = None) -> SchedulerStats:
        """Take back what `tags` name, None: all of it; steps go on once nothing sleeps. What is awake is passed over.
        Returns how the core is afterwards.

        Raises UsageError for an unknown tag, CheckpointError and CapacityError when weights or memory are gone; what
        could not be taken back sleeps on.
        """
        check_tags(tags)
        for part in TAGS:
            if part in self._sleep.parts and (tags is None or part in tags):
                if part not in PARTS[0]:
                    with accepted_interrupts():
                        self.executor.workers.wake_up(part)
                    self.note_weight_update()
                self._sleep.wake(part)
        return self.stats()

    def block_map(self) -> KVBlockMap:
        """Who holds which KV block now."""
        with self._books:
            return self._scheduler.block_map()

    def snapshot(self, since_step: int = 0) -> EngineSnapshot:
        """What the engine does now, with the steps after the first `since_step`. See `snapshot.py` for its bounds."""
        return take_snapshot(self._scheduler, self.step_log, self.executor, self.stats(), since_step)

    @holding_interrupts
    def note_weight_update(self) -> None:
        """If the weights are others than before, nothing that was computed with the old ones is found again. Running
        requests begin anew; where only scheduling is paused, they go on over the keys and values that they have."""
        version = self.executor.weights_version
        if version != self._weights_version:
            self._await_all()
            self._weights_version = version
            with self._books:
                if self._sleep.level != 0:
                    self._scheduler.preempt_all()
                self._exchange_kv()
                self._scheduler.change_weights(version, self.executor.weights_label)
            if self.embeds is not None:
                self.embeds.forget()
            self._publish_events()

    @property
    def adapters(self) -> AdapterDesk:
        """Answers calls about LoRA adapters. Raises UsageError in an engine without any."""
        return given(self._adapters)

    def executor_stats(self) -> dict[str, Any]:
        """Counters of the executor: steps, padding, buckets, programs, recompiles."""
        return self.executor.workers.stats()

    def step_records(self) -> tuple[list[StepRecord], int]:
        """The newest finished steps, oldest first, and how many before them are forgotten."""
        return self.step_log.read()

    def wait_for_programs(self) -> None:
        """Block until every program is compiled."""
        self.executor.workers.wait_for_programs()

    def start_profile(self, folder: str | None = None) -> None:
        """Begin to record what the devices do, into `folder`, or where options say. Raises UsageError."""
        self.executor.workers.start_profile(folder)

    def stop_profile(self) -> None:
        """Write the record. Raises ConflictError when there is none."""
        self.executor.workers.stop_profile()

    def collective_rpc(self, method: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list:
        """Call a method of every worker, or a function with it; a result of each. Raises UsageError for no method."""
        try:
            return self.executor.collective_rpc(method, args, kwargs)
        finally:
            self.note_weight_update()

    def call_extension(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Call what a worker extension declares in every worker; plain data of each. Raises UsageError."""
        return self.collective_rpc("call_extension", (method, args, kwargs), {})

    def keep_lease(self, params: Mapping[str, Any], is_needed: bool) -> None:
        """A request may come with these `kv_transfer_params`, or will not if not `is_needed`. Raises RequestError."""
        source_of(transfer_params({PARAMS: params}))
        if self.transfers is not None:
            self.transfers.connector.expect_request(params, is_needed)

    def save_prefix(
        self, path: str, token_ids: Sequence[int], cache_salt: str | None, lora: LoRAInfo | None
    ) -> PrefixInfo:
        """Write what the prefix cache has of these tokens to a file, see `save_prefix` there. Raises UsageError."""
        if self.transfers is None or self._kv_transfer is None:
            raise UsageError(NO_FILES)
        self._exchange_kv()  # what has come is written
        return save_prefix(self.transfers, self._kv_transfer, Path(path), token_ids, cache_salt, lora)

    def load_prefix(self, path: str) -> PrefixInfo:
        """Bring the pages of a file to where they are kept. Raises UsageError, and PageError for a damaged one."""
        if self._kv_transfer is None:
            raise UsageError(NO_FILES)
        return self._kv_transfer.load_prefix(Path(path))

    def shutdown(self) -> None:
        """Release the devices, once what is kept besides them is where it outlives the engine, as far as that takes no
        minute. A second call does nothing."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        if self._books.death is None and self._sleep.level is None:
            try:
                if self.transfers is not None and self.transfers.outlives_engine:
                    self._save_all_kv(only_confirmed=bool(self._in_flight))
            except Exception:
                logger.exception("the newest keys and values are not kept")
        self._in_flight.clear()
        if self._adapters is not None:
            self._adapters.close()
        self.executor.shutdown()
        if self._grammars is not None:
            self._grammars.close()
        for each in self._publishers:
            each.close()

    def _publish_events(self) -> None:
        """Tell routers what has entered and left the prefix cache of each rank."""
        for rank, publisher in enumerate(self._publishers):
            with self._books:
                events = self._scheduler.take_events(rank)
            publisher.publish(events)

    def _tell(self, outputs: list[EngineCoreOutput]) -> None:
        """Let this step, or the next one, return these outputs, at most one of each request."""
        self._outputs = merged([self._outputs, outputs]) if self._outputs else outputs

    def _exchange_kv(self, seconds: float = 0.0, *, only_confirmed: bool = False) -> None:
        """Between steps: tell the workers which keys and values come and go, and wait at most so many seconds to hear
        what has become of others. What fails in it fails as a step does."""
        if self._kv_transfer is None:
            return
        try:
            with self._books:
                metadata = self._scheduler.build_connector_meta(only_confirmed=only_confirmed)
            if metadata is None and not seconds:
                return
            with accepted_interrupts() if seconds else contextlib.nullcontext():
                output = self._kv_transfer.exchange(metadata, seconds)
        except Exception as error:
            self._recover(error, None)
            return
        with self._books:
            self._tell(self._scheduler.update_connector_output(output))

    def _save_all_kv(self, *, only_confirmed: bool = False) -> None:
        """Save what waits for it, before content is lost. No step may begin meanwhile."""
        if self.transfers is not None:
            oldest = self._in_flight.oldest
            before = oldest.step_id if only_confirmed and oldest is not None else None
            save_all(self.transfers, lambda seconds: self._exchange_kv(seconds, only_confirmed=only_confirmed), before)

    def _finish(self, request_ids: frozenset[str]) -> None:
        """Compute until these requests have ended. What steps give meanwhile is returned by the next one."""
        told: list[EngineCoreOutput] = []
        try:
            while request_ids & self.unfinished():
                told = merged([told, self.step().outputs])
        finally:
            self._outputs = merged([told, self._outputs])

    def _await_all(self) -> None:
        while self._in_flight:
            self._update_from_oldest()

    def _recover(self, error: BaseException, scheduled: SchedulerOutput | None) -> None:
        """End the requests of a failed step, of those dispatched after it, and all that hold blocks.

        What a failed step leaves on the device cannot be trusted, so the device starts afresh; requests that hold
        nothing go on. `scheduled` None: it failed before it was known who takes part. Raises what is no Exception, and
        ProgramError: no step can be computed any more.
        """
        if isinstance(error, ProgramError):
            self._books.death = error
        if self._books.death is not None:
            raise error
        self._in_flight.clear()
        reason = f"the step failed: {str(error) or type(error).__name__}"
        logger.error("%s; its requests end with an error", reason, exc_info=error)
        with self._books:
            if scheduled is not None:
                self._tell(self._scheduler.fail_requests(scheduled, reason))
            left = [request.request_id for request in self._scheduler.running]
            reason = f"its cached keys and values were lost when {reason}"
            self._tell(self._scheduler.fail_requests(left, reason))
            self._scheduler.forget_steps()
            self._scheduler.lose_content()
            self.executor.recover()
        if not isinstance(error, Exception):
            raise error
