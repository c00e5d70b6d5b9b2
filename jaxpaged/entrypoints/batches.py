"""Batches of requests in front of an engine: prompts as callers write them, and results until they are asked for.

A caller may give one value for all prompts or one each, and prompts as text, token ids, dicts or chats. Several readers
share one engine in one thread: the one that waits for results steps it, and what the step gives for the requests of
others is kept here until they ask. So a batch may run inside a loop over a stream, and two streams side by side.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from jaxpaged.engine.input.processor import InputProcessor, Prompt
from jaxpaged.engine.llm_engine import LLMEngine
from jaxpaged.engine.output.stream import joined
from jaxpaged.engine.pooling.io_processor import PLUGIN_TASK, processor_of, without_task
from jaxpaged.errors import ConflictError, EngineError, RequestError
from jaxpaged.interrupts import holding_interrupts
from jaxpaged.messages import LoRARequest, RequestOutput
from jaxpaged.pooling import PoolingParams, PoolingRequestOutput
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams

Output = RequestOutput | PoolingRequestOutput
UseTqdm = bool | Callable[..., Any]
"""True for a progress bar on terminals, or a function that makes one."""
LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
"""The adapter of all prompts, or of each."""
TOKENIZED = SamplingParams(seed=0)
"""Parameters with which a prompt is tokenised: a seed of their own, so that none is drawn."""


@contextlib.contextmanager
def naming(what: str, index: int, count: int) -> Iterator[None]:
    """Make a RequestError say which of several prompts is at fault."""
    try:
        yield
    except RequestError as error:
        if count == 1:
            raise
        raise RequestError(f"{what} {index}: {error}", error.parameter) from error


def with_output_kind(params: Any, kind: RequestOutputKind) -> SamplingParams:
    """A copy whose results come in this way. Raises RequestError for what is no SamplingParams."""
    if not isinstance(params, SamplingParams):
        raise RequestError(f"sampling_params is {params!r}; it must be SamplingParams.", "sampling_params")
    copy = params.clone()
    copy.output_kind = kind
    return copy


def batch_of(prompts: Any) -> list[Prompt]:
    """Prompts as a list, of one when it is text, a dict or token ids. Raises RequestError for what is none of it."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise RequestError(f"prompts is {prompts!r}; it must be a prompt or a list of prompts.", "prompts")
    batch = list(prompts)
    is_prompt = batch and not isinstance(batch[0], str | Mapping) and not hasattr(batch[0], "__len__")
    return [prompts] if is_prompt else batch


def with_processor_kwargs(prompts: Any, mm_processor_kwargs: Mapping[str, Any] | None) -> Any:
    """Prompts of which those with pictures, that say nothing themselves of how they are processed, say this."""
    if not mm_processor_kwargs:
        return prompts
    return [
        {**prompt, "mm_processor_kwargs": mm_processor_kwargs}
        if isinstance(prompt, Mapping) and prompt.get("mm_processor_kwargs") is None
        else prompt
        for prompt in batch_of(prompts)
    ]


def is_conversation(messages: Any) -> bool:
    """Whether this is one conversation, not a sequence of them."""
    return len(messages) == 0 or isinstance(messages[0], Mapping | str)


def is_chat(prompt: Any) -> bool:
    """Whether a single prompt is a list of messages, not text, token ids or a dict of them."""
    first = prompt[0] if isinstance(prompt, list | tuple) and prompt else None
    return isinstance(first, Mapping) and "role" in first


def per_prompt(name: str, value: Any, count: int) -> list[Any]:
    """One value per prompt. Raises RequestError when a sequence has another length."""
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{name} has {len(value)} entries for {count} prompts. Give one for all, or one each.", name)
    return list(value)


def with_pooling_options(
    params: PoolingParams | Sequence[PoolingParams] | None, task: str | None, keep: int | None
) -> PoolingParams | list[PoolingParams]:
    """Parameters of one or of each, with what arguments beside them say: their task, and how many tokens stay."""
    changes = {name: each for name, each in {"task": task, "truncate_prompt_tokens": keep}.items() if each is not None}
    if isinstance(params, Sequence):
        return [msgspec.structs.replace(each, **changes) for each in params]
    return msgspec.structs.replace(PoolingParams() if params is None else params, **changes)


def data_of(prompts: Any, task: str | None) -> Any:
    """What is for an I/O processor to read, as {"data": ...}; None for prompts. Raises RequestError for a task of its
    without data."""
    if isinstance(prompts, Mapping) and "data" in prompts:
        if len(prompts) > 1:
            raise RequestError(f"prompts has {', '.join(map(str, prompts))}. Give data alone.", "prompts")
        if prompts["data"] is None:
            raise RequestError("prompts has data, which is None. Give what the I/O processor takes.", "prompts")
        return prompts["data"]
    if task == PLUGIN_TASK:
        raise RequestError('pooling_task is "plugin", but prompts has no data. Give {"data": ...}.', "prompts")
    return None


