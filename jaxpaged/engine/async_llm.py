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

from jaxpaged.config import EngineConfig, ModelConfig, settled
from jaxpaged.engine.adapters import AsyncAdapters, salt_with
from jaxpaged.engine.control import AsyncEngineControl
from jaxpaged.engine.core_calls import CoreCall
from jaxpaged.engine.core_client import CHILDREN_AT_ONCE, CoreClient, CoreClients
from jaxpaged.engine.early_leases import lease_kept_meanwhile, let_go
from jaxpaged.engine.front_end import front_end_with_loggers
from jaxpaged.engine.input.grammar_checker import MOST_CHILDREN
from jaxpaged.engine.input.picture_parts import has_pictures
from jaxpaged.engine.input.processor import InputProcessor, Prompt, tokenization_options
from jaxpaged.engine.input.prompts import carries_pictures, takes_long
from jaxpaged.engine.input.public_tokenizer import public_tokenizer
from jaxpaged.engine.input.tokenizer import Truncation
from jaxpaged.engine.observability.logprob_difference import LogprobDifference
from jaxpaged.engine.observability.metrics import Metric
from jaxpaged.engine.observability.stat_loggers import StatLoggers
from jaxpaged.engine.observability.throughput_log import log_arrival
from jaxpaged.engine.observability.tracing import request_tracer
from jaxpaged.engine.output.logprobs import LatePromptLogprobs
from jaxpaged.engine.output.processor import fan_out, id_in_use
from jaxpaged.engine.output.stream import OutputStream, Taker
from jaxpaged.engine.pixel_sender import without_pixels
from jaxpaged.engine.process import core_launcher
from jaxpaged.engine.process.core_supervisor import FACTORY, CoreSupervisor
from jaxpaged.engine.process.zmq_client import ZmqClient, ask_facts
from jaxpaged.errors import ConfigError
from jaxpaged.kv_store.transfer_params import PARAMS
from jaxpaged.messages import EngineCoreRequest, LoRAInfo, LoRARequest, Progress, RequestOutput
from jaxpaged.pooling import PoolingParams, PoolingRequestOutput
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams

logger = logging.getLogger(__name__)

NUM_THREADS = max(2, min(4, os.cpu_count() or 1))
"""For what would hold up the event loop: more of them would only take turns."""
CONNECT_SECONDS = 60.0


