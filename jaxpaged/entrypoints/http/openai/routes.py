"""The routes `POST /v1/completions` and `POST /v1/chat/completions`."""

from starlette.requests import Request
from starlette.responses import Response

from jaxpaged.entrypoints.http.openai import chat_parse, chat_write, completion_parse, completion_write
from jaxpaged.entrypoints.http.openai.chat_batch import respond_to_batch
from jaxpaged.entrypoints.http.openai.protocol import ChatCompletionRequest, CompletionRequest
from jaxpaged.entrypoints.http.respond import Stages, respond
from jaxpaged.serving.service import Service

COMPLETIONS = Stages(
    "cmpl", CompletionRequest, completion_parse.parse, completion_write.answer, completion_write.CompletionStream
)
CHATS = Stages("chatcmpl", ChatCompletionRequest, chat_parse.parse, chat_write.answer, chat_write.ChatStream)


class Generation:
    """The endpoints."""

    def __init__(self, service: Service):
        self._service = service

    async def complete(self, request: Request) -> Response:
        """Continue one prompt or several, at once or as a stream."""
        return await respond(self._service, COMPLETIONS, request)

    async def chat(self, request: Request) -> Response:
        """Answer one conversation, at once or as a stream."""
        return await respond(self._service, CHATS, request)

    async def chat_batch(self, request: Request) -> Response:
        """Answer several conversations, with one choice for each."""
        return await respond_to_batch(self._service, CHATS, request)
