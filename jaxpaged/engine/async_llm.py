"""`AsyncLLM`: the engine for servers. Prompts in, results as they come, in an asyncio event loop.

The engine core runs in a process of its own; tokenising and detokenising run here. This module knows neither HTTP, nor
how the core's process is kept running.
"""

import asyncio
import contextlib
import functools
import itertools
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxpaged.config import EngineConfig, ModelConfig
from jaxpaged.engine.control import AsyncEngineControl
from jaxpaged.engine.core_calls import CoreCall
from jaxpaged.engine.front_end import front_end
from jaxpaged.engine.input.grammar_checker import MOST_CHILDREN
from jaxpaged.engine.input.processor import InputProcessor, Prompt, tokenization_options
from jaxpaged.engine.input.prompts import takes_long
from jaxpaged.engine.input.public_tokenizer import public_tokenizer
from jaxpaged.engine.observability.metrics import EngineMetrics, Metric
from jaxpaged.engine.observability.throughput_log import ThroughputLog, log_arrival
from jaxpaged.engine.observability.tracing import request_tracer
from jaxpaged.engine.outbox import as_one
from jaxpaged.engine.output.logprobs import LatePromptLogprobs
from jaxpaged.engine.output.processor import OutputProcessor, fan_out
from jaxpaged.engine.output.stream import OutputStream, Taker
from jaxpaged.engine.process import wire
from jaxpaged.engine.process.core_link import CoreLink
from jaxpaged.engine.process.core_supervisor import FACTORY, CoreSupervisor
from jaxpaged.engine.process.wire import CoreStats, Refusal
from jaxpaged.engine.process.zmq_client import ZmqClient, ask_facts
from jaxpaged.engine.send_window import SendWindow
from jaxpaged.errors import EngineDeadError, EngineError, RequestError
from jaxpaged.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    Progress,
    RequestOutput,
    SchedulerStats,
)
from jaxpaged.pooling import PoolingParams, PoolingRequestOutput
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams
from jaxpaged.vllm_options import check_arguments

logger = logging.getLogger(__name__)

CHILDREN_AT_ONCE = 32
"""Sequences of a prompt that are sent to the core between two looks at what others want."""
SETS_IN_CORE = 4
"""Of a group at most so many times `max_num_seqs` sequences are in the core."""
NUM_THREADS = max(2, min(4, os.cpu_count() or 1))
"""For what would hold up the event loop: more of them would only take turns."""
CONNECT_SECONDS = 60.0


