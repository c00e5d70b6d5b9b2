"""A server in place of an engine, over gRPC: many prompts at a time for `jaxpaged generate`, answers for a chat.

This module knows the client's responses, and what commands ask of an engine.
"""

import contextlib
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgspec

from jaxpaged.client import Answer as WholeAnswer
from jaxpaged.client import Client, ClientError
from jaxpaged.entrypoints.cli.conversation import Answer
from jaxpaged.entrypoints.cli.engine import CHAT_MAX_TOKENS, default_max_tokens
from jaxpaged.entrypoints.cli.remote import flag_of, told
from jaxpaged.entrypoints.for_trainers import array_of
from jaxpaged.errors import RequestError, UsageError
from jaxpaged.messages import CompletionOutput, Logprob, RequestOutput, SamplingMask
from jaxpaged.proto import jaxpaged_pb2 as pb

NOT_SENT = ("detokenize", "skip_reading_prefix_cache")
"""Sampling parameters that the server's interface does not have."""
WITHOUT_END = 2**31 - 1
"""`max_tokens` of who wants as many as the context holds."""
CALLS_AT_ONCE = 64
ENDS_ALL = frozenset({"UNAVAILABLE", "UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED"})
"""Statuses after which no other prompt would fare better."""


def request_values(given: Mapping[str, Any], chat: bool) -> dict[str, Any]:
    """Sampling parameters as `Client.generate` takes them. Raises UsageError for one that cannot be sent."""
    for name in NOT_SENT:
        if given.get(name) is not None:
            raise UsageError(f"{flag_of(name)} cannot be asked of a server. Leave it out.")
    values = {"max_tokens": default_max_tokens(chat), **given}
    if values["max_tokens"] is None:
        values["max_tokens"] = WITHOUT_END
    return values


class RemoteAnswers:
    """Answers of a chat."""

    default_max_tokens = CHAT_MAX_TOKENS

    def __init__(self, client: Client, server: str, model: str | None):
        self._client = client
        self._server = server
        self._model = model

    def ask(self, messages: list[dict[str, Any]], given: Mapping[str, Any], show: Callable[[str], None]) -> Answer:
        values = request_values(given, chat=True)
        begin, first, last, whole = time.monotonic(), None, 0.0, WholeAnswer()
        try:
            with contextlib.closing(self._client.generate(messages, model=self._model, **values)) as responses:
                for response in responses:
                    last = time.monotonic()
                    first = last if first is None else first
                    whole.add(response)
                    show("".join(each.text for each in response.sequences))
        except ClientError as error:
            raise told(error, self._server) from None
        waited = None if first is None else first - begin
        spent = None if first is None else last - first
        return Answer(whole.text, whole.finish_reason, len(whole.token_ids), waited, spent)


class RemoteInputs:
    """In place of an input processor: the server makes tokens of what it gets, and has defaults of its own."""

    defaults = SimpleNamespace(sampling={})

    def __init__(self, chats: bool):
        self.chat_templates = SimpleNamespace(sources={"default": "the server's"} if chats else {})

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        if not self.chat_templates.sources:
            raise RequestError("the server's model has no chat template.", "chat_template")
        return messages


