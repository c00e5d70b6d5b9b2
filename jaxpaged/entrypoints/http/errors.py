"""Errors as HTTP's clients see them: a status and the OpenAI error object.

    {"error": {"message": ..., "type": ..., "param": ..., "code": <the HTTP status>}}

What a client is told of an exception is decided in `serving/errors.py`. This module knows no endpoint.
"""

from collections.abc import Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from jaxpaged.serving.errors import ErrorKind, ServingError, as_serving_error

STATUSES = {
    ErrorKind.INVALID: 400,
    ErrorKind.UNAUTHENTICATED: 401,
    ErrorKind.FORBIDDEN: 403,
    ErrorKind.NOT_FOUND: 404,
    ErrorKind.TIMEOUT: 408,
    ErrorKind.CONFLICT: 409,
    ErrorKind.TOO_LARGE: 413,
    ErrorKind.UNFETCHABLE: 422,
    ErrorKind.TOO_MANY: 429,
    ErrorKind.INTERNAL: 500,
    ErrorKind.UNSUPPORTED: 501,
    ErrorKind.UNAVAILABLE: 503,
}
TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    431: "RequestTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


class HttpError(ServingError):
    """An error of which only HTTP can say the rest: a status of its own, headers of the response, and a `type` where it
    is not that of the status."""

    def __init__(
        self,
        status: int,
        message: str,
        parameter: str | None = None,
        headers: Mapping[str, str] | None = None,
        type: str | None = None,
    ):
        super().__init__(message, parameter, kind=ErrorKind.INTERNAL if status >= 500 else ErrorKind.INVALID)
        self.status = status
        self.headers = dict(headers or {})
        self.type = type


class ErrorInfo(msgspec.Struct):
    """What went wrong. `code` is the HTTP status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct):
    """The body of every response that is an error."""

    error: ErrorInfo


def status_of(error: ServingError) -> int:
    return error.status if isinstance(error, HttpError) else STATUSES[error.kind]


def error_body(error: ServingError) -> bytes:
    """The JSON of an error."""
    status = status_of(error)
    kind = error.type if isinstance(error, HttpError) else None
    kind = kind or TYPES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return msgspec.json.encode(ErrorBody(ErrorInfo(error.message, kind, error.parameter, status)))


def error_response(error: ServingError) -> Response:
    headers = dict(error.headers) if isinstance(error, HttpError) else {}
    if error.retry_after is not None:
        headers["Retry-After"] = f"{error.retry_after:g}"
    return Response(error_body(error), status_of(error), headers, "application/json")


def as_http_error(error: BaseException) -> ServingError:
    """What a client is told of an exception, those of the web framework among them."""
    match error:
        case HTTPException(status_code=status, detail=detail):
            return HttpError(status, detail, headers=error.headers)
        case ClientDisconnect():
            return ServingError("The client went away before it had sent the body.")
    return as_serving_error(error)


async def respond_with_error(request: Request, error: Exception) -> Response:
    """The application's handler of what no endpoint has raised: an unknown path, a wrong method."""
    return error_response(as_http_error(error))