class AsyncLLM(AsyncEngineControl):
    """Serves many requests at a time, all of one event loop. `config` is resolved.

    Make one with `from_config`, outside of the event loop or in a thread, since loading takes a while. When the core
    dies or hangs, requests under way raise EngineRestartError, new ones wait for its replacement, and once there will
    be none, everything raises EngineDeadError.
    """

    def __init__(
        self, config: EngineConfig, input_processor: InputProcessor, client: ZmqClient,
        supervisor: CoreSupervisor | None = None,
    ):  # fmt: skip
        self.config = config
        self.input_processor = input_processor
        self.metrics = EngineMetrics(config.max_model_len)
        self._output_processor = OutputProcessor(
            input_processor.tokenizer, self.metrics, input_processor.pooler, request_tracer(config), late=True
        )
        self._streams: dict[str, OutputStream] = {}
        self._window = SendWindow(
            SETS_IN_CORE * (config.scheduler.max_num_seqs or CHILDREN_AT_ONCE),
            self._output_processor.is_unfinished, lambda requests: self._link.add_requests(requests),
        )  # fmt: skip
        self._numbers = itertools.count()
        self._executor_stats: dict[str, Any] | None = None  # of the core that serves now, once it has said them
        self._threads = ThreadPoolExecutor(NUM_THREADS, "prompts")
        self._grammar_threads = ThreadPoolExecutor(MOST_CHILDREN, "grammars")
        handlers: dict[bytes, Callable[[Any], None]] = {
            wire.STEP: self._on_steps,
            wire.STATS: self._on_stats,
            wire.REFUSED: self._on_refusal,
        }
        self._throughput = ThroughputLog(self.metrics, lambda: bool(self._streams))
        self._link = CoreLink(client, supervisor, handlers, self._lose_all)

    @classmethod
    def from_config(
        cls, config: EngineConfig, progress: Progress | None = None, *, step_timeout: float = 300.0,
        max_restarts: int = 5, factory: str = FACTORY,
    ) -> "AsyncLLM":  # fmt: skip
        """Load the model that `config` names in a new process; `progress` hears, in a thread, how far that is.

        `step_timeout`: seconds without a sign of life, such as a compiled program, after which a step counts as hung
        and the process is replaced. `max_restarts`: how often within an hour it is before the engine is dead.
        `factory`: see `core_process.Factory`. Raises ConfigError, CheckpointError, CapacityError or EngineDeadError.
        """
        supervisor = CoreSupervisor(
            config, progress, step_timeout=step_timeout, max_restarts=max_restarts, factory=factory
        )
        try:
            facts = supervisor.start()
            config, input_processor = front_end(facts)  # while the core reads the weights
            supervisor.wait_until_serving()
        except BaseException:
            supervisor.close()
            raise
        return cls(config, input_processor, ZmqClient(supervisor.address, watch_connection=False), supervisor)

    @classmethod
    def from_engine_args(cls, engine_args: Any, progress: Progress | None = None, **options: Any) -> "AsyncLLM":
        """`from_config` from `EngineArgs`, which hold all options of the engine by name."""
        return cls.from_config(engine_args.create_engine_config(), progress, **options)

    @classmethod
    def from_address(cls, address: str, timeout: float = CONNECT_SECONDS) -> "AsyncLLM":
        """Another front end for a core that runs already: `address` is that of its first one.

        Raises EngineDeadError when no core answers within `timeout` seconds.
        """
        config, input_processor = front_end(ask_facts(address, timeout))
        return cls(config, input_processor, ZmqClient(address, watch_connection=True))

    # ---- requests

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | PoolingParams | None,
        request_id: str,
        *,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: None = None,
        arrival_time: float | None = None,
        truncate_prompt_tokens: int | None = None,
        add_special_tokens: bool = True,
        take: Taker | None = None,
        group: str | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """The results of a prompt as they come, the last of which is `finished`. None: the model's own parameters.

        Closing the iterator, or cancelling who waits for it, aborts the request. A consumer slower than the engine gets
        several results in one. `take` is asked first, where a result arises, and what it takes is not yielded: who has
        nothing to await saves a task's turn for every token (see `OutputStream`). Of the prompts of a `group` the
        core has no more at a time than keeps it busy. Raises RequestError, EngineRestartError or EngineDeadError.
        """
        check_arguments(lora_request=lora_request, data_parallel_rank=data_parallel_rank)
        tokenization = {
            "truncate_prompt_tokens": truncate_prompt_tokens, "add_special_tokens": add_special_tokens,
            **tokenization_options(tokenization_kwargs),
        }  # fmt: skip
        await self._link.until_ready()
        request, text = await self._processed(
            request_id, prompt, sampling_params, priority=priority, arrival_time=arrival_time, **tokenization
        )
        await self._link.until_ready()  # it may have ended meanwhile
        # What the core still says of an aborted request must not be taken for a later one of the same name.
        children = await self._expect(request, text, f"{request_id}#{next(self._numbers)}", trace_headers)
        stream = OutputStream(request.sampling_params.output_kind is RequestOutputKind.DELTA, take)
        self._streams[request_id] = stream
        self._throughput.wake()
        log_arrival(request, len(children))
        group = request_id if group is None else group
        self._window.enter(group, children)
        try:
            while self._window.refill(group, CHILDREN_AT_ONCE):
                await asyncio.sleep(0)
            finished = False
            while not finished:
                output = await stream.get()
                finished = output.finished
                if isinstance(output.prompt_logprobs, LatePromptLogprobs):
                    output.prompt_logprobs = await self._in_thread(output.prompt_logprobs.read)
                yield output
        finally:
            if self._streams.get(request_id) is stream:
                self._stop([request_id])
            self._window.leave(group)
            logger.debug("request %s is over", request_id, extra={"request_id": request_id})

    async def encode(
        self, prompt: Prompt, pooling_params: PoolingParams, request_id: str, **options: Any
    ) -> AsyncIterator[PoolingRequestOutput]:
        """The vector or the scores of a prompt, one result, with the options of `generate`. Raises what it does."""
        results: AsyncGenerator[Any] = self.generate(prompt, pooling_params, request_id, **options)
        async with contextlib.aclosing(results):
            async for output in results:
                yield output

    async def chat_prompt(self, messages: Sequence[Any], **options: Any) -> dict[str, Any]:
        """`InputProcessor.chat_prompt` in a thread: a template is a program, and a conversation may be long."""
        self._link.open()
        return await self._in_thread(self.input_processor.chat_prompt, messages, **options)

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests: their last result has finish reason "abort". Unknown ids pass."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        self._link.open()
        streams = {each: self._streams[each] for each in ids if each in self._streams}
        for result in self._stop(list(streams)):
            streams[result.request_id].put(result)

    def _stop(self, request_ids: Sequence[str], reason: str = "abort") -> list[RequestOutput]:
        """End requests here and in the core; returns what they had so far."""
        for request_id in request_ids:
            self._streams.pop(request_id, None)
        engine_ids, results = self._output_processor.abort(request_ids, reason)
        self._link.abort_requests(engine_ids)
        return results

    async def _expect(
        self, request: EngineCoreRequest, text: str | None, engine_id: str, trace_headers: Mapping[str, str] | None
    ) -> list[EngineCoreRequest]:
        """Expect the results of a request; what the core is to compute for it. Many sequences are made in a thread."""
        if request.sampling_params.n <= CHILDREN_AT_ONCE:
            return self._output_processor.add_request(request, text, engine_id, trace_headers)
        children = await self._in_thread(fan_out, request, engine_id)
        state = await self._in_thread(self._output_processor.state_of, request, text, children)
        await self._link.until_ready()
        self._output_processor.register(state, children, trace_headers)
        return children

    async def _processed(
        self, request_id: str, prompt: Prompt, params: SamplingParams | PoolingParams | None, **options: Any
    ) -> tuple[EngineCoreRequest, str | None]:
        """`InputProcessor.process`, in a thread where it takes long. Grammars, which can take seconds to check, have
        threads of their own, so that prompts do not wait for them."""
        work = functools.partial(self.input_processor.process, request_id, prompt, params, **options)
        if getattr(params, "structured_outputs", None) is not None:
            return await asyncio.get_running_loop().run_in_executor(self._grammar_threads, work)
        if takes_long(prompt, params):
            return await self._in_thread(work)
        return work()

    async def _in_thread(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **options))

    # ---- the engine

    @property
    def is_running(self) -> bool:
        """Whether the core serves now."""
        return not self.errored

    @property
    def errored(self) -> bool:
        """Whether the core is being replaced, or dead."""
        return self._link.trouble() is not None

    @property
    def address(self) -> str:
        """Where the core answers, for `from_address`."""
        return self._link.address

    @property
    def is_alive(self) -> bool:
        """Whether the core serves or is being replaced; False once there will be none any more."""
        return not self._link.is_dead

    def obstacle(self, when_compiled: bool = True) -> str | None:
        """Why an ordinary request that came now would not be served at full speed; None when it would.

        `when_compiled` False: that it may have to wait for programs to be compiled is no obstacle.
        """
        self._link.open()
        if (trouble := self._link.trouble() or self._link.silence()) is not None:
            return f"The engine does not serve: {trouble}."
        if self._executor_stats is None:
            return "The engine is starting."
        if self.sleep_level is not None:
            return f"The engine sleeps at level {self.sleep_level}. Requests wait until it is woken."
        ready, needed = (self._executor_stats.get(name, 0) for name in ("ordinary_programs_ready", "ordinary_programs"))
        if when_compiled and ready < needed:
            return f"{ready} of the {needed} programs that ordinary requests need are compiled."
        return None

    async def check_health(self) -> None:
        """Raises EngineDeadError while the core is being replaced, and once it is dead."""
        self._link.open()
        if (reason := self._link.trouble()) is not None:
            raise EngineDeadError(f"the engine core does not serve: {reason}.")

    async def call[R](self, call: CoreCall[R]) -> R:
        """The core's answer. Raises what the core raises, EngineError when it went away, EngineDeadError."""
        answer = await self._link.call(call)
        if isinstance(answer, SchedulerStats):
            self.metrics.stats = answer
        return answer

    @property
    def sleep_level(self) -> int | None:
        """How deep the engine sleeps, by what the core said last; None while it is awake."""
        return self.metrics.stats.sleep_level

    def get_metrics(self) -> list[Metric]:
        """All metrics. What comes from the core is at most a second old while it works."""
        return self.metrics.read(self._executor_stats or {}, self._link.num_restarts)

    def get_num_unfinished_requests(self) -> int:
        return len(self._output_processor)

    def get_tokenizer(self) -> Any:
        """The tokenizer as transformers has it, see `public_tokenizer`. Raises UsageError when there is none."""
        return public_tokenizer(self.input_processor)

    @property
    def model_config(self) -> ModelConfig:
        """The options of the model, resolved: `model`, `dtype`, `max_model_len`, ..."""
        return self.config.model

    def shutdown(self) -> None:
        """End the core's process, if this front end started it. Requests under way raise EngineDeadError."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._grammar_threads.shutdown(wait=False, cancel_futures=True)
        self._link.close()
        self._output_processor.shutdown()

    # ---- what the core says

    def _on_steps(self, steps: Sequence[EngineCoreOutputs]) -> None:
        try:
            came = as_one(steps)
            processed = self._output_processor.process(came.outputs)
        except Exception as error:  # nobody may wait for ever for what is lost
            logger.exception("results of a step could not be processed")
            self._fail_all(EngineError(f"its results could not be processed: {error!r}."))
            return
        self._link.abort_requests(processed.ids_to_abort)
        self.metrics.record_step(came.stats, processed.num_tokens)
        self._window.refill_all()
        for result in processed.request_outputs:
            stream = self._streams.pop(result.request_id) if result.finished else self._streams[result.request_id]
            stream.put(result)

    def _on_stats(self, stats: CoreStats) -> None:
        self.metrics.stats = stats.scheduler
        self._executor_stats = stats.executor

    def _on_refusal(self, refusal: Refusal) -> None:
        request_id = self._output_processor.prompt_of(refusal.request_id)
        if request_id is not None:
            stream = self._streams.pop(request_id)
            self._link.abort_requests(self._output_processor.discard(request_id))
            message = refusal.message.replace(repr(refusal.request_id), repr(request_id))
            stream.fail(RequestError(message, refusal.parameter))

    def _lose_all(self, error: EngineError) -> None:
        """The core is gone, and with it what it said of itself."""
        self._executor_stats, self.metrics.stats = None, SchedulerStats()
        self._fail_all(error)

    def _fail_all(self, error: EngineError) -> None:
        streams = dict(self._streams)
        self._stop(list(streams), "error")
        for stream in streams.values():
            stream.fail(type(error)(str(error)))  # each consumer adds its own traceback
