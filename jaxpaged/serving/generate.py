"""A request to generate, in no protocol's words: prepared for the engine, and its results as they come, or at the end.

Protocols parse into `GenerateRequest`, whose fields have the names of `SamplingParams` and of this module; `names` says
what the protocol calls those that it calls otherwise, and so do errors. `prepare` makes token ids of the prompts and
finds out how results are read; `stream` and `collect` take the prompts through the engine. What results become this
module does not know.
"""

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from jaxpaged.engine.early_leases import lease_kept_meanwhile, let_go
from jaxpaged.engine.input.tokenizer import Truncation
from jaxpaged.engine.observability.tracing import ID_HEADER
from jaxpaged.kv_store.transfer_params import PARAMS
from jaxpaged.messages import LoRAInfo, RequestOutput
from jaxpaged.pooling import PoolingParams, PoolingRequestOutput
from jaxpaged.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from jaxpaged.sampling_params.structured_outputs import StructuredOutputsParams
from jaxpaged.serving.admission import Load, Traffic
from jaxpaged.serving.engine_client import Engine
from jaxpaged.serving.errors import ServingError, client_names, failed_request
from jaxpaged.serving.output_reader import OutputReader, Reading
from jaxpaged.serving.prompts import Conversation, TokenPrompt, has_pictures, read_conversation
from jaxpaged.serving.requests import RequestContext
from jaxpaged.serving.service import Service

MAX_STOP_STRINGS = 4
TOKEN_BYTES = 8
"""Of text and id of a token in a response, about."""
LOGPROB_BYTES = 80
"""Of one log probability, with the token that it is of."""
CHOICE_BYTES = 200
"""Of a sequence in a response, besides its tokens."""
NUMBER_BYTES = 12
"""Of a number of a vector."""
MANY_PROMPTS = 200
RESULTS_AT_ONCE = 64
MOST_ARRIVED = 256
"""Results of many prompts that wait for a client that reads slowly; the engine joins what comes meanwhile."""
READERS_AT_ONCE = 8
"""Prompts of a request that begin between two looks at what others want."""
Output = RequestOutput | PoolingRequestOutput
Numbered = tuple[int, Output]
"""The number of a prompt, and a result of it."""
NumberedTaker = Callable[[int, Output], bool]
"""Takes them where they arise; False: not now, so it comes by the way of all others."""


@dataclass(frozen=True)
class TextPrompts:
    """Texts or token ids to continue. `structured_outputs`: what the outputs must look like. `images`: bytes or URLs of
    pictures, or None with a uuid, for one prompt that has a mark for each; `image_uuids` are as many."""

    prompts: Sequence[str | list[int]]
    truncation: Truncation = field(default_factory=Truncation)
    add_special_tokens: bool = True
    cache_salt: str | None = None
    structured_outputs: StructuredOutputsParams | None = None
    images: Sequence[bytes | str | None] = ()
    image_uuids: Sequence[str | None] = ()


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """What a client asks the model to generate.

    `params` are the client's over the model's defaults; with `beams` nothing is drawn. `names`: what this module and
    the engine call a field -> what the request calls it. `repeats_prompt`: the response has the prompt too.
    """

    prompt: TextPrompts | Conversation
    params: SamplingParams
    beams: BeamSearchParams | None = None
    priority: int = 0
    names: Mapping[str, str] = MappingProxyType({})
    repeats_prompt: bool = False

    @property
    def has_pictures(self) -> bool:
        if isinstance(self.prompt, Conversation):
            return has_pictures(self.prompt.messages)
        return bool(self.prompt.images)


