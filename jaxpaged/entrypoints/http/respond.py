"""How every API answers what the engine has to compute: in four stages, each of which hands its result to the next.

    protocol   the structs of the body and of the response
    parse      body -> Parsed: what the engine is to do; what cannot be is refused here, by the name of its field
    generate   Parsed -> results of the engine (`generate.py`)
    write      results -> the response, or the events of a stream, each result by itself and at once

An API declares its stages as `Stages`; `respond` is the route of all of them. Most tokens of a stream pass the last two
where they arise, among those of all others that a step gave: the result goes through the writer into the client's
connection, and no task has its turn for it (`streamed_pieces`). This module knows no API.
"""

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from jaxpaged.entrypoints.http.body import num_bytes_of, read_struct
from jaxpaged.entrypoints.http.endpoint import client_of, request_id_of, take_priority
from jaxpaged.entrypoints.http.errors import HttpError
from jaxpaged.entrypoints.http.transport.sending import (
    CLIENT_CLOSED_REQUEST,
    EventStream,
    LastPiece,
    Pieces,
    Pipe,
    json_in_pieces,
    response_unless_left,
    until_disconnect,
)
from jaxpaged.serving.beam_search import search
from jaxpaged.serving.errors import ServingError
from jaxpaged.serving.generate import EngineRequest, Output, check_shape, collect, stream
from jaxpaged.serving.output_reader import OutputReader, Reading
from jaxpaged.serving.requests import CORE_HEADER, RequestContext, chosen_core, off_loop, trace_in
from jaxpaged.serving.service import Service


@dataclass(frozen=True)
class Parsed[Body]:
    """A request that was checked: what the client said, and what the engine is to do for it.

    `model` is the name under which the response goes out, and `reading` says how a text is read that answers a chat.
    """

    body: Body
    model: str
    generation: EngineRequest
    reading: Reading = Reading()

    def new_reader(self) -> OutputReader:
        """What reads one of the responses."""
        return OutputReader(self.reading, self.generation.prompts[0].ending)


class EventWriter(Protocol):
    """Writes one stream: the events of results, in the order in which these come."""

    def of(self, number: int, output: Any) -> bytes:
        """Events of a new result of prompt `number`; empty if it says nothing that a client sees."""
        ...

    def end(self) -> bytes:
        """Events after the last result."""
        ...

    def late_error(self, error: ServingError) -> bytes:
        """Events for a failure after the first result: they take the place of the rest."""
        ...


@dataclass(frozen=True)
class Stages:
    """The stages of one API. `prefix` begins its ids; its body has `model`, and may have `request_id`.

    Where a body has `stream`, there is a `writer`.
    """

    prefix: str
    body: type
    parse: Callable[[Service, Any, RequestContext], Parsed]  # of a body
    write: Callable[[Service, Parsed, Sequence[Output]], Any]
    writer: Callable[[Service, Parsed], EventWriter] | None = None
    has_pictures: Callable[[Any], bool] | None = None  # a body that may hold some


async def respond(service: Service, stages: Stages, request: Request) -> Response:
    """The response to a request, or the stream of its events."""
    await service.pace.turn()
    body = await read_struct(request, stages.body, service.max_body_bytes)
    return await respond_to(service, stages, request, body)


async def respond_to(service: Service, stages: Stages, request: Request, body: Any) -> Response:
    """`respond`, to a body that was read."""
    context = await context_of(service, stages.prefix, request, body)
    parsed = await parse(service, stages, body, context)
    if stages.writer is not None and body.stream:
        return streamed(service, context.request_id, parsed.generation, stages.writer(service, parsed))
    return await unless_left(service, request, context.request_id, whole_response(service, stages, parsed))


async def parse(service: Service, stages: Stages, body: Any, context: RequestContext) -> Parsed:
    """The stage `parse`, off the loop where it takes long.

    Raises ServingError and RequestError for what cannot be.
    """
    threads = None
    if service.takes_pictures and stages.has_pictures is not None and stages.has_pictures(body):
        threads = service.picture_threads
    parsed = await off_loop(context.num_bytes, stages.parse, service, body, context, threads=threads)
    await check_shape(service, parsed.generation, context)
    return parsed


