"""The routes of `/v1/responses`: answer with items, keep them, and give them out again."""

import asyncio
import contextlib

from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from jaxpaged.entrypoints.http.body import json_response, num_bytes_of, read_struct
from jaxpaged.entrypoints.http.endpoint import flag, request_id_of
from jaxpaged.entrypoints.http.respond import (
    context_of,
    event_stream,
    response_headers,
    streamed,
    unless_left,
)
from jaxpaged.entrypoints.http.responses.conversation import has_pictures
from jaxpaged.entrypoints.http.responses.generate import ResponseRun
from jaxpaged.entrypoints.http.responses.parse import ParsedResponse, check, earlier_items, parse
from jaxpaged.entrypoints.http.responses.protocol import DeletedResponse, ResponsesRequest, new_id
from jaxpaged.entrypoints.http.responses.store import ResponseStore, StoredResponse
from jaxpaged.entrypoints.http.responses.write import EventLog
from jaxpaged.entrypoints.http.transport.auth import given_key
from jaxpaged.entrypoints.http.transport.sending import json_in_pieces
from jaxpaged.serving.api_keys import digest
from jaxpaged.serving.errors import ServingError, client_names
from jaxpaged.serving.generate import all_results, check_shape, stream
from jaxpaged.serving.requests import SHORT_BODY, RequestContext, off_loop
from jaxpaged.serving.service import Service


class Responses:
    """The endpoints."""

    def __init__(self, service: Service):
        options = service.options
        self._service = service
        self._store = ResponseStore(options.max_stored_responses, options.max_stored_response_bytes)

    async def create(self, request: Request) -> HttpResponse:
        """Answer an input with a response: at once, as a stream, or in the background."""
        service = self._service
        await service.pace.turn()
        body = await read_struct(request, ResponsesRequest, service.max_body_bytes)
        await off_loop(num_bytes_of(request), check, body)
        context = await context_of(service, "resp", request, body, request_id=new_id("resp"))
        request_id = request.scope["request_id"]
        parsed = await self._parsed(request, body, context)
        if body.background:
            stored = await self._begin_in_background(parsed, with_events=bool(body.stream))
            if body.stream:
                return self._following(request_id, stored, -1)
            return json_response(stored.response, headers=response_headers(service, request_id))
        if body.stream:
            run = ResponseRun(service, parsed, self._store, EventLog())
            return streamed(service, request_id, parsed.generation, run)
        return await unless_left(service, request, request_id, self._complete(parsed))

    async def _parsed(self, request: Request, body: ResponsesRequest, context: RequestContext) -> ParsedResponse:
        """In a thread where something went before, which may be long however short the body is."""
        owner = owner_of(request)
        earlier = earlier_items(self._store, body, owner)
        num_bytes = SHORT_BODY + 1 if earlier else context.num_bytes
        service, threads = self._service, None
        if service.takes_pictures and (has_pictures(body.input) or has_pictures(earlier)):
            threads = service.picture_threads
        parsed = await off_loop(num_bytes, parse, service, self._store, body, context, owner, earlier, threads=threads)
        await check_shape(self._service, parsed.generation, context)
        return parsed

    async def retrieve(self, request: Request) -> HttpResponse:
        """A response that is kept; with stream=true the events of one that was made so in the background."""
        stored = self._stored(request)
        after = starting_after(request)
        if not flag(request, "stream"):
            if after is not None:
                raise ServingError("starting_after is given, but stream is not true. Leave it out.", "starting_after")
            return json_response(stored.response)
        if not stored.has_events or not stored.response.background:
            raise ServingError(
                "The response was not made with background and stream, so its events were not kept. Leave out stream.",
                "stream",
            )
        return self._following(request_id_of(request, "resp"), stored, -1 if after is None else after)

    async def cancel(self, request: Request) -> HttpResponse:
        """End a response in the background. One that has ended stays as it is."""
        stored = self._stored(request)
        if not stored.response.background:
            raise ServingError(
                "The response was not made with background: it ends when its client leaves.", "response_id"
            )
        await stored.cancel()
        return json_response(stored.response)

    async def delete(self, request: Request) -> HttpResponse:
        """Forget a response; one that is under way ends."""
        stored = self._stored(request)
        await stored.cancel()
        self._store.remove(stored)
        return json_response(DeletedResponse(stored.response.id))

    def _stored(self, request: Request) -> StoredResponse:
        return self._store.get(request.path_params["id"], owner_of(request))

    # ---- ways to answer

    async def _complete(self, parsed: ParsedResponse) -> HttpResponse:
        run = ResponseRun(self._service, parsed, self._store, EventLog(silent=True))
        async for _ in run.events(stream(self._service.engine, self._service.traffic, parsed.generation)):
            pass
        return await json_in_pieces(run.answer_bytes, lambda: parsed.response)

    async def _begin_in_background(self, parsed: ParsedResponse, with_events: bool) -> StoredResponse:
        """Everything that is wrong with a request by itself is found before it is answered."""
        service, generation = self._service, parsed.generation
        prompt, params = generation.prompts[0].for_engine(), generation.params
        with client_names(generation.names):
            await asyncio.to_thread(
                service.engine.input_processor.process,
                generation.request_id,
                prompt,
                params,
                priority=generation.priority,
            )
        self._store.check_room()
        with contextlib.ExitStack() as admission:
            admission.enter_context(service.traffic.admitted(generation.load(service.model.max_model_len)))
            run = ResponseRun(service, parsed, self._store, EventLog(silent=not with_events))
            return run.start(all_results(service.engine, generation), admission.pop_all())

    def _following(self, request_id: str, stored: StoredResponse, after: int) -> HttpResponse:
        return event_stream(self._service, request_id, lambda pipe: stored.follow(after), EventLog().late_error)


def owner_of(request: Request) -> bytes:
    """Who asks: clients with different keys see nothing of each other."""
    return digest(given_key(request.headers))


def starting_after(request: Request) -> int | None:
    """Raises ServingError for what is no number of an event."""
    text = request.query_params.get("starting_after")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise ServingError(f"starting_after is {text[:40]!r}; it must be the number of an event.", "starting_after")
    return int(text)
