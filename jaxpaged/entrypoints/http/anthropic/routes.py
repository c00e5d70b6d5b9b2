"""The routes `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from starlette.requests import Request
from starlette.responses import Response

from jaxpaged.entrypoints.http.anthropic import parse, write
from jaxpaged.entrypoints.http.anthropic.conversation import has_pictures
from jaxpaged.entrypoints.http.anthropic.protocol import CountTokensRequest, CountTokensResponse, MessagesRequest
from jaxpaged.entrypoints.http.body import json_response, num_bytes_of, read_struct
from jaxpaged.entrypoints.http.respond import Stages, respond
from jaxpaged.serving.requests import off_loop
from jaxpaged.serving.service import Service

MESSAGES = Stages("msg", MessagesRequest, parse.parse, write.answer, write.MessageWriter, has_pictures)


class Messages:
    """The endpoints."""

    def __init__(self, service: Service):
        self._service = service

    async def create(self, request: Request) -> Response:
        """Answer one conversation, at once or as a stream (Anthropic's API)."""
        return await respond(self._service, MESSAGES, request)

    async def count_tokens(self, request: Request) -> Response:
        """How many tokens a conversation has as a prompt (Anthropic's API)."""
        service = self._service
        body = await read_struct(request, CountTokensRequest, service.max_body_bytes)
        await service.asked_model(body.model)
        threads = service.picture_threads if service.takes_pictures and has_pictures(body) else None
        count = await off_loop(num_bytes_of(request), parse.count_tokens, service, body, threads=threads)
        return json_response(CountTokensResponse(count))
