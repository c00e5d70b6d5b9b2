"""Errors as clients see them: an HTTP status and the OpenAI error object.

    {"error": {"message": ..., "type": ..., "param": ..., "code": <the HTTP status>}}

What an exception of the engine becomes is decided here and nowhere else. Messages are cut, and file paths and memory
addresses are taken out of those that were not written for clients. This module knows no endpoint.
"""

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from jaxpaged.errors import ConflictError, EngineDeadError, EngineError, RequestError, UsageError

logger = logging.getLogger(__name__)

MAX_MESSAGE_LENGTH = 1000
TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    431: "RequestTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}
RETRY_AFTER = {"Retry-After": "1"}
"""Seconds; for errors that another try may not meet."""
ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{5,}\b")
PATH = re.compile(r"(?<![\w/:.<])/(?:[\w.+@-]+/)+[\w.+@-]*")


class HttpError(Exception):
    """A request that ends with this status. `parameter` names the field at fault."""

    def __init__(
        self, status: int, message: str, parameter: str | None = None, headers: Mapping[str, str] | None = None
    ):
        super().__init__(message)
        self.status = status
        self.parameter = parameter
        self.headers = dict(headers or {})


class ErrorInfo(msgspec.Struct):
    """What went wrong. `code` is the HTTP status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct):
    """The body of every answer that is an error."""

    error: ErrorInfo


def error_body(error: HttpError) -> bytes:
    """The JSON of an error."""
    kind = TYPES.get(error.status, "InternalServerError" if error.status >= 500 else "BadRequestError")
    return msgspec.json.encode(ErrorBody(ErrorInfo(error_message(error), kind, error.parameter, error.status)))


def error_message(error: HttpError) -> str:
    """The message, cut when it is long: it may hold what the client sent."""
    message = str(error)
    return message if len(message) <= MAX_MESSAGE_LENGTH else f"{message[: MAX_MESSAGE_LENGTH - 1]}…"


def error_response(error: HttpError) -> Response:
    return Response(error_body(error), error.status, error.headers, "application/json")


def as_http_error(error: BaseException) -> HttpError:
    """What a client is told of an exception. Those that are not the client's are logged, and say no more than that."""
    match error:
        case HttpError():
            return error
        case HTTPException(status_code=status, detail=detail):
            return HttpError(status, detail, headers=error.headers)
        case ClientDisconnect():
            return HttpError(400, "The client went away before it had sent the body.")
        case RequestError():
            return HttpError(400, scrubbed(str(error)), error.parameter)
        case ConflictError():
            return HttpError(409, scrubbed(str(error)))
        case UsageError():
            return HttpError(501, scrubbed(str(error)))
        case EngineDeadError():
            logger.error("a request failed: %s", error)
            return HttpError(500, "The engine has stopped, and the request could not be served.")
        case EngineError():
            logger.error("a request failed: %s", error)
            return HttpError(
                503, "The engine failed while the request was under way. Send it again.", headers=RETRY_AFTER
            )
    logger.error("a request failed unexpectedly", exc_info=error)
    return HttpError(500, "The server failed in a way that is not the request's fault. The log says more.")


@contextlib.contextmanager
def client_names(names: Mapping[str, str]) -> Iterator[None]:
    """Make errors name fields as the client knows them: what other parts call a field -> what the request calls it."""
    try:
        yield
    except RequestError as error:
        if error.parameter not in names:
            raise
        raise RequestError(*renamed(error, names)) from error
    except HttpError as error:
        if error.parameter not in names:
            raise
        raise HttpError(error.status, *renamed(error, names), error.headers) from error


def renamed(error: RequestError | HttpError, names: Mapping[str, str]) -> tuple[str, str]:
    """The message, which begins with the field's name or does not have it, and the name."""
    text, known = str(error), names[error.parameter]
    return known + text.removeprefix(error.parameter) if text.startswith(error.parameter) else text, known


def failed_request(reason: str | None) -> HttpError:
    """What a client is told when the engine finished its request with an error."""
    return HttpError(500, f"The request failed while it was computed: {scrubbed(reason or 'no reason is known')}")


def scrubbed(message: str) -> str:
    """A message without absolute paths and memory addresses."""
    return PATH.sub("<path>", ADDRESS.sub("<address>", message))


async def answer_with_error(request: Request, error: Exception) -> Response:
    """The application's handler of what no endpoint has raised: an unknown path, a wrong method."""
    return error_response(as_http_error(error))
