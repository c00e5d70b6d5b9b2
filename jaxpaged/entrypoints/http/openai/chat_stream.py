"""Chunks of a streamed chat answer."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

import msgspec

from jaxpaged.entrypoints.http.answer import AnswerReader
from jaxpaged.entrypoints.http.openai.chat_protocol import (
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatDelta,
    ChatStreamChoice,
    ChatToolCallDelta,
    FunctionDelta,
)
from jaxpaged.entrypoints.http.openai.events import PLACEHOLDER, ChunkWriter, TextEvents
from jaxpaged.entrypoints.http.openai.fields import UsageOptions
from jaxpaged.entrypoints.http.openai.logprobs import ChatLogprobs, chat_logprobs
from jaxpaged.entrypoints.http.openai.usage import UsageCounter
from jaxpaged.messages import CompletionOutput, RequestOutput
from jaxpaged.parsing.deltas import Delta


class ChatStream:
    """Turns results into events: for every answer its role, what it says as it comes, and how it ended.

    `new_reader` makes what reads one of the answers.
    """

    def __init__(
        self,
        wanted: ChatCompletionRequest,
        request_id: str,
        model: str,
        role: str,
        echo: str,
        usage: UsageOptions,
        counter: UsageCounter,
        new_reader: Callable[[], AnswerReader],
    ):
        self._readers = defaultdict(new_reader)
        self._chunks = ChunkWriter(ChatCompletionChunk, "chat.completion.chunk", request_id, model, usage, counter)
        self._role = role
        self._echo = echo
        self._counter = counter
        self._n = wanted.n or 1
        self._top = len(wanted.logprob_token_ids) if wanted.logprob_token_ids else wanted.top_logprobs or 0
        self._as_ids = bool(wanted.return_tokens_as_token_ids)
        self._with_ids = bool(wanted.return_token_ids)
        self._with_prompt = bool(wanted.return_prompt_text)
        self._only_text = not (self._with_ids or usage.in_every_chunk)  # beyond what the engine may give with a token
        self._text_events: dict[int, TextEvents] = {}  # of answers that have begun
        self._begun = False

    def of(self, output: RequestOutput) -> Iterator[bytes]:
        """Events of a new result; before the first come those that open every answer."""
        if not self._begun:
            self._begun = True
            yield from self._opening(output)
        self._counter.add(0, output)
        for completion in output.outputs:
            if self._is_text(completion):
                if completion.text:
                    yield self._text_event(completion.index, completion.text)
                continue
            for choice in self._choices(completion):
                yield self._chunks.chunk(choice)

    @property
    def readers(self) -> Iterable[AnswerReader]:
        """What has read the answers that have come."""
        return self._readers.values()

    def _is_text(self, completion: CompletionOutput) -> bool:
        """Whether a result brings nothing but text, all of which is content. This is the way of most tokens."""
        goes_on = completion.finish_reason is None and completion.logprobs is None
        return goes_on and self._only_text and self._readers[completion.index].is_plain

    def _text_event(self, index: int, text: str) -> bytes:
        events = self._text_events.get(index)
        if events is None:
            delta = ChatDelta(content=PLACEHOLDER)
            choice = ChatStreamChoice(index=index, delta=delta, logprobs=None, finish_reason=None)
            events = self._text_events[index] = TextEvents(self._chunks.chunk(choice))
        return events.of(text)

    def last(self, num_thinking: int | None = None) -> bytes:
        """The event with the usage of the whole request."""
        return self._chunks.last(num_thinking)

    def _opening(self, output: RequestOutput) -> Iterator[bytes]:
        for index in range(self._n):
            opening = ChatStreamChoice(
                index=index, delta=ChatDelta(role=self._role, content=""), logprobs=None, finish_reason=None
            )
            yield self._chunks.chunk(
                opening,
                prompt_token_ids=output.prompt_token_ids if self._with_ids else None,
                prompt_text=output.prompt if self._with_prompt else None,
            )
        for index in range(self._n if self._echo else 0):
            echo = ChatStreamChoice(index=index, delta=ChatDelta(content=self._echo), logprobs=None, finish_reason=None)
            yield self._chunks.chunk(echo)

    def _shows_tokens(self, completion: CompletionOutput) -> bool:
        """Whether there is something to show although the text has not grown."""
        return bool(completion.token_ids) and (self._with_ids or completion.logprobs is not None)

    def _choices(self, completion: CompletionOutput) -> Iterator[ChatStreamChoice]:
        """One for every piece. The first has the tokens, the last says how the answer ended."""
        part = self._readers[completion.index].read(completion)
        ended = part.finish_reason is not None
        deltas = [chat_delta(delta) for delta in part.deltas]
        if not deltas and (ended or self._shows_tokens(completion)):
            deltas = [ChatDelta(content="")]
        for place, delta in enumerate(deltas):
            is_last = ended and place == len(deltas) - 1
            yield ChatStreamChoice(
                index=completion.index,
                delta=delta,
                logprobs=None if place else self._logprobs(completion),
                finish_reason=part.finish_reason if is_last else None,
                stop_reason=part.stop_reason if is_last else msgspec.UNSET,
                token_ids=completion.token_ids if self._with_ids and not place else None,
            )

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if not completion.logprobs:
            return None
        return chat_logprobs(completion.token_ids, completion.logprobs, self._top, self._as_ids)


def chat_delta(delta: Delta) -> ChatDelta:
    call = delta.tool_call
    if call is None:
        return ChatDelta(reasoning=delta.reasoning) if delta.content is None else ChatDelta(content=delta.content)
    function = FunctionDelta(call.name, call.arguments)
    return ChatDelta(tool_calls=[ChatToolCallDelta(call.index, call.id, call.id and "function", function)])