@dataclass(frozen=True)
class EngineRequest:
    """What one HTTP request asks the engine for: sequences that are drawn, or with `beams` the best that are found, or
    with `PoolingParams` vectors.

    `names`: what the engine calls a field -> what the request calls it.
    """

    request_id: str
    prompts: Sequence[TokenPrompt]
    params: SamplingParams | PoolingParams
    priority: int = 0
    names: Mapping[str, str] = MappingProxyType({})
    beams: BeamSearchParams | None = None
    repeats_prompt: bool = False  # in the response
    data_parallel_rank: int | None = None  # the engine core for it
    trace: Mapping[str, str] | None = None  # None: nothing is traced
    lora: LoRAInfo | None = None
    unique: str = field(default_factory=lambda: os.urandom(4).hex())

    def engine_id(self, number: int) -> str:
        """The engine's id of prompt `number`: no two requests have the same, whatever ids clients choose."""
        return f"{self.request_id}-{number}-{self.unique}"

    @property
    def group(self) -> str:
        """The engine's name for all prompts together."""
        return f"{self.request_id}-{self.unique}"

    @property
    def shape(self) -> StructuredOutputsParams | None:
        """What the responses must look like."""
        return None if self.is_pooling else self.params.structured_outputs

    @property
    def media_tokens(self) -> Mapping[str, int]:
        """Of all prompts, by modality."""
        return sum([prompt.media_tokens for prompt in self.prompts], Counter())

    @property
    def is_pooling(self) -> bool:
        return isinstance(self.params, PoolingParams)

    def load(self, max_model_len: int) -> Load:
        """The engine completes every beam by itself."""
        num_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        width = 1 if self.beams is None else self.beams.beam_width
        ids = [self.engine_id(number) for number in range(len(self.prompts) * width)]
        answer_bytes = sum(self._most_answer_bytes(len(prompt.token_ids), max_model_len) for prompt in self.prompts)
        num_sequences = len(ids) if self.is_pooling else len(ids) * self.params.n
        return Load(self.request_id, ids, num_sequences, num_tokens, answer_bytes * width)

    def _most_answer_bytes(self, num_prompt_tokens: int, max_model_len: int) -> int:
        """That are held for one prompt until its last sequence is done."""
        if self.is_pooling or self.params.output_kind is RequestOutputKind.DELTA:
            return 0
        room = max(max_model_len - num_prompt_tokens, 1)
        return self._answer_bytes(num_prompt_tokens, self.params.n * min(self.params.max_tokens or room, room))

    def _answer_bytes(self, num_prompt_tokens: int, num_new_tokens: int) -> int:
        params = self.params
        in_prompt = 0 if params.prompt_logprobs is None else LOGPROB_BYTES * (1 + reported(params.prompt_logprobs))
        in_prompt += TOKEN_BYTES * self.repeats_prompt
        in_new = TOKEN_BYTES
        in_new += 0 if params.logprobs is None else LOGPROB_BYTES * (1 + reported(params.logprobs))
        return params.n * num_prompt_tokens * in_prompt + num_new_tokens * in_new

    def size_of(self, outputs: Sequence[Output]) -> int:
        """Bytes of the response that these are, about; of many prompts, at least."""
        if self.is_pooling:
            return NUMBER_BYTES * sum(each.outputs.data.size for each in outputs)
        choices = CHOICE_BYTES * len(outputs) * self.params.n
        if len(outputs) > MANY_PROMPTS:  # to count them would be work itself
            return choices
        counts = [(len(each.prompt_token_ids), sum(len(one.token_ids) for one in each.outputs)) for each in outputs]
        return choices + sum(self._answer_bytes(*each) for each in counts)


def reported(count: int) -> int:
    """-1, the whole vocabulary, is possible only where the engine allows as many, so its size is no attack."""
    return max(count, 0)


@dataclass(frozen=True)
class PreparedRequest:
    """What the engine is to do, and how its results are read."""

    generation: EngineRequest
    reading: Reading = Reading()

    def new_reader(self) -> OutputReader:
        """What reads one of the sequences."""
        return OutputReader(self.reading, self.generation.prompts[0].ending)