class RemoteEngine:
    """What `batch.Batch` uses of an engine. `model` None: the server's own."""

    def __init__(self, client: Client, server: str, chats: bool, model: str | None):
        self.input_processor = RemoteInputs(chats)
        self._client = client
        self._server = server
        self._model = model
        self._threads = ThreadPoolExecutor(CALLS_AT_ONCE, "calls")
        self._news: queue.SimpleQueue[RequestOutput | Exception] = queue.SimpleQueue()
        self._unfinished: set[str] = set()

    def add_request(self, request_id: str, prompt: Any, values: Mapping[str, Any]) -> None:
        """`values`: see `request_values`. Raises RequestError for a prompt that is none."""
        given = prompt
        if isinstance(prompt, Mapping):
            given = prompt["chat"].messages if "chat" in prompt else prompt["prompt_token_ids"]
        whole = values.get("prompt_logprobs") is not None  # they come with the whole answer only
        try:
            responses = self._client.generate(
                given, model=self._model, return_prompt_token_ids=True, final_only=whole, **values
            )
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise RequestError(f"the prompt cannot be sent to a server: {error}.", "prompt") from None
        self._unfinished.add(request_id)
        self._threads.submit(self._run, request_id, responses)

    def _run(self, request_id: str, responses: Iterable[pb.GenerateResponse]) -> None:
        """In a thread: take the responses to one request."""
        answer = GrowingOutput(request_id)
        try:
            for response in responses:
                self._news.put(answer.grown(response))
            if not answer.finished:
                self._news.put(answer.failed("the server ended the answer before its end."))
        except ClientError as error:
            reason = told(error, self._server)
            self._news.put(reason if error.code in ENDS_ALL else answer.failed(str(reason)))
        except Exception as error:
            self._news.put(error)

    def step(self) -> list[RequestOutput]:
        """What came meanwhile, at least one result. Raises ServerError when the server has gone."""
        outputs: dict[str, RequestOutput] = {}
        for item in self._waiting_news():
            if isinstance(item, Exception):
                raise item
            outputs[item.request_id] = item
            if item.finished:
                self._unfinished.discard(item.request_id)
        return list(outputs.values())

    def _waiting_news(self) -> Iterator[RequestOutput | Exception]:
        yield self._news.get()
        while not self._news.empty():
            yield self._news.get()

    def abort_request(self, request_ids: Sequence[str]) -> None:
        """Only all of them can be ended: the connection is closed."""
        self._client.close()

    def has_unfinished_requests(self) -> bool:
        return bool(self._unfinished)

    def shutdown(self) -> None:
        self._client.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


class GrowingOutput:
    """One request: its responses, of which each is what is new, as results that hold everything so far."""

    def __init__(self, request_id: str):
        self._request_id = request_id
        self._prompt_ids: list[int] = []
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._sequences: dict[int, CompletionOutput] = {}
        self._num_cached: int | None = None
        self._error: str | None = None
        self.finished = False

    def grown(self, response: pb.GenerateResponse) -> RequestOutput:
        """The result with what `response` adds."""
        self._prompt_ids += response.prompt_token_ids.ids
        if response.prompt_logprobs:
            lines = [candidates(line) for line in response.prompt_logprobs]
            self._prompt_logprobs = [line or None for line in lines]
        for delta in response.sequences:
            before = self._sequences.get(delta.index)
            self._sequences[delta.index] = longer(before or empty(delta.index), delta)
        if response.HasField("usage"):
            self.finished = True
            self._num_cached = response.usage.cached_tokens if response.usage.HasField("cached_tokens") else None
        return self._output()

    def failed(self, error: str) -> RequestOutput:
        """The result when nothing more comes."""
        self.finished, self._error = True, error
        for index in [*self._sequences] or [0]:
            self._sequences[index] = msgspec.structs.replace(
                self._sequences.get(index) or empty(index), finish_reason="error"
            )
        return self._output()

    def _output(self) -> RequestOutput:
        outputs = [self._sequences[index] for index in sorted(self._sequences)]
        return RequestOutput(
            self._request_id,
            None,
            self._prompt_ids,
            self._prompt_logprobs,
            outputs,
            self.finished,
            None,
            self._num_cached,
            self._error,
        )


def empty(index: int) -> CompletionOutput:
    return CompletionOutput(index, "", [], None, None)


def longer(before: CompletionOutput, delta: pb.SequenceDelta) -> CompletionOutput:
    lines, total = before.logprobs, before.cumulative_logprob
    if delta.logprobs:
        new = [candidates(line) for line in delta.logprobs]
        lines = [*(lines or ()), *new]
        total = (total or 0.0) + sum(next(iter(line.values())).logprob for line in new)
    mask = before.sampling_mask
    if delta.sampling_mask:
        mask = SamplingMask([*(mask.token_ids if mask else ()), *(list(each.ids) for each in delta.sampling_mask)])
    stop = delta.WhichOneof("stop_reason")
    return msgspec.structs.replace(
        before,
        text=before.text + delta.text,
        token_ids=[*before.token_ids, *delta.token_ids],
        logprobs=lines,
        cumulative_logprob=total,
        finish_reason=delta.finish_reason or None,
        stop_reason=getattr(delta, stop) if stop else None,
        sampling_mask=mask,
        routed_experts=array_of(delta.routed_experts) if delta.routed_experts else None,
    )


def candidates(line: pb.TokenLogprobs) -> dict[int, Logprob]:
    return {each.token_id: Logprob(each.logprob, each.rank or None, each.token or None) for each in line.candidates}
