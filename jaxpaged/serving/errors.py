"""Requests that are refused, or fail: why, in the words of no protocol. HTTP makes statuses of it, gRPC codes.

Decides once what a client is told of an exception of the engine. Messages are cut, and file paths and memory addresses
are taken out of those that were not written for clients.
"""

import contextlib
import enum
import logging
import re
from collections.abc import Iterator, Mapping

from jaxpaged.errors import ConflictError, EngineDeadError, EngineError, FetchError, RequestError, UsageError

logger = logging.getLogger(__name__)

MAX_MESSAGE_LENGTH = 1000
RETRY_SECONDS = 1.0
"""For errors that another try may not meet."""
ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{5,}\b")
PATH = re.compile(r"(?<![\w/:.<])/(?:[\w.+@-]+/)+[\w.+@-]*")


class ErrorKind(enum.Enum):
    """Why a request is not served."""

    INVALID = enum.auto()
    UNAUTHENTICATED = enum.auto()
    FORBIDDEN = enum.auto()
    NOT_FOUND = enum.auto()
    TIMEOUT = enum.auto()
    CONFLICT = enum.auto()
    TOO_LARGE = enum.auto()
    UNFETCHABLE = enum.auto()
    TOO_MANY = enum.auto()
    INTERNAL = enum.auto()
    UNSUPPORTED = enum.auto()
    UNAVAILABLE = enum.auto()


class ServingError(Exception):
    """A request that is refused, or fails. `parameter` names the field at fault.

    `retry_after`: seconds after which another try may succeed.
    """

    def __init__(
        self,
        message: str,
        parameter: str | None = None,
        *,
        kind: ErrorKind = ErrorKind.INVALID,
        retry_after: float | None = None,
    ):
        super().__init__(message)
        self.parameter = parameter
        self.kind = kind
        self.retry_after = retry_after

    @property
    def message(self) -> str:
        """The text for clients, cut when it is long: it may hold what the client sent."""
        message = str(self)
        return message if len(message) <= MAX_MESSAGE_LENGTH else f"{message[: MAX_MESSAGE_LENGTH - 1]}…"


def as_serving_error(error: BaseException) -> ServingError:
    """What a client is told of an exception. Those that are not the client's are logged, and say no more than that."""
    match error:
        case ServingError():
            return error
        case FetchError():
            return ServingError(scrubbed(str(error)), error.parameter, kind=ErrorKind.UNFETCHABLE)
        case RequestError():
            return ServingError(scrubbed(str(error)), error.parameter)
        case ConflictError():
            return ServingError(scrubbed(str(error)), kind=ErrorKind.CONFLICT)
        case UsageError():
            return ServingError(scrubbed(str(error)), kind=ErrorKind.UNSUPPORTED)
        case EngineDeadError():
            logger.error("a request failed: %s", error)
            return ServingError("The engine has stopped, and the request could not be served.", kind=ErrorKind.INTERNAL)
        case EngineError():
            logger.error("a request failed: %s", error)
            return ServingError(
                "The engine failed while the request was under way. Send it again.",
                kind=ErrorKind.UNAVAILABLE,
                retry_after=RETRY_SECONDS,
            )
    logger.error("a request failed unexpectedly", exc_info=error)
    return ServingError(
        "The server failed in a way that is not the request's fault. The log says more.", kind=ErrorKind.INTERNAL
    )


@contextlib.contextmanager
def client_names(names: Mapping[str, str]) -> Iterator[None]:
    """Make errors name fields as the client knows them: what other parts call a field -> what the request calls it."""
    try:
        yield
    except RequestError as error:
        if error.parameter not in names:
            raise
        kind = FetchError if isinstance(error, FetchError) else RequestError
        raise kind(*renamed(error, names)) from error
    except ServingError as error:
        if error.parameter not in names:
            raise
        raise ServingError(*renamed(error, names), kind=error.kind, retry_after=error.retry_after) from error


def renamed(error: RequestError | ServingError, names: Mapping[str, str]) -> tuple[str, str]:
    """The message, which begins with the field's name or does not have it, and the name."""
    text, known = str(error), names[error.parameter]
    return known + text.removeprefix(error.parameter) if text.startswith(error.parameter) else text, known


def failed_request(reason: str | None) -> ServingError:
    """What a client is told when the engine finished its request with an error."""
    return ServingError(
        f"The request failed while it was computed: {scrubbed(reason or 'no reason is known')}",
        kind=ErrorKind.INTERNAL,
    )


def scrubbed(message: str) -> str:
    """A message without absolute paths and memory addresses."""
    return PATH.sub("<path>", ADDRESS.sub("<address>", message))