def prepare(service: Service, request: GenerateRequest, context: RequestContext) -> PreparedRequest:
    """Takes long for long prompts. Raises ServingError and RequestError for what cannot be."""
    prompt, params, reading = request.prompt, request.params, Reading()
    num_prompts = len(prompt.prompts) if isinstance(prompt, TextPrompts) else 1
    service.traffic.check_num_sequences(num_prompts, params.n if request.beams is None else request.beams.beam_width)
    with client_names(request.names):
        if isinstance(prompt, Conversation):
            only, params, reading = read_conversation(prompt, params, service.formats, service.prompts)
            prompts = [only]
        elif prompt.images:
            params.structured_outputs = prompt.structured_outputs
            data = {"multi_modal_data": {"image": list(prompt.images)}}
            uuids = {"multi_modal_uuids": {"image": list(prompt.image_uuids)}} if any(prompt.image_uuids) else {}
            prompts = [
                service.prompts.read_seen(
                    each, {**data, **uuids}, prompt.truncation, prompt.add_special_tokens, prompt.cache_salt
                )
                for each in prompt.prompts
            ]
        else:
            params.structured_outputs = prompt.structured_outputs
            prompts = service.prompts.read(
                prompt.prompts, prompt.truncation, prompt.add_special_tokens, prompt.cache_salt
            )
    generation = EngineRequest(
        context.request_id,
        prompts,
        params,
        request.priority,
        request.names,
        request.beams,
        request.repeats_prompt,
        context.data_parallel_rank,
        context.trace,
        context.lora,
    )
    return PreparedRequest(generation, reading)


async def check_shape(service: Service, generation: EngineRequest, context: RequestContext) -> None:
    """Raise RequestError for a shape that cannot be; it is looked at in the turns of who asks."""
    if generation.shape is None:
        return
    engine = service.engine
    checker = engine.input_processor.grammar_checker
    kept = lease_kept_meanwhile(engine.call, checker, generation.params, gives_back=False)
    with client_names(generation.names):
        async with kept:
            await service.grammars.check(generation.shape, context)


def sampling_params(
    given: Mapping[str, Any],
    defaults: Mapping[str, Any],
    *,
    streams: bool,
    kv_transfer_params: Mapping[str, Any] | None = None,
) -> SamplingParams:
    """The request's own parameters over the model's `defaults`. Without a limit it goes on to the end of the context.

    Raises RequestError for values that cannot be.
    """
    values = {"max_tokens": None, **defaults, "logprobs": None, **given}
    if kv_transfer_params:
        values["extra_args"] = {**(values.get("extra_args") or {}), PARAMS: kv_transfer_params}
    kind = RequestOutputKind.DELTA if streams else RequestOutputKind.FINAL_ONLY
    return SamplingParams.from_dict({**values, "output_kind": kind})


def check_stop(name: str, stop: str | Sequence[str] | None) -> None:
    if stop is not None and not isinstance(stop, str) and len(stop) > MAX_STOP_STRINGS:
        raise ServingError(f"{name} has {len(stop)} texts; at most {MAX_STOP_STRINGS} are looked for.", name)


def check_logprobs(name: str, logprobs: int | None) -> None:
    if logprobs is not None and logprobs < -1:
        raise ServingError(f"{name} is {logprobs}; it must be at least -1, which means all.", name)


async def stream(
    engine: Engine, traffic: Traffic, request: EngineRequest, take: NumberedTaker | None = None
) -> AsyncGenerator[Numbered]:
    """Results of all prompts as they come; closing the generator aborts those that are not done.

    What `take` takes is not among them. It is asked while the generator is awaited, if there is one prompt only, since
    those of several wait for each other. Raises ServingError when there is no room or when a prompt fails, and what the
    engine raises.
    """
    try:
        with client_names(request.names), traffic.admitted(request.load(engine.input_processor.max_model_len)):
            async with contextlib.aclosing(all_results(engine, request, take)) as results:
                async for numbered in results:
                    yield numbered
    except BaseException:
        if not request.is_pooling and request.params.extra_args:  # another engine may lend its prompt
            await let_go(engine.call, request.params.extra_args.get(PARAMS))
        raise