class AsyncLLM(AsyncEngineControl):
    """Serves many requests at a time, all of one event loop. `config` is resolved.

    Make one with `from_config`, outside of the event loop or in a thread, since loading takes a while. When the core
    dies or hangs, requests under way raise EngineRestartError, new ones wait for its replacement, and once there will
    be none, everything raises EngineDeadError. With `data_parallel_size` there are several cores, and other requests do
    not notice that one of them is replaced.
    """

    def __init__(
        self,
        config: EngineConfig,
        input_processor: InputProcessor,
        clients: Sequence[ZmqClient],
        supervisors: Sequence[CoreSupervisor | None] = (None,),
        loggers: Sequence[StatLoggers] = (),
    ):
        """`clients` are those of all cores, and `supervisors`, if this front end has them; so are `loggers`."""
        self.config = config
        self.input_processor = input_processor
        self.adapters = AsyncAdapters(config.lora.enable_lora, self.call)
        self._tracer = request_tracer(config)
        pairs = itertools.zip_longest(clients, supervisors)
        self._cores = CoreClients(
            [CoreClient(number, config, input_processor, *pair, self._tracer) for number, pair in enumerate(pairs)],
            settled(config.cache.block_size) if config.cache.enable_prefix_caching else 0,
        )
        for core, each in zip(self._cores.all, loggers):
            core.throughput.also = lambda core=core, each=each: each.tell(core.read_metrics())
        self._numbers = itertools.count()
        self._threads = ThreadPoolExecutor(NUM_THREADS, "prompts")
        self._grammar_threads = ThreadPoolExecutor(MOST_CHILDREN, "grammars")

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        progress: Progress | None = None,
        *,
        step_timeout: float = 300.0,
        max_restarts: int = 5,
        factory: str = FACTORY,
    ) -> "AsyncLLM":
        """Load the model that `config` names in a new process, or in several; `progress` hears, in a thread, how far
        that is.

        `step_timeout`: seconds without a sign of life, such as a compiled program, after which a step counts as hung
        and the process is replaced. `max_restarts`: how often within an hour it is before the engine is dead.
        `factory`: see `core_process.Factory`. Raises ConfigError, CheckpointError, CapacityError or EngineDeadError.
        """
        supervisors, (resolved, input_processor, loggers) = core_launcher.started(
            config,
            progress,
            front_end_with_loggers,
            step_timeout=step_timeout,
            max_restarts=max_restarts,
            factory=factory,
        )
        clients = [ZmqClient(supervisor.address, watch_connection=False) for supervisor in supervisors]
        return cls(core_launcher.config_of_all(resolved, config), input_processor, clients, supervisors, loggers)

    @classmethod
    def from_engine_args(cls, engine_args: Any, progress: Progress | None = None, **options: Any) -> "AsyncLLM":
        """`from_config` from `EngineArgs`, which hold all options of the engine by name."""
        return cls.from_config(engine_args.create_engine_config(), progress, **options)

    @classmethod
    def from_address(cls, address: str, timeout: float = CONNECT_SECONDS) -> "AsyncLLM":
        """Another front end for cores that run already: `address` is that of their first one.

        Raises EngineDeadError when no core answers within `timeout` seconds, and ConfigError for an address of fewer
        cores than there are.
        """
        addresses = address.split(",")
        config, input_processor, loggers = front_end_with_loggers(ask_facts(addresses[0], timeout))
        if len(addresses) != config.parallel.num_cores:
            raise ConfigError(
                f"the address has {len(addresses)} cores, and the engine {config.parallel.num_cores}. Give "
                "the whole address."
            )
        clients = [ZmqClient(each, watch_connection=True) for each in addresses]
        return cls(config, input_processor, clients, loggers=loggers)

    # ---- requests

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | PoolingParams | None,
        request_id: str,
        *,
        lora_request: LoRARequest | LoRAInfo | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
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
        core has no more at a time than keeps it busy. `data_parallel_rank`: the number of the core that computes all
        of it; by default the one that suits it best. `lora_request`: its adapter, read if no request has named it yet.
        Raises RequestError, EngineRestartError or EngineDeadError, and CheckpointError for the adapter.
        """
        tokenization = {
            "truncate_prompt_tokens": truncate_prompt_tokens,
            "add_special_tokens": add_special_tokens,
            **tokenization_options(tokenization_kwargs),
        }
        await self._cores.until_ready(data_parallel_rank)
        lora = None if lora_request is None else await self.adapters.info_of(lora_request)
        if carries_pictures(prompt):
            prompt = await self._with_processed_pictures(prompt, tokenization)
        request, text = await self._processed(
            request_id, prompt, sampling_params, priority=priority, arrival_time=arrival_time, **tokenization
        )
        request.lora = lora
        await self._cores.until_ready(data_parallel_rank)  # it may have ended meanwhile
        if any(request_id in core.output_processor for core in self._cores.all):
            raise id_in_use(request_id)
        salt = salt_with(lora, request.cache_salt)
        core = self._cores.choose(request.prompt_token_ids, salt, data_parallel_rank)
        # What the core still says of an aborted request must not be taken for a later one of the same name.
        expected = self._expect_pictures if request.mm_features else self._expect
        children = await expected(core, request, text, f"{request_id}#{next(self._numbers)}", trace_headers)
        stream = OutputStream(request.sampling_params.output_kind is RequestOutputKind.DELTA, take)
        core.streams[request_id] = stream
        core.throughput.wake()
        log_arrival(request, len(children))
        group = request_id if group is None else group
        core.window.enter(group, children)
        try:
            while core.window.refill(group, CHILDREN_AT_ONCE):
                await asyncio.sleep(0)
            finished = False
            while not finished:
                output = await stream.get()
                finished = output.finished
                late = None if request.pooling_params else output.prompt_logprobs
                if isinstance(late, LatePromptLogprobs):
                    output.prompt_logprobs = await self._in_thread(late.read)
                yield output
        finally:
            if core.streams.get(request_id) is stream:
                core.stop([request_id])
            core.window.leave(group)
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
        self._cores.open()
        pictures = self.input_processor.pictures
        if pictures is not None and has_pictures(messages):
            work = functools.partial(self.input_processor.chat_prompt, messages, **options)
            return await asyncio.get_running_loop().run_in_executor(pictures.threads, work)
        return await self._in_thread(self.input_processor.chat_prompt, messages, **options)

    def suitable_core(
        self, token_ids: Sequence[int], cache_salt: str | None = None, lora: LoRAInfo | None = None
    ) -> int:
        """The `data_parallel_rank` that suits a prompt best now: for requests that are to go where one went."""
        return self._cores.choose(token_ids, salt_with(lora, cache_salt)).number

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests: their last result has finish reason "abort". Unknown ids pass."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        self._cores.open()
        for core in self._cores.all:
            streams = {each: core.streams[each] for each in ids if each in core.streams}
            for result in core.stop(list(streams)):
                streams[result.request_id].put(result)

    async def _expect(
        self,
        core: CoreClient,
        request: EngineCoreRequest,
        text: str | None,
        engine_id: str,
        trace_headers: Mapping[str, str] | None,
    ) -> list[EngineCoreRequest]:
        """Expect the results of a request; what `core` is to compute for it. Many sequences are made in a thread."""
        processor = core.output_processor
        if request.sampling_params.n <= CHILDREN_AT_ONCE:
            return processor.add_request(request, text, engine_id, trace_headers)
        children = await self._in_thread(fan_out, request, engine_id)
        state = await self._in_thread(processor.state_of, request, text, children)
        await core.link.until_ready()
        processor.register(state, children, trace_headers)
        return children

    async def _expect_pictures(
        self, core: CoreClient, request: EngineCoreRequest, *others: Any
    ) -> list[EngineCoreRequest]:
        """The same of a request with pictures, whose pixels go to the core by themselves."""
        request.mm_features, pixels = without_pixels(request.mm_features)
        children = await self._expect(core, request, *others)
        core.pixels.hold(children, pixels)
        return children

    async def _processed(
        self, request_id: str, prompt: Prompt, params: SamplingParams | PoolingParams | None, **options: Any
    ) -> tuple[EngineCoreRequest, str | None]:
        """`InputProcessor.process`, in a thread where it takes long. Grammars, which can take seconds to check, have
        threads of their own, so that prompts do not wait for them."""
        try:
            return await self._process(request_id, prompt, params, **options)
        except BaseException:
            if extra_args := getattr(params, "extra_args", None):
                await let_go(self.call, extra_args.get(PARAMS))
            raise

    async def _process(
        self, request_id: str, prompt: Prompt, params: SamplingParams | PoolingParams | None, **options: Any
    ) -> tuple[EngineCoreRequest, str | None]:
        work = functools.partial(self.input_processor.process, request_id, prompt, params, **options)
        if getattr(params, "structured_outputs", None) is not None:
            async with lease_kept_meanwhile(self.call, self.input_processor.grammar_checker, params):
                return await asyncio.get_running_loop().run_in_executor(self._grammar_threads, work)
        if takes_long(prompt, params):
            return await self._in_thread(work)
        return work()

    async def _with_processed_pictures(self, prompt: Any, tokenization: Mapping[str, Any]) -> Mapping[str, Any]:
        """A prompt whose pictures were read in a thread of their own: they may wait long, and texts must not."""
        pictures = self.input_processor.pictures
        if pictures is None or isinstance(prompt, str):
            return prompt  # it is refused with the reason
        truncation = Truncation(tokenization["truncate_prompt_tokens"])
        work = functools.partial(self.input_processor.prepared, prompt, tokenization["add_special_tokens"], truncation)
        return await asyncio.get_running_loop().run_in_executor(pictures.threads, work)

    async def _in_thread(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **options))

    # ---- the engine

    @property
    def is_running(self) -> bool:
        """Whether the engine serves now."""
        return not self.errored

    @property
    def errored(self) -> bool:
        """Whether the core, or every one, is being replaced, or a core is dead."""
        return self._cores.trouble() is not None

    @property
    def address(self) -> str:
        """Where the cores answer, for `from_address`."""
        return ",".join(core.link.address for core in self._cores.all)

    @property
    def is_alive(self) -> bool:
        """Whether every core serves or is being replaced; False once there will be none in the place of one."""
        return not self._cores.is_dead

    def obstacle(self, when_compiled: bool = True) -> str | None:
        """Why an ordinary request that came now would not be served at full speed; None when it would.

        `when_compiled` False: that it may have to wait for programs to be compiled is no obstacle.
        """
        self._cores.open()
        return self._cores.obstacle(when_compiled)

    async def check_health(self) -> None:
        """Raises EngineDeadError while no core serves, and once one is dead."""
        self._cores.check_health()

    async def call[R](self, call: CoreCall[R]) -> R:
        """The result of the core, or of all of them. Raises what a core raises, EngineError when it went away,
        EngineDeadError."""
        return await self._cores.call(call)

    @property
    def sleep_level(self) -> int | None:
        """How deep the engine sleeps, by what the cores said last; None while one is awake."""
        return self._cores.sleep_level

    def get_metrics(self) -> list[Metric]:
        """All metrics, of each core. What comes from a core is at most a second old while it works."""
        return [metric for core in self._cores.all for metric in core.read_metrics()]

    def note_logprob_difference(self, difference: LogprobDifference) -> None:
        """Show how far a trainer's log probabilities are from the engine's among the metrics."""
        for core in self._cores.all:
            core.metrics.logprob_difference = difference

    def get_num_unfinished_requests(self) -> int:
        return sum(len(core.output_processor) for core in self._cores.all)

    def get_tokenizer(self) -> Any:
        """The tokenizer as transformers has it, see `public_tokenizer`. Raises UsageError when there is none."""
        return public_tokenizer(self.input_processor)

    @property
    def model_config(self) -> ModelConfig:
        """The options of the model, resolved: `model`, `dtype`, `max_model_len`, ..."""
        return self.config.model

    def shutdown(self) -> None:
        """End the cores' processes, if this front end started them. Requests under way raise EngineDeadError."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._grammar_threads.shutdown(wait=False, cancel_futures=True)
        self.input_processor.close()
        for core in self._cores.all:
            core.link.close()
        if self._tracer is not None:
            self._tracer.shutdown()
