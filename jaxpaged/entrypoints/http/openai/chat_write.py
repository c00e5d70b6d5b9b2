"""Results of the engine as what `/v1/chat/completions` answers: the whole, or the chunks of a stream."""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from jaxpaged.engine.input.tokenizer import Tokenizer
from jaxpaged.entrypoints.http.openai.chat_parse import ParsedChat
from jaxpaged.entrypoints.http.openai.events import PLACEHOLDER, OpenAIStream, TextEvents
from jaxpaged.entrypoints.http.openai.logprobs import ChatLogprobs, chat_logprobs, prompt_logprobs
from jaxpaged.entrypoints.http.openai.protocol import (
    CalledFunction,
    ChatChoice,
    ChatCompletionChunk,
    ChatCompletionResponse,
    ChatDelta,
    ChatMessage,
    ChatStreamChoice,
    ChatToolCall,
    ChatToolCallDelta,
    FunctionDelta,
)
from jaxpaged.entrypoints.http.openai.usage import usage_of
from jaxpaged.messages import CompletionOutput, RequestOutput
from jaxpaged.parsing.deltas import Delta, ParsedMessage
from jaxpaged.serving.output_reader import OutputReader, UsageCounter
from jaxpaged.serving.service import Service


def answer(service: Service, chat: ParsedChat, outputs: Sequence[RequestOutput]) -> ChatCompletionResponse:
    """The whole of it: `outputs` is the last result of the one prompt."""
    [output], body, tokenizer = outputs, chat.body, service.engine.input_processor.tokenizer
    usage = UsageCounter(service.options.enable_prompt_tokens_details)
    usage.add(0, output)
    readers = [chat.new_reader() for _ in output.outputs]
    return ChatCompletionResponse(
        id=chat.generation.request_id,
        created=int(time.time()),
        model=chat.model,
        choices=[choice(chat, tokenizer, *each) for each in zip(output.outputs, readers)],
        usage=usage_of(usage, num_thinking=num_thinking(service, chat, readers)),
        prompt_logprobs=prompt_logprobs(output.prompt_logprobs),
        prompt_token_ids=output.prompt_token_ids if body.return_token_ids else None,
        prompt_text=output.prompt if body.return_prompt_text else None,
        kv_transfer_params=output.kv_transfer_params,
    )


def num_thinking(service: Service, chat: ParsedChat, readers: Iterable[OutputReader]) -> int | None:
    """Tokens of thinking, once the answers are read: of the text, so that it costs nothing while tokens come."""
    if chat.reading.reasoning_parser is None:
        return None
    return sum(service.count_tokens(reader.thinking) for reader in readers)


def choice(chat: ParsedChat, tokenizer: Tokenizer, completion: CompletionOutput, reader: OutputReader) -> ChatChoice:
    body, logprobs = chat.body, None
    if completion.logprobs is not None:
        as_ids = bool(body.return_tokens_as_token_ids)
        logprobs = chat_logprobs(tokenizer, completion.token_ids, completion.logprobs, body.num_logprobs, as_ids)
    part = reader.read(completion)
    return ChatChoice(
        index=completion.index,
        message=chat_message(chat, part.message),
        logprobs=logprobs,
        finish_reason=part.finish_reason,
        stop_reason=part.stop_reason,
        token_ids=completion.token_ids if body.return_token_ids else None,
    )


def chat_message(chat: ParsedChat, parsed: ParsedMessage) -> ChatMessage:
    """Without content there is null beside calls or thinking, and an empty text where there is nothing at all."""
    calls = [ChatToolCall(call.id, CalledFunction(call.name, call.arguments)) for call in parsed.tool_calls]
    is_text = parsed.content is not None or not (calls or parsed.reasoning)
    return ChatMessage(
        role=chat.role,
        content=chat.echo + (parsed.content or "") if is_text else chat.echo or None,
        reasoning=parsed.reasoning,
        tool_calls=calls or msgspec.UNSET,
    )


class ChatStream(OpenAIStream):
    """Writes the chunks of a stream: for every answer its role, what it says as it comes, and how it ended."""

    def __init__(self, service: Service, chat: ParsedChat):
        super().__init__(service, chat, ChatCompletionChunk, "chat.completion.chunk")
        self._service = service
        self._chat = chat
        body = chat.body
        self._readers = defaultdict(chat.new_reader)
        self._n = body.n or 1
        self._top = body.num_logprobs or 0
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._with_ids = bool(body.return_token_ids)
        self._with_prompt = bool(body.return_prompt_text)
        # Beyond what the engine may give with a token:
        self._only_text = not (self._with_ids or self._usage.in_every_chunk)
        self._text_events: dict[int, TextEvents] = {}  # of answers that have begun
        self._begun = False

    def of(self, number: int, output: RequestOutput) -> bytes:
        """Events of a new result; before the first come those that open every answer."""
        events = b""
        if not self._begun:
            self._begun = True
            events = b"".join(self._opening(output))
        self._counter.add(number, output)
        events += self.lent(output)
        for completion in output.outputs:
            if not self._is_text(completion):
                events += b"".join(map(self._chunks.chunk, self._choices(completion)))
            elif completion.text:
                events += self._text_event(completion.index, completion.text)
        return events

    def _num_thinking(self) -> int | None:
        return num_thinking(self._service, self._chat, self._readers.values())

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

    def _opening(self, output: RequestOutput) -> Iterator[bytes]:
        for index in range(self._n):
            opening = ChatStreamChoice(
                index=index, delta=ChatDelta(role=self._chat.role, content=""), logprobs=None, finish_reason=None
            )
            yield self._chunks.chunk(
                opening,
                prompt_token_ids=output.prompt_token_ids if self._with_ids else None,
                prompt_text=output.prompt if self._with_prompt else None,
            )
        for index in range(self._n if self._chat.echo else 0):
            delta = ChatDelta(content=self._chat.echo)
            yield self._chunks.chunk(ChatStreamChoice(index=index, delta=delta, logprobs=None, finish_reason=None))

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
        tokenizer = self._service.engine.input_processor.tokenizer
        return chat_logprobs(tokenizer, completion.token_ids, completion.logprobs, self._top, self._as_ids)


def chat_delta(delta: Delta) -> ChatDelta:
    call = delta.tool_call
    if call is None:
        return ChatDelta(reasoning=delta.reasoning) if delta.content is None else ChatDelta(content=delta.content)
    function = FunctionDelta(call.name, call.arguments)
    return ChatDelta(tool_calls=[ChatToolCallDelta(call.index, call.id, call.id and "function", function)])