async def collect(engine: Engine, traffic: Traffic, request: EngineRequest) -> list[Output]:
    """The last result of every prompt, in order. Raises what `stream` does."""
    with client_names(request.names), traffic.admitted(request.load(engine.input_processor.max_model_len)):
        return await last_results(engine, request)


async def last_results(engine: Engine, request: EngineRequest) -> list[Output]:
    """`collect` of a request that was admitted."""
    last: dict[int, Output] = {}
    async with contextlib.aclosing(all_results(engine, request)) as results:
        async for number, output in results:
            last[number] = output
    return [last[number] for number in range(len(request.prompts))]


def all_results(engine: Engine, request: EngineRequest, take: NumberedTaker | None = None) -> AsyncGenerator[Numbered]:
    """`stream` of a request that was admitted."""
    return results_of(engine, request, 0, take) if len(request.prompts) == 1 else merged(engine, request)


async def results_of(
    engine: Engine, request: EngineRequest, number: int, take: NumberedTaker | None = None
) -> AsyncGenerator[Numbered]:
    """Results of one prompt. Raises ServingError when it fails while it is computed."""
    async with contextlib.aclosing(outputs_of(engine, request, number, take)) as outputs:
        async for output in outputs:
            yield number, checked(output)


def outputs_of(
    engine: Engine, request: EngineRequest, number: int, take: NumberedTaker | None
) -> AsyncGenerator[Output]:
    """What the engine says of one prompt."""
    prompt, engine_id = request.prompts[number].for_engine(), request.engine_id(number)
    group, core = request.group, request.data_parallel_rank
    headers = None if request.trace is None else {**request.trace, ID_HEADER: request.request_id}
    adapter: Mapping[str, Any] = {} if request.lora is None else {"lora_request": request.lora}
    if request.is_pooling:
        return engine.encode(
            prompt,
            request.params,
            engine_id,
            priority=request.priority,
            trace_headers=headers,
            group=group,
            data_parallel_rank=core,
            **adapter,
        )
    return engine.generate(
        prompt,
        request.params,
        engine_id,
        priority=request.priority,
        trace_headers=headers,
        group=group,
        data_parallel_rank=core,
        take=None if take is None else lambda output: take(number, checked(output)),
        **adapter,
    )


def checked[O: Output](output: O) -> O:
    """The result. Raises ServingError when it says that its prompt failed."""
    if output.error is not None:
        raise failed_request(output.error)
    if isinstance(output, RequestOutput):
        for completion in output.outputs:
            if completion.finish_reason == "error":
                raise failed_request(None)
    return output


async def merged(engine: Engine, request: EngineRequest) -> AsyncGenerator[Numbered]:
    """Results of several prompts in the order in which they come. The first failure ends them all."""
    arrived: asyncio.Queue[Numbered | BaseException | None] = asyncio.Queue(MOST_ARRIVED)

    async def read(number: int) -> None:
        try:
            async with contextlib.aclosing(results_of(engine, request, number)) as results:
                async for numbered in results:
                    await arrived.put(numbered)
            await arrived.put(None)
        except Exception as error:
            await arrived.put(error)

    readers: list[asyncio.Future[None]] = []
    try:
        for number in range(len(request.prompts)):
            readers.append(asyncio.ensure_future(read(number)))
            if not len(readers) % READERS_AT_ONCE:
                await asyncio.sleep(0)
        num_open, num_taken = len(readers), 0
        while num_open:
            num_taken += 1
            if not num_taken % RESULTS_AT_ONCE:
                await asyncio.sleep(0)
            item = await arrived.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        unfinished = [reader for reader in readers if not reader.done()]
        for reader in unfinished:
            reader.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)
