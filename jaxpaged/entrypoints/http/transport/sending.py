"""Responses as they are sent: streams of server-sent events, large JSON in pieces, and work that ends with its client.

A stream is a generator of pieces. Once it has begun, its maker may also write pieces into the `Pipe` to the client,
where they arise and without waking the task of the response. The JSON encoder holds the interpreter's lock until it is
done, so nothing large is given to it at once. This module knows ASGI and bytes; what the events say is the business of
who makes them.
"""

import asyncio
import contextlib
import ctypes
import functools
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from typing import Any, Protocol, get_args, get_type_hints

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxpaged.entrypoints.http.body import json_response
from jaxpaged.entrypoints.http.errors import as_http_error, error_response
from jaxpaged.serving.errors import ServingError

KEEP_ALIVE = b": keep-alive\n\n"
MEDIA_TYPE = "text/event-stream"
HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
CONTENT_TYPE = (b"content-type", f"{MEDIA_TYPE}; charset=utf-8".encode())
PIPE = "jaxpaged.pipe"
"""Where a scope has the `Pipe` to its client, if the server that runs the application gives one."""
CLIENT_CLOSED_REQUEST = 499
"""What logs show for a request whose client did not wait for the response; nobody receives it."""


class Pipe(Protocol):
    """The short way to a client for pieces of its response. Nobody else may send one meanwhile."""

    num_bytes: int
    """That went through."""
    last_time: float
    """When something last did, by the event loop's clock."""

    @property
    def is_clear(self) -> bool:
        """Whether the response has begun, and the client has taken so much of it that more can be written."""
        ...

    def write(self, piece: bytes) -> None:
        """Write a piece that is not empty, while the pipe is clear."""
        ...


Pieces = Callable[[Pipe | None], AsyncGenerator[bytes]]
"""Makes the pieces of a stream. While the generator is awaited its maker may write into the pipe, if there is one."""


class LastPiece(bytes):
    """A piece of a stream that nothing follows: it goes out together with the end of the response."""


def event(data: bytes) -> bytes:
    """One event with this data, which has no line breaks."""
    return b"data: %b\n\n" % data


class EventStream(Response):
    """Streams pieces as they are made.

    The response begins with the first piece, so a failure before it is an ordinary error. One after it is told by
    `late_error`, and ends the stream. When the client goes away the generator is closed.
    """

    media_type = MEDIA_TYPE

    def __init__(
        self,
        pieces: Pieces,
        late_error: Callable[[ServingError], bytes],
        keep_alive_interval: float = 0.0,
        headers: dict[str, str] | None = None,
    ):
        self.status_code = 200
        self.background = None
        self.body = b""
        self._pieces = pieces
        self._late_error = late_error
        self._interval = keep_alive_interval
        more = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
        self.raw_headers = [*HEADERS, *more, CONTENT_TYPE]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pipe = scope.get(PIPE)
        pieces = self._pieces(pipe)

        async def response() -> None:
            try:
                first = await anext(pieces)
            except Exception as error:
                await error_response(as_http_error(error))(scope, receive, send)
            else:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await self._send_all(first, pieces, send, pipe)

        try:
            await until_disconnect(receive, response())
        finally:
            await pieces.aclose()

    async def _send_all(self, first: bytes, pieces: AsyncGenerator[bytes], send: Send, pipe: Pipe | None) -> None:
        try:
            ended = await send_piece(send, first)
            if self._interval and not ended:
                ended = await self._send_with_comments(pieces, send, pipe)
            elif not ended:
                async for piece in pieces:
                    ended = await send_piece(send, piece)
        except Exception as error:
            ended = await send_piece(send, LastPiece(self._late_error(as_http_error(error))))
        if not ended:
            await send_piece(send, LastPiece())

    async def _send_with_comments(self, pieces: AsyncGenerator[bytes], send: Send, pipe: Pipe | None) -> bool:
        """Fill silences with comments. Whether the response has ended."""
        loop = asyncio.get_running_loop()
        while True:
            following, silent_since = asyncio.ensure_future(anext(pieces, None)), loop.time()
            try:
                while not following.done():
                    silent_since = max(silent_since, pipe.last_time if pipe else 0.0)
                    left = silent_since + self._interval - loop.time()
                    if left > 0:
                        await asyncio.wait({following}, timeout=left)
                    else:
                        await send_piece(send, KEEP_ALIVE)
                        silent_since = loop.time()
            finally:
                following.cancel()
            piece = await following
            if piece is None:
                return False
            if await send_piece(send, piece):
                return True


