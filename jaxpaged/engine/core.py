"""The engine core: schedule, execute, update. Token ids in, token ids out.

With asynchronous scheduling a step is scheduled and dispatched before the one ahead of it is awaited, so the device
never waits for the host. This module knows neither text nor devices.
"""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxpaged.config import EngineConfig
from jaxpaged.core.grammar.matcher import Grammars
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.engine.core_calls import CoreCall
from jaxpaged.engine.core_client import EngineCoreClient
from jaxpaged.engine.kv_transfer import KVTransferDriver
from jaxpaged.engine.observability.snapshot import take_snapshot
from jaxpaged.engine.observability.step_log import StepLog
from jaxpaged.engine.outbox import Outbox
from jaxpaged.engine.sleep import PARTS, TAGS, SleepRecord, check_sleep, check_tags
from jaxpaged.engine.step_pacer import StepPacer
from jaxpaged.errors import EngineDeadError, ProgramError, RequestError
from jaxpaged.executor.base import Executor, KVTransferWorker, PendingOutput
from jaxpaged.interrupts import accepted_interrupts, holding_interrupts
from jaxpaged.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineSnapshot,
    KVBlockMap,
    SchedulerOutput,
    SchedulerStats,
)

if TYPE_CHECKING:
    from jaxpaged.engine.observability.kv_event_publisher import KVEventPublisher

logger = logging.getLogger(__name__)

COMPILE_WAIT = 0.05
"""Seconds that a step sleeps at most with nothing to do but to wait for a grammar or a program."""


