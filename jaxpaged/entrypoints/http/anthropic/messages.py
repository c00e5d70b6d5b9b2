"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: answer conversations of blocks, and measure them."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from jaxpaged.entrypoints.http.answer import AnswerPart, AnswerReader
from jaxpaged.entrypoints.http.anthropic.blocks import content_of
from jaxpaged.entrypoints.http.anthropic.ending import messages_usage, stop_reason, stop_sequence
from jaxpaged.entrypoints.http.anthropic.events import Ending, Event, frame, late_error
from jaxpaged.entrypoints.http.anthropic.fields import (
    check_calls_are_found,
    check_prompt_fields,
    check_request_fields,
    conversation,
    engine_names,
    sampling_params,
)
from jaxpaged.entrypoints.http.anthropic.message_stream import MessageStream
from jaxpaged.entrypoints.http.anthropic.protocol import (
    CountTokensRequest,
    CountTokensResponse,
    MessagesRequest,
    MessagesResponse,
    ToolUseBlock,
)
from jaxpaged.entrypoints.http.auth import client_of
from jaxpaged.entrypoints.http.big_answer import answer_of
from jaxpaged.entrypoints.http.body import json_response, off_loop, read_struct
from jaxpaged.entrypoints.http.errors import client_names
from jaxpaged.entrypoints.http.generation import GenerationRequest, collect, stream
from jaxpaged.entrypoints.http.openai.usage import UsageCounter
from jaxpaged.entrypoints.http.prepare import prepare
from jaxpaged.entrypoints.http.service import Service
from jaxpaged.messages import RequestOutput


@dataclass(frozen=True)
class Asked:
    """A checked request, and what the engine is to do for it."""

    wanted: MessagesRequest
    generation: GenerationRequest
    model: str
    reader: AnswerReader


class Messages:
    """The endpoints."""

    def __init__(self, service: Service):
        self._service = service

    async def create(self, request: Request) -> Response:
        """Answer one conversation, at once or as a stream (Anthropic's API)."""
        service = self._service
        wanted = await read_struct(request, MessagesRequest, service.options.max_body_bytes)
        asked = await self._asked(request, wanted)
        request_id = asked.generation.request_id
        if wanted.stream:
            return service.streamed(request_id, self._frames(asked), late_error)
        return await service.answered(request, request_id, self._complete(asked))

    async def count_tokens(self, request: Request) -> Response:
        """How many tokens a conversation has as a prompt (Anthropic's API)."""
        service = self._service
        wanted = await read_struct(request, CountTokensRequest, service.options.max_body_bytes)
        service.check_model(wanted.model)
        return json_response(CountTokensResponse(await off_loop(self._count, wanted)))

    def _count(self, wanted: CountTokensRequest) -> int:
        service = self._service
        check_prompt_fields(wanted)
        asked = conversation(wanted)
        with client_names(engine_names(wanted)):
            prompt = service.prompts.read_chat(
                asked.messages, asked.truncation, asked.add_special_tokens, None, most=service.most_counted,
                **asked.template,
            )  # fmt: skip
        return len(prompt.token_ids)

    async def _asked(self, request: Request, wanted: MessagesRequest) -> Asked:
        service = self._service
        model = service.check_model(wanted.model)
        request_id = service.request_id(request, "msg")
        asked = await off_loop(self._checked, wanted, request_id, model)
        with client_names(asked.generation.names):
            await service.check_shape_for(client_of(request))(asked.generation.params.structured_outputs)
        return asked

    def _checked(self, wanted: MessagesRequest, request_id: str, model: str) -> Asked:
        service = self._service
        check_prompt_fields(wanted)
        check_request_fields(wanted)
        check_calls_are_found(wanted, service.formats.tool_parser)
        names, processor = engine_names(wanted), service.engine.input_processor
        with client_names(names):
            params = sampling_params(wanted, processor.defaults.sampling, processor.thinking_token_ids is not None)
            asked = conversation(wanted, wanted.cache_salt)
            prepared = prepare(asked, params, service.formats, service.prompts)
        reader = AnswerReader(prepared.reading, prepared.prompt.text)
        generation = GenerationRequest(request_id, [prepared.prompt], prepared.params, names=names)
        return Asked(wanted, generation, model, reader)

    async def _complete(self, asked: Asked) -> Response:
        service = self._service
        [output] = await collect(service.engine, service.traffic, asked.generation)
        return await answer_of(asked.generation.size_of([output]), lambda: self._answer(asked, output))

    def _answer(self, asked: Asked, output: RequestOutput) -> MessagesResponse:
        counter = self._counter()
        counter.add(0, output)
        part = asked.reader.read(output.outputs[0])
        content = content_of(part.deltas)
        has_calls = any(isinstance(block, ToolUseBlock) for block in content)
        return message(asked, counter, content, ending(asked, part, counter, has_calls))

    async def _frames(self, asked: Asked) -> AsyncGenerator[bytes]:
        service = self._service
        answer = StreamedAnswer(asked, self._counter())
        async with aclosing(stream(service.engine, service.traffic, asked.generation)) as results:
            async for _, output in results:
                for event in answer.of(output):
                    yield frame(event)

    def _counter(self) -> UsageCounter:
        return UsageCounter(self._service.options.enable_prompt_tokens_details)


class StreamedAnswer:
    """Turns the results of one request into events."""

    def __init__(self, asked: Asked, counter: UsageCounter):
        self._asked = asked
        self._counter = counter
        self._events = MessageStream()
        self._begun = False
        self._has_calls = False

    def of(self, output: RequestOutput) -> Iterator[Event]:
        """Events of a new result; the first opens the message, and the last closes it."""
        self._counter.add(0, output)
        if not self._begun:
            self._begun = True
            yield from self._events.start(message(self._asked, self._counter, []))
        part = self._asked.reader.read(output.outputs[0])
        self._has_calls = self._has_calls or any(delta.tool_call is not None for delta in part.deltas)
        yield from self._events.of(part.deltas)
        if part.finish_reason is not None:
            end = ending(self._asked, part, self._counter, self._has_calls)
            yield from self._events.end(end, messages_usage(self._counter.read()))


def ending(asked: Asked, part: AnswerPart, counter: UsageCounter, has_calls: bool) -> Ending:
    room_left = counter.read().completion_tokens < asked.wanted.max_tokens
    reason = stop_reason(part.finish_reason, part.stop_reason, has_calls, room_left)
    return Ending(reason, stop_sequence(part.stop_reason))


def message(asked: Asked, counter: UsageCounter, content: list, end: Ending | None = None) -> MessagesResponse:
    """The message with this content; without an end it is the beginning of a stream."""
    return MessagesResponse(
        id=asked.generation.request_id,
        model=asked.model,
        content=content,
        stop_reason=end.stop_reason if end else None,
        stop_sequence=end.stop_sequence if end else None,
        usage=messages_usage(counter.read()),
    )