async def context_of(
    service: Service, prefix: str, request: Request, body: Any, request_id: str | None = None
) -> RequestContext:
    """Who asks, and how, as the headers and the body say. The request's id is the one that clients know, unless it
    has a `request_id` of its own here. Where its model is an adapter that must be loaded, this waits. Raises
    ServingError."""
    model, lora = await service.asked_model(body.model)
    named = request_id_of(request, prefix, getattr(body, "request_id", None))

    async def unless_it_leaves(work: Awaitable[None]) -> None:
        async def done() -> bool:
            await work
            return True

        if not await until_disconnect(request.receive, done()):
            raise HttpError(CLIENT_CLOSED_REQUEST, "The client has left.")

    headers = request.headers
    core = chosen_core(headers.getlist(CORE_HEADER))
    take_priority(request, body)
    return RequestContext(
        client=client_of(request),
        request_id=request_id or named,
        model=model,
        user=user_of(body),
        num_bytes=num_bytes_of(request),
        data_parallel_rank=core,
        trace=trace_in(headers.items()) if service.is_tracing else None,
        unless_it_leaves=unless_it_leaves,
        lora=lora,
    )


def user_of(body: Any) -> str:
    """The user that a body names, in the words of any API; empty: it names none."""
    metadata = getattr(body, "metadata", None)
    named = (
        getattr(body, "user", None),
        getattr(body, "safety_identifier", None),
        metadata.get("user_id") if isinstance(metadata, dict) else None,
    )
    return next((name for name in named if isinstance(name, str)), "")


def streamed(service: Service, request_id: str, generation: EngineRequest, writer: EventWriter) -> Response:
    """The stages `generate` and `write`, for a client that wants to see every result as it comes."""
    return event_stream(service, request_id, streamed_pieces(service, generation, writer), writer.late_error)


def event_stream(
    service: Service, request_id: str, pieces: Pieces, late_error: Callable[[ServingError], bytes]
) -> Response:
    """The pieces as they are made; `late_error` makes the one for a failure after the first."""
    headers = response_headers(service, request_id)
    return EventStream(pieces, late_error, service.options.sse_keep_alive_interval, headers)


async def unless_left(
    service: Service, request: Request, request_id: str, work: Coroutine[Any, Any, Response]
) -> Response:
    """The response that `work` makes, unless the client leaves before: then it is cancelled."""
    response = await response_unless_left(request, work)
    response.headers.update(response_headers(service, request_id))
    return response


def response_headers(service: Service, request_id: str) -> dict[str, str]:
    if not service.options.enable_request_id_headers:
        return {}
    return {"X-Request-Id": request_id.partition("-")[2]}


def streamed_pieces(service: Service, generation: EngineRequest, writer: EventWriter) -> Pieces:
    """Pieces of a stream: written into the pipe where results arise, or yielded, as the first, the last, and what comes
    while the client does not read."""
    is_alone = len(generation.prompts) == 1

    async def pieces(pipe: Pipe | None) -> AsyncGenerator[bytes]:
        def take(number: int, output: Output) -> bool:
            if not pipe.is_clear:
                return False
            if piece := writer.of(number, output):
                pipe.write(piece)
            return True

        tail = b""
        results = stream(service.engine, service.traffic, generation, None if pipe is None else take)
        async with contextlib.aclosing(results):
            async for number, output in results:
                piece = writer.of(number, output)
                if is_alone and output.finished:
                    tail = piece
                elif piece:
                    yield piece
        yield LastPiece(tail + writer.end())

    return pieces


async def whole_response(service: Service, stages: Stages, parsed: Parsed) -> Response:
    """The stages `generate` and `write`, for a client that waits for the whole."""
    generation = parsed.generation
    generate = collect if generation.beams is None else search
    outputs = await generate(service.engine, service.traffic, generation)
    return await json_in_pieces(generation.size_of(outputs), lambda: stages.write(service, parsed, outputs))