async def send_piece(send: Send, piece: bytes) -> bool:
    """Send what comes next. Whether it ends the response."""
    is_last = type(piece) is LastPiece
    await send({"type": "http.response.body", "body": piece, "more_body": not is_last})
    return is_last


async def response_unless_left(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The response that `work` makes, unless the client leaves before: then the work is cancelled."""
    response = await until_disconnect(request.receive, work)
    return Response(status_code=CLIENT_CLOSED_REQUEST) if response is None else response


async def until_disconnect[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Run `work`; None, with the work cancelled, when the client goes away first. The body must have been read."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(receive))
    leaving.add_done_callback(functools.partial(cancel_when_left, working))
    try:
        return await working
    except asyncio.CancelledError:
        if leaving.done() and not leaving.cancelled() and not cancelling():
            return None
        raise
    finally:
        leaving.cancel()
        del working  # its error would hold this frame, and this frame the error


def cancel_when_left(working: asyncio.Future[Any], leaving: asyncio.Future[None]) -> None:
    if not leaving.cancelled():
        working.cancel()


def cancelling() -> bool:
    """Whether somebody has cancelled the task that runs."""
    task = asyncio.current_task()
    return task is not None and bool(task.cancelling())


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


SMALL_RESPONSE = 2**15
"""Bytes up to which a response is not worth a thread: they are encoded in less than a millisecond."""
ITEMS_AT_ONCE = 128
"""Of a list, encoded at a time."""
SCALARS = frozenset({str, int, float, bool, type(None)})
PIECE = 2**18
"""Bytes that are handed to a connection at a time."""


async def json_in_pieces(num_bytes: int, make: Callable[[], Any]) -> Response:
    """The JSON of what `make` makes; of about `num_bytes`, or fewer."""
    if num_bytes <= SMALL_RESPONSE:
        return json_response(make())
    return BigResponse(await asyncio.to_thread(lambda: encoded(make())))


def encoded(value: Any) -> bytes:
    """`msgspec.json.encode` in many small steps."""
    return msgspec.json.encode(in_small_parts(value))


def in_small_parts(value: Any) -> Any:
    """The value with everything long in it encoded already."""
    if isinstance(value, list):
        return list_in_parts(value)
    if isinstance(value, dict):
        if len(value) <= ITEMS_AT_ONCE and are_scalar(value.values()):
            return value  # such as the candidates of a token: to look at each of 80,000 takes ten times what they do
        return {key: in_small_parts(each) for key, each in value.items()}
    if isinstance(value, msgspec.Struct):
        long = {
            name: in_small_parts(each)
            for name in value.__struct_fields__
            if isinstance(each := getattr(value, name), list | dict | msgspec.Struct)
        }
        return msgspec.structs.replace(value, **long) if long else value
    return value


def list_in_parts(items: list[Any]) -> msgspec.Raw:
    parts = []
    for start in range(0, len(items), ITEMS_AT_ONCE):
        few = items[start : start + ITEMS_AT_ONCE]
        if not are_scalar(few):
            few = [in_small_parts(each) for each in few]
        parts.append(msgspec.json.encode(few)[1:-1])
    return msgspec.Raw(b"[%b]" % b",".join(parts))


def are_scalar(values: Iterable[Any]) -> bool:
    return all(map(is_scalar, set(map(type, values))))


@functools.cache
def is_scalar(kind: type) -> bool:
    """Whether what is of a type holds nothing that might be long but texts."""
    if not issubclass(kind, msgspec.Struct):
        return kind in SCALARS
    hints = get_type_hints(kind)
    return all(SCALARS.issuperset(get_args(hints[name]) or [hints[name]]) for name in kind.__struct_fields__)


class BigResponse(Response):
    """JSON that is sent piece by piece, so that the socket's buffer never holds it whole."""

    media_type = "application/json"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        body = memoryview(self.body)
        for start in range(0, len(body), PIECE):
            piece = bytes(body[start : start + PIECE])
            await send({"type": "http.response.body", "body": piece, "more_body": start + PIECE < len(body)})
            await asyncio.sleep(0)
        del body
        self.body = b""
        await asyncio.to_thread(return_freed_pages)


def return_freed_pages() -> None:
    """Give memory that was freed back to the system, where the C library can (glibc); it keeps it otherwise."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