def processed(
    input_processor: InputProcessor, data: Any, params: Any, request_id: str, encode: Callable[..., Any]
) -> PoolingRequestOutput:
    """What the I/O processor answers to data, in `outputs`. `encode` pools prompts with parameters. Raises RequestError
    for data that it refuses, and EngineError where it fails, or a prompt does."""
    processing = processor_of(input_processor)
    if not isinstance(params, PoolingParams):
        raise RequestError("pooling_params is a list, and data is one request. Give one.", "pooling_params")
    prompts, params = processing.prepared(data, without_task(params), request_id)
    outputs = encode(prompts, params)
    for output in outputs:
        if output.error is not None:
            raise EngineError(output.error)
    answer = processing.answer(outputs, request_id)
    return PoolingRequestOutput(request_id, answer, [], sum(output.num_cached_tokens for output in outputs))


def tokenized(engine: LLMEngine, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    """Prompts as token ids, checked, with what goes along with whatever continues them."""
    found = []
    for index, prompt in enumerate(prompts):
        with naming("prompt", index, len(prompts)):
            request, _ = engine.input_processor.process("", prompt, TOKENIZED)
            start: dict[str, Any] = {"prompt_token_ids": request.prompt_token_ids, "priority": request.priority}
            if request.mm_features:
                start["mm_features"] = request.mm_features
            found.append(start | ({"cache_salt": request.cache_salt} if request.cache_salt else {}))
    return found


class Results:
    """The results of requests that were announced, from steps that are made like this:

    with held_interrupts(), results:
        new = results.keep(engine.step())
    """

    def __init__(self, engine: LLMEngine):
        self._engine = engine
        self._results: dict[str, Output | None] = {}  # by request; None: nothing new
        self._deltas: set[str] = set()  # requests whose results hold only what is new
        self._left: list[str] = []
        self._stepping = False

    def __enter__(self) -> None:
        """Before a step: abort the requests that nobody waits for any more."""
        self._abort_left()
        self._stepping = True

    def __exit__(self, *exception: object) -> None:
        self._stepping = False

    def expect(self, request_id: str, by_delta: bool = False) -> None:
        """Keep the results of a request, the newest of them, or all joined to one if they come `by_delta`."""
        self._results[request_id] = None
        if by_delta:
            self._deltas.add(request_id)

    def keep(self, outputs: Sequence[Output]) -> Sequence[Output]:
        """Keep the results of a step until they are asked for; returns them all.

        Raises ConflictError when the engine sleeps and has nothing to say; requests stay as they are.
        """
        for output in outputs:
            request_id = output.request_id
            if request_id in self._results:
                before = self._results[request_id]
                join = before is not None and request_id in self._deltas
                self._results[request_id] = joined(before, output) if join else output
        if not outputs and self._engine.is_sleeping():
            raise ConflictError("the engine sleeps, so no prompt can be completed. Call wake_up() first.")
        return outputs

    def take(self, request_id: str) -> Output | None:
        """What came of a request since it was asked for last; a finished one is forgotten."""
        output = self._results[request_id]
        self._results[request_id] = None
        if output is not None and output.finished:
            self._forget(request_id)
        return output

    def finished(self, request_ids: Iterable[str]) -> list[Output]:
        """The results of those of these requests that are done."""
        found = (self._results[request_id] for request_id in request_ids)
        return [output for output in found if output is not None and output.finished]

    @holding_interrupts
    def leave(self, request_ids: Sequence[str]) -> None:
        """Forget requests that nobody waits for any more, and abort those under way.

        The garbage collector may close a stream in the middle of a step. The next step aborts its request first.
        """
        for request_id in request_ids:
            self._forget(request_id)
        self._left += request_ids
        if not self._stepping:
            self._abort_left()

    def _forget(self, request_id: str) -> None:
        self._results.pop(request_id, None)
        self._deltas.discard(request_id)

    def _abort_left(self) -> None:
        if self._left:
            left, self._left = self._left, []
            self._engine.abort_request(left)


def numbers(output: PoolingRequestOutput) -> list[float]:
    """The numbers of a result as floats; none where it failed."""
    return [] if output.outputs.data is None else output.outputs.data.tolist()


def with_outputs(output: PoolingRequestOutput, outputs: Any) -> PoolingRequestOutput:
    return msgspec.structs.replace(output, outputs=outputs)