@dataclass
class Step:
    """A step that was dispatched and not yet awaited. With `needs_masks` only its forward pass was."""

    scheduled: SchedulerOutput
    pending: PendingOutput
    times: tuple[float, float, float]  # schedule begin and end, dispatch end
    needs_masks: bool = False


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
        transfer: KVTransferWorker | None = None,
    ):
        """`grammars` None: requests with structured outputs are refused. `publishers`: hear what a rank's cache holds.
        `transfer`: keeps keys and values besides the device."""
        self.executor = executor
        self._grammars = grammars
        self._publishers = publishers
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
        )
        self.transfer = KVTransferDriver(self._scheduler, transfer, config.cache.load_failure_policy)
        # Steps in flight: one is computed on each stage, and one waits for a device. Nothing depends on this number but
        # how late a new request begins, and how much is computed in vain behind a request's end.
        self._depth = config.parallel.pipeline_parallel_size + 1 if config.scheduler.async_scheduling else 1
        self._in_flight: deque[Step] = deque()
        self._outbox = Outbox()  # what `step` has not returned yet
        self._death: BaseException | None = None
        self._weights_version = executor.weights_version
        self._sleep, self._is_shut_down = SleepRecord(), False
        self.step_log = StepLog()
        self._pacer = StepPacer(config.scheduler.num_scheduler_steps, self._depth)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request. Raises RequestError when it can never fit the KV cache, and while its id is in use: until
        `step` has returned the last that another one of this id said, or that one was aborted."""
        if request.request_id in self._outbox:
            what = f"request id {request.request_id!r} is in use: its results were not taken. Choose another."
            raise RequestError(what, "request_id")
        try:
            with self._changing_books(refusal=RequestError):
                self._scheduler.add_request(request)
        except RequestError:
            self.transfer.refuse(request)
            raise
        self.transfer.tell_peers()  # the next step may be far: what another engine lends is kept from now on

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        """`add_request` for each; those before one that is refused are queued."""
        for request in requests:
            self.add_request(request)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Stop requests at once, and say nothing more of them; those that are unknown or ended already pass."""
        with self._changing_books():
            self._scheduler.abort_requests(request_ids)
        self._outbox.discard(request_ids)
        self.transfer.tell_peers()

    def call[R](self, call: CoreCall[R]) -> R:
        """Whatever else may be asked of a core: see `core_calls.py`."""
        return call.answer(self)

    def step(self) -> EngineCoreOutputs:
        """Keep the device busy, then wait for the oldest step and return what it produced.

        While the engine sleeps, a step only returns what is left from before.
        """
        awaited = self._advance() if self._sleep.level is None else None
        self._publish_events()
        return EngineCoreOutputs(self._outbox.take(), self.stats(awaited))

    def has_work(self) -> bool:
        """Whether another step could give something: requests are unfinished, or what they gave was not returned."""
        if self._sleep.level is not None:
            return len(self._outbox) > 0
        return bool(self._in_flight or self._outbox or self._scheduler.get_num_unfinished_requests())

    def save_idle(self) -> bool:
        """While there is no work: go on to keep what was computed besides the device. Whether there is more of that to
        do, later."""
        if self._sleep.level is not None or not self.transfer.has_saves:
            return False
        self._move(self.transfer.save_idle)
        return self.transfer.has_saves

    def unfinished(self) -> frozenset[str]:
        """The ids of all requests that have not ended."""
        return frozenset(self._scheduler.requests)

    def stats(self, awaited: SchedulerOutput | None = None) -> SchedulerStats:
        """Queues and KV cache as they are now; step and tokens are those of `awaited`, or of the last step."""
        with self._changing_books():
            stats = self._scheduler.make_stats(awaited)
        stats.sleep_level = self._sleep.level
        self.transfer.count_in(stats)
        return stats

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prompt beginnings; False while requests hold blocks. With `reset_running_requests` those
        that run give theirs back first, and are computed again from their first token.

        Steps in flight hold blocks of requests that ended meanwhile, so they are awaited first, and so is what is to be
        kept besides the device.
        """
        self._await_all()
        self._move(self.transfer.save_all)
        with self._changing_books():
            if reset_running_requests:
                self._scheduler.preempt_all()
                self._settle_saves()
            done = self._scheduler.reset_prefix_cache()
        self._publish_events()
        return done

    @property
    def sleep_level(self) -> int | None:
        """How deep the engine sleeps, see `sleep`; None while it is awake."""
        return self._sleep.level

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Stop computing. What was computed until now is returned by the next `step`.

        Level 0 frees nothing. Level 1 frees the KV cache, and the weights leave the device; at level 2 the host
        forgets them too. Mode "abort" ends the requests under way, "wait" finishes them first, "keep" lets them go on
        after waking, with the tokens that they would have had. In a sleeping engine requests are queued, whatever the
        mode, and only a deeper level changes anything. Raises UsageError.
        """
        check_sleep(level, mode)
        if self._sleep.level is None:
            if mode == "wait":
                self._finish(self.unfinished())
            self._await_all()
            if mode == "abort":
                with self._changing_books():
                    self._outbox.add(self.transfer.hand_over(self._scheduler.abort_requests(self.unfinished())))
        if level > 0:
            with self._changing_books():
                self._scheduler.preempt_all()
                self._settle_saves()
                self._move(self.transfer.save_all)
                self._scheduler.lose_content()
        self._sleep.deepen(level)  # also when the executor fails to: nobody knows how much of it is freed
        self._pacer.interrupt()
        self._publish_events()
        if level > 0:
            self.executor.workers.sleep(discard=level == 2)

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Take back what `tags` name, None: all of it; steps go on once nothing sleeps. What is awake is passed over.

        Raises UsageError for an unknown tag, CheckpointError and CapacityError when weights or memory are gone; what
        could not be taken back sleeps on.
        """
        check_tags(tags)
        for part in TAGS:
            if part in self._sleep.parts and (tags is None or part in tags):
                if part not in PARTS[0]:
                    with accepted_interrupts():
                        self.executor.workers.wake_up(part)
                    self.heed_weights()
                self._sleep.wake(part)

    def block_map(self) -> KVBlockMap:
        """Who holds which KV block now."""
        with self._changing_books():
            return self._scheduler.block_map()

    def snapshot(self, since_step: int = 0) -> EngineSnapshot:
        """What the engine does now, with the steps after the first `since_step`. See `snapshot.py` for its bounds."""
        return take_snapshot(self._scheduler, self.step_log, self.executor, self.stats(), since_step)

    @holding_interrupts
    def heed_weights(self) -> None:
        """If the weights are others than before, nothing that was computed with those is ever used again. Whoever runs
        begins anew with the tokens that it has."""
        version = self.executor.weights_version
        if version != self._weights_version:
            self._await_all()
            self._weights_version = version
            with self._changing_books():
                self._scheduler.preempt_all()
                self._settle_saves()
                self._scheduler.change_weights(version)
            self._publish_events()

    def shutdown(self) -> None:
        """Release the devices, once what is kept besides them is where it outlives the engine, as far as that takes no
        minute. A second call does nothing."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        oldest = self._in_flight[0].scheduled.step_id if self._in_flight else None
        if self._death is None and self._sleep.level is None:
            try:
                self.transfer.save_last(oldest)
            except Exception:
                logger.exception("the newest keys and values are not kept")
        self._in_flight.clear()
        self.executor.shutdown()
        if self._grammars is not None:
            self._grammars.close()
        for each in self._publishers:
            each.close()

    def _publish_events(self) -> None:
        """Tell routers what has entered and left the prefix cache of each rank."""
        for publisher, rank in zip(self._publishers, self._scheduler.ranks):
            with self._changing_books():
                events = rank.kv_cache_manager.take_events()
            publisher.publish(events)

    def _advance(self, is_taken: bool = True) -> SchedulerOutput | None:
        """Put what the oldest step gives into the outbox, which `is_taken` then. Returns that step, if there is one."""
        with self._changing_books():
            self._outbox.add(self._scheduler.admit_prepared())
        self._move(self.transfer.deliver)
        awaited = self._dispatch()
        if awaited is None and self._in_flight:
            awaited = self._await_oldest()
        if awaited is None and not self._in_flight:
            self._move(self.transfer.save_idle)
        if awaited is None and not (self._outbox and is_taken):
            with accepted_interrupts():
                if not self.transfer.wait(COMPILE_WAIT):
                    self._scheduler.structured_output_manager.wait(COMPILE_WAIT)
        return awaited

    def _settle_saves(self) -> None:
        """Let what steps have computed be kept besides the device."""
        oldest = self._in_flight[0].scheduled.step_id if self._in_flight else None
        self._move(lambda: self.transfer.settle(oldest))

    def _move(self, act: Callable[[], list[EngineCoreOutput] | None]) -> None:
        """Dispatch keys and values that come or go, and say what `act` says. What fails in it fails as a step does."""
        try:
            self._outbox.add(act() or [])
        except Exception as error:
            self._fail(error, None)

    def _finish(self, request_ids: frozenset[str]) -> None:
        """Compute until these requests have ended."""
        while request_ids & self.unfinished():
            self._advance(is_taken=False)

    def _await_all(self) -> None:
        while self._in_flight:
            self._await_oldest()

    def _dispatch(self) -> SchedulerOutput | None:
        """Schedule and dispatch until as many steps are in flight as may be. Returns what had to be awaited for it."""
        awaited = self._draw_newest()  # after an interrupt it may still have to
        while awaited is None and len(self._in_flight) < self._depth:
            begin, scheduled = time.perf_counter(), None
            try:
                limits = self._max_steps(), self.executor.max_step_tokens()
                with self._changing_books():
                    scheduled = self._scheduler.schedule(*limits)
                self.transfer.before_step(scheduled.step_id)
                if not scheduled.total_num_scheduled_tokens:
                    return None
                end = time.perf_counter()
                pending = self.executor.execute_model(scheduled)
                self.transfer.save()
            except BaseException as error:  # an interrupt too leaves the device half way
                self._fail(error, scheduled)
                return None
            times = (begin, end, time.perf_counter())
            self._in_flight.append(Step(scheduled, pending, times, scheduled.masked))
            awaited = self._draw_newest()
        return awaited

    def _draw_newest(self) -> SchedulerOutput | None:
        """If the newest step needs masks, await those before it, then give it its masks. Returns what was awaited.

        Its forward pass runs meanwhile; the next step must not begin before it has drawn.
        """
        awaited = None
        while self._in_flight and self._in_flight[-1].needs_masks:
            if len(self._in_flight) == 1:
                self._draw(self._in_flight[0])
            else:
                awaited = self._await_oldest()
        return awaited

    def _draw(self, step: Step) -> None:
        """Let a step draw with masks that follow from all tokens before it: it is the oldest in flight."""
        try:
            with accepted_interrupts():
                drafts = step.pending.drafts() if max(step.scheduled.max_sampled_tokens) > 1 else ()
        except Exception as error:
            self._fail(error, step.scheduled)
            return
        with self._changing_books():
            masks = self._scheduler.structured_output_manager.grammar_bitmask(
                step.scheduled, self._scheduler.requests, drafts
            )
        try:
            step.pending = self.executor.sample_tokens(masks)
            step.needs_masks = False
        except BaseException as error:
            self._fail(error, step.scheduled)

    def _max_steps(self) -> int:
        """How many decode steps the next program may run."""
        wanted = self._pacer.num_steps
        return min(wanted, self.executor.max_decode_steps()) if wanted > 1 else 1

    def _await_oldest(self) -> SchedulerOutput:
        """Wait for the oldest step in flight, which is returned; when that is interrupted, it stays in flight."""
        step = self._in_flight[0]
        if step.needs_masks:
            self._draw(step)
            if step.needs_masks:
                return step.scheduled  # it failed
        begin = time.perf_counter()
        try:
            with accepted_interrupts():
                result = step.pending.result()
        except Exception as error:
            self._fail(error, step.scheduled)
            return step.scheduled
        ready = time.perf_counter()
        self._in_flight.popleft()
        with self._changing_books():
            self._outbox.add(self.transfer.hand_over(self._scheduler.update_from_output(step.scheduled, result)))
        times, num_unfinished = (*step.times, begin, ready), self._scheduler.get_num_unfinished_requests()
        record = self.step_log.add(step.scheduled, result, num_unfinished, times)
        self._pacer.observe(record)
        self.transfer.observe(record)
        self._settle_saves()
        return step.scheduled

    def _fail(self, error: BaseException, scheduled: SchedulerOutput | None) -> None:
        """End the requests of a failed step, of those dispatched after it, and all that hold blocks.

        What a failed step leaves on the device cannot be trusted, so the device starts afresh; requests that hold
        nothing go on. `scheduled` None: it failed before it was known who takes part. Raises what is no Exception, and
        ProgramError: no step can be computed any more.
        """
        if isinstance(error, ProgramError):
            self._death = error
        if self._death is not None:
            raise error
        self._in_flight.clear()
        self.transfer.revoke()
        reason = f"the step failed: {str(error) or type(error).__name__}"
        logger.error("%s; its requests end with an error", reason, exc_info=error)
        with self._changing_books():
            if scheduled is not None:
                self._outbox.add(self._scheduler.fail_requests(scheduled, reason))
            left = [request.request_id for request in self._scheduler.running]
            reason = f"its cached keys and values were lost when {reason}"
            self._outbox.add(self.transfer.hand_over(self._scheduler.fail_requests(left, reason)))
            self._scheduler.forget_steps()
            self._scheduler.lose_content()
            self.executor.recover()
        if not isinstance(error, Exception):
            raise error

    @contextlib.contextmanager
    def _changing_books(self, refusal: type[Exception] | tuple[()] = ()) -> Iterator[None]:
        """Around what must not fail: any error in it but a `refusal`, which changes nothing, means that the books are
        wrong from then on, and the engine has stopped."""
        if self._death is not None:
            raise EngineDeadError(f"the engine has stopped: {self._death!r}. Start a new one.") from self._death
        try:
            yield
        except refusal:
            raise
        except BaseException as error:
            self._death = error
            if not isinstance(error, Exception):
                raise
            raise EngineDeadError(f"the engine broke down and stops: {error!r}. Start a new one.") from error
