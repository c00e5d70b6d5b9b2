"""Errors as Anthropic's clients know them, on every path of this API, whoever made them.

    {"type": "error", "error": {"type": ..., "message": ...}, "request_id": "req_..."}

Endpoints, keys and limits answer with OpenAI's error object everywhere. On these paths it is brought into the other
form on its way out, so that a wrong key, an unknown path and a body that is too long look as clients expect. This
module knows no endpoint.
"""

import uuid

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxpaged.entrypoints.http.errors import ErrorBody

PREFIX = "/v1/messages"
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


DETAILS = {"thread": {"error_code": "thread_unsupported_request"}}
"""Field at fault -> what tells the client library to go on without it."""


class MessagesErrorInfo(msgspec.Struct, omit_defaults=True):
    """What went wrong. `details` are there where clients know what to do about it."""

    type: str
    message: str
    details: dict[str, str] | None = None


class MessagesError(msgspec.Struct, kw_only=True):
    """The body of every response of this API that is an error. `request_id` is that of the header `request-id`."""

    type: str = "error"
    error: MessagesErrorInfo
    request_id: str | None = None


def messages_error(
    status: int, message: str, parameter: str | None = None, request_id: str | None = None
) -> MessagesError:
    """`parameter`: the field at fault."""
    kind = TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return MessagesError(error=MessagesErrorInfo(kind, message, DETAILS.get(parameter or "")), request_id=request_id)


class MessagesErrors:
    """Gives every response a `request-id`, and errors this API's form. It is for this API's paths."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, Rewriter(send))


class Rewriter:
    """Sends one response on: as it is, or, when it is an error, once it is complete and in this API's form."""

    def __init__(self, send: Send):
        self._send = send
        self._request_id = f"req_{uuid.uuid4().hex}"
        self._failed: Message | None = None  # how the response begins, when it is an error
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), (b"request-id", self._request_id.encode())]
            message = {**message, "headers": headers}
            if message["status"] >= 400:
                self._failed = message
                return
        if self._failed is None:
            await self._send(message)
            return
        self._body += message.get("body", b"")
        if not message.get("more_body", False):
            await self._send_error(self._failed)

    async def _send_error(self, start: Message) -> None:
        try:
            known = msgspec.json.decode(self._body, type=ErrorBody)
        except msgspec.DecodeError:  # not one of ours, such as the response to nobody when a client has gone
            body = self._body
        else:
            error = messages_error(start["status"], known.error.message, known.error.param, self._request_id)
            body = msgspec.json.encode(error)
        headers = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
        await self._send({**start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
