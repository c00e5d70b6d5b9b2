"""The engine cores as a front end has them: the way to each, the requests that it computes, and what it said of itself.

Each of several cores has a client of its own, so what happens to one core happens to its requests only. This module
does not know prompts' text, nor how results reach a user.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from jaxpaged.config import EngineConfig
from jaxpaged.core.balancer import Balancer, Load
from jaxpaged.engine.admission import AdmissionWindow
from jaxpaged.engine.core_calls import (
    AddLora,
    CoreCall,
    FinishWeightUpdate,
    PinLora,
    RemoveLora,
    ResetPrefixCache,
    RestoreLoras,
    Sleep,
)
from jaxpaged.engine.input.processor import InputProcessor
from jaxpaged.engine.merged_outputs import as_one
from jaxpaged.engine.observability.metrics import EngineMetrics, Metric
from jaxpaged.engine.observability.throughput_log import ThroughputLog
from jaxpaged.engine.observability.tracing import RequestTracer
from jaxpaged.engine.output.processor import OutputProcessor
from jaxpaged.engine.output.stream import OutputStream
from jaxpaged.engine.pixel_sender import PixelSender
from jaxpaged.engine.process import wire
from jaxpaged.engine.process.core_link import CoreLink
from jaxpaged.engine.process.core_supervisor import CoreSupervisor
from jaxpaged.engine.process.wire import CoreStats, Refusal
from jaxpaged.engine.process.zmq_client import ZmqClient
from jaxpaged.errors import EngineDeadError, EngineError, JaxpagedError, RequestError
from jaxpaged.messages import EngineCoreOutputs, EngineCoreRequest, LoRAInfo, RequestOutput, SchedulerStats

logger = logging.getLogger(__name__)

CHILDREN_AT_ONCE = 32
"""Sequences of a prompt that are sent to the core between two looks at what others want."""
SETS_IN_CORE = 4
"""Of a group at most so many times `max_num_seqs` sequences are in the core."""
SECONDS_TO_AVOID = 2.0
"""Of silence, after which requests had better go to another core: it may hang, or compute something long."""


class CoreClient:
    """One engine core as a front end has it. For one event loop at a time. `config` is resolved; `number` is the core's
    place among `config`'s cores."""

    def __init__(
        self,
        number: int,
        config: EngineConfig,
        input_processor: InputProcessor,
        client: ZmqClient,
        supervisor: CoreSupervisor | None,
        tracer: RequestTracer | None,
    ):
        self.number = number
        self.is_alone = config.parallel.num_cores == 1
        self.metrics = EngineMetrics(config.max_model_len)
        self.output_processor = OutputProcessor(
            input_processor.tokenizer, self.metrics, input_processor.pooler, tracer, late=True
        )
        if number:  # the tracer is everybody's, and what it lost is told once
            self.metrics.spans_lost = None
        self.streams: dict[str, OutputStream] = {}
        self.window = AdmissionWindow(
            SETS_IN_CORE * (config.scheduler.max_num_seqs or CHILDREN_AT_ONCE),
            self.output_processor.is_unfinished,
            self._send,
        )
        pictures = input_processor.pictures
        self.pixels = PixelSender(
            config.multimodal.core_cache_bytes(config.parallel.num_cores),
            count=(lambda num_bytes: None) if pictures is None else pictures.budget.add,
        )
        self.throughput = ThroughputLog(
            self.metrics, lambda: bool(self.streams), "" if self.is_alone else f"engine core {number}: "
        )
        self.executor_stats: dict[str, Any] | None = None  # of the core that serves now, once it has said them
        handlers: dict[bytes, Callable[[Any], None]] = {
            wire.STEP: self._on_steps,
            wire.STATS: self._on_stats,
            wire.REFUSED: self._on_refusal,
            wire.WANTED: self._on_wanted,
        }
        self._loras: dict[int, LoRAInfo] = {}  # adapters that were loaded, for a core that comes in place of this one
        self._pinned: set[int] = set()  # those of them that are to stay in host memory
        self.link = CoreLink(client, supervisor, handlers, self._lose_all, self._restoring)

    @property
    def sleep_level(self) -> int | None:
        """How deep the core sleeps, by what it said last; None while it is awake."""
        return self.metrics.stats.sleep_level

    @property
    def load(self) -> Load:
        """What it has to do: what it has not said to run yet waits, here or there."""
        stats, num_unfinished = self.metrics.stats, self.output_processor.num_sequences
        num_sequences = max(num_unfinished, stats.num_running_reqs + stats.num_waiting_reqs)
        num_running = min(stats.num_running_reqs, num_sequences)
        is_usable = self.link.is_ready and self.sleep_level is None and self.link.seconds_silent < SECONDS_TO_AVOID
        return Load(num_running, num_sequences - num_running, is_usable)

    def obstacle(self, when_compiled: bool) -> str | None:
        """See `AsyncLLM.obstacle`."""
        if (trouble := self.link.trouble() or self.link.silence()) is not None:
            return f"The engine does not serve: {trouble}."
        if self.executor_stats is None:
            return "The engine is starting."
        if self.sleep_level is not None:
            return f"The engine sleeps at level {self.sleep_level}. Requests wait until it is woken."
        names = ("ordinary_programs_ready", "ordinary_programs")
        ready, needed = (self.executor_stats.get(name, 0) for name in names)
        if when_compiled and ready < needed:
            return f"{ready} of the {needed} programs that ordinary requests need are compiled."
        return None

    def stop(self, request_ids: Sequence[str], reason: str = "abort") -> list[RequestOutput]:
        """End requests here and in the core; returns what they had so far."""
        for request_id in request_ids:
            self.streams.pop(request_id, None)
        engine_ids, results = self.output_processor.abort(request_ids, reason)
        self.link.abort_requests(engine_ids)
        self.pixels.end(engine_ids)
        return results

    async def call[R](self, call: CoreCall[R]) -> R:
        """The core's result. Raises what the core raises, EngineError when it went away, EngineDeadError."""
        result = await self.link.call(call)
        if isinstance(result, SchedulerStats):
            self.metrics.stats = result
        elif isinstance(call, AddLora | RemoveLora | PinLora):
            self._note_adapter(call, result)
        return result

    def _note_adapter(self, call: AddLora | RemoveLora | PinLora, result: Any) -> None:
        if isinstance(call, AddLora):
            self._loras[result.lora_int_id] = result
        elif isinstance(call, RemoveLora):
            self._loras.pop(call.lora_id, None)
            self._pinned.discard(call.lora_id)
        elif result:
            self._pinned.add(call.lora_id)

    def _restoring(self) -> Iterator[CoreCall[Any]]:
        """What a core has to know that comes in place of one that had adapters."""
        if self._loras:
            yield RestoreLoras(list(self._loras.values()))
        for lora_id in sorted(self._pinned):
            yield PinLora(lora_id)

    def read_metrics(self) -> list[Metric]:
        """All metrics; those of several cores have vLLM's label `engine`."""
        metrics = self.metrics.read(self.executor_stats or {}, self.link.num_restarts)
        if self.is_alone:
            return metrics
        return [replace(metric, labels={"engine": str(self.number), **metric.labels}) for metric in metrics]

    def _send(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Requests go to the core, behind the pixels that it lacks."""
        for request in requests:
            if request.mm_features:
                self.link.add_items(self.pixels.ahead(request))
        self.link.add_requests(requests)

    # ---- what the core says

    def _on_steps(self, steps: Sequence[EngineCoreOutputs]) -> None:
        try:
            came = as_one(steps)
            processed = self.output_processor.process(came.outputs)
        except Exception as error:  # nobody may wait for ever for what is lost
            logger.exception("results of a step could not be processed")
            self._fail_all(EngineError(f"its results could not be processed: {error!r}."))
            return
        self.link.abort_requests(processed.ids_to_abort)
        self.metrics.record_step(came.stats, processed.num_tokens)
        if self.pixels.num_requests:
            ended = [each.request_id for each in came.outputs if each.finish_reason is not None]
            self.pixels.end([*ended, *processed.ids_to_abort])
        self.window.refill_all()
        for result in processed.request_outputs:
            stream = self.streams.pop(result.request_id) if result.finished else self.streams[result.request_id]
            stream.put(result)

    def _on_stats(self, stats: CoreStats) -> None:
        self.metrics.stats = stats.scheduler
        self.executor_stats = stats.executor

    def _on_refusal(self, refusal: Refusal) -> None:
        request_id = self.output_processor.prompt_of(refusal.request_id)
        if request_id is not None:
            stream = self.streams.pop(request_id)
            engine_ids = self.output_processor.discard(request_id)
            self.link.abort_requests(engine_ids)
            self.pixels.end(engine_ids)
            message = refusal.message.replace(repr(refusal.request_id), repr(request_id))
            stream.fail(RequestError(message, refusal.parameter))

    def _on_wanted(self, wanted: wire.Wanted) -> None:
        self.link.add_items(self.pixels.wanted(wanted))

    def _lose_all(self, error: EngineError) -> None:
        """The core is gone, and with it what it said of itself."""
        self.pixels.lose_core()
        self.metrics.lose_core(self.executor_stats or {})
        self.executor_stats = None
        self._fail_all(error)

    def _fail_all(self, error: EngineError) -> None:
        streams = dict(self.streams)
        self.stop(list(streams), "error")
        for stream in streams.values():
            stream.fail(type(error)(str(error)))  # each consumer adds its own traceback


class CoreClients:
    """All cores of an engine, in the order of their numbers: which of them computes a prompt, what all of them return
    for a call, and which serve now. One core passes through untouched.

    `block_size`: of what they cache; 0 if they do not.
    """

    def __init__(self, cores: Sequence[CoreClient], block_size: int):
        self.all = tuple(cores)
        self._balancer = Balancer(len(self.all), block_size)
        self._num_losses = [0] * len(self.all)  # of each core, when it was last looked at

    def open(self) -> None:
        """Connect in the event loop that runs. Raises UsageError when another one uses this engine."""
        for core in self.all:
            core.link.open()

    async def until_ready(self, rank: int | None = None) -> None:
        """Wait until some core serves, or the one that is asked for. Raises RequestError for a core that is none, and
        EngineDeadError when there will be none."""
        if rank is not None and not 0 <= rank < len(self.all):
            raise RequestError(
                f"data_parallel_rank is {rank}, but this engine has {len(self.all)} cores: 0 to {len(self.all) - 1}.",
                "data_parallel_rank",
            )
        self.open()
        wanted = self.all if rank is None else self.all[rank : rank + 1]
        while not any(core.link.is_ready for core in wanted):
            alive = [core for core in wanted if not core.link.is_dead] or wanted[:1]
            if len(alive) == 1:
                await alive[0].link.until_ready()
                return
            tasks = [asyncio.ensure_future(core.link.until_ready()) for core in alive]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def choose(self, token_ids: Sequence[int], cache_salt: str | None, rank: int | None = None) -> CoreClient:
        """The core that is to compute all sequences of a prompt: `rank`, or the one that suits it best."""
        if len(self.all) == 1:
            return self.all[0]
        for number, core in enumerate(self.all):
            if core.link.num_restarts != self._num_losses[number]:
                self._num_losses[number] = core.link.num_restarts
                self._balancer.forget(number)
        if rank is not None:
            self._balancer.give(rank, token_ids, cache_salt)
            return self.all[rank]
        loads = [core.load for core in self.all]
        return self.all[self._balancer.choose(token_ids, cache_salt, loads)]

    async def call[R](self, call: CoreCall[R]) -> R:
        """What the core answers, or all of them together (`CoreCall.merged`), once all have agreed to it
        (`CoreCall.check`). The others have answered by the time that an error of one is raised; a core that is gone
        does not keep them from telling how they are. Raises EngineError where only some could do what all agreed to."""
        if len(self.all) == 1:
            return await self.all[0].call(call)
        if isinstance(call, ResetPrefixCache | Sleep | FinishWeightUpdate):
            for core in self.all:
                self._balancer.forget(core.number)
        self.open()
        asked = [core for core in self.all if core.link.is_ready] if call.only_tells else []
        asked = asked or [core for core in self.all if not core.link.is_dead] or list(self.all)
        if (check := call.check()) is not None:
            await self._ask(asked, check)
        return await self._ask(asked, call)

    async def _ask[R](self, asked: Sequence[CoreClient], call: CoreCall[R]) -> R:
        results = await asyncio.gather(
            *(core.call(call.for_core(core.number)) for core in asked), return_exceptions=True
        )
        told = [result for result in results if not isinstance(result, BaseException)]
        if 0 < len(told) < len(asked):
            await self._straighten(asked, results, call)
        for core, error in zip(asked, results):
            if not isinstance(error, BaseException):
                continue
            if told and call.check() is not None:
                raise EngineError(
                    f"{len(told)} of {len(asked)} engine cores have done {call.name()}, and core {core.number} has "
                    f"not: {error} Begin it once more for all of them."
                ) from error
            if not (told and call.only_tells and isinstance(error, EngineError)):
                raise error
        return call.merged(told)

    async def _straighten[R](
        self, asked: Sequence[CoreClient], results: Sequence[R | BaseException], call: CoreCall[R]
    ) -> None:
        """Where some have done what others could not: take it back, or let those serve again that it has harmed. One
        that is lost is replaced without that."""
        for core, result in zip(asked, results):
            cure = call.mended() if isinstance(result, BaseException) else call.undone()
            if cure is not None and not isinstance(result, EngineError):
                with contextlib.suppress(JaxpagedError):  # of what went wrong the caller hears
                    await core.call(cure)

    # ---- how they are

    def trouble(self) -> str | None:
        """Why the engine does not serve now, or not with all its cores for good; None when it does."""
        troubles = [core.link.trouble() for core in self.all]
        for core, trouble in zip(self.all, troubles, strict=True):
            if core.link.is_dead and trouble is not None:
                return trouble
        return None if None in troubles else troubles[0]

    @property
    def is_dead(self) -> bool:
        """Whether a core is gone for good: what is left serves on, and cannot be made whole."""
        return any(core.link.is_dead for core in self.all)

    def obstacle(self, when_compiled: bool) -> str | None:
        """Why no core would serve an ordinary request at full speed; None when one would."""
        obstacles = [core.obstacle(when_compiled) for core in self.all]
        return None if None in obstacles else obstacles[0]

    @property
    def sleep_level(self) -> int | None:
        """How deep all of them sleep, at least; None while one is awake."""
        levels = [core.sleep_level for core in self.all]
        return None if None in levels else min(level for level in levels if level is not None)

    def check_health(self) -> None:
        """Raises EngineDeadError while no core serves, and once one is dead."""
        self.open()
        if (reason := self.trouble()) is not None:
            raise EngineDeadError(f"the engine core does not serve: {reason}.")
