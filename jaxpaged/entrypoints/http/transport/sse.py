"""Answers that end when the client goes away: streams of server-sent events, and work that is waited for.

This module knows ASGI and bytes; what the events say is the business of who makes them.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxpaged.entrypoints.http.errors import HttpError, as_http_error, error_response

KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
SEND_PIECE = "jaxpaged.send_piece"
"""Where a scope has the `send` for pieces of an answer that has begun: the protocol's, then that of who counts them.
Other layers look at how an answer begins; pieces go by them, since streams have one for every token."""
CLIENT_CLOSED_REQUEST = 499
"""What logs show for a request whose client did not wait for the answer; nobody receives it."""


class LastPiece(bytes):
    """A piece of a stream that nothing follows: it goes out together with the end of the answer."""


def event(data: bytes) -> bytes:
    """One event with this data, which has no line breaks."""
    return b"data: %b\n\n" % data


class EventStream(Response):
    """Streams events as they are made.

    The answer begins with the first event, so a failure before it is an ordinary error. One after it is told by
    `late_error`, and ends the stream. When the client goes away the generator is closed.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        late_error: Callable[[HttpError], bytes],
        keep_alive_interval: float = 0.0,
        headers: dict[str, str] | None = None,
    ):
        self.status_code = 200
        self.background = None
        self.body = b""
        self._events = events
        self._late_error = late_error
        self._interval = keep_alive_interval
        self.init_headers({**HEADERS, **(headers or {})})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def answer() -> None:
            try:
                first = await anext(self._events)
            except Exception as error:
                await error_response(as_http_error(error))(scope, receive, send)
            else:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await self._send_all(first, scope.get(SEND_PIECE, send))

        try:
            await until_disconnect(receive, answer())
        finally:
            await self._events.aclose()

    async def _send_all(self, first: bytes, send: Send) -> None:
        try:
            ended = await send_piece(send, first)
            if self._interval and not ended:
                ended = await self._send_with_comments(send)
            elif not ended:
                async for piece in self._events:  # the way of most pieces: no call more than it takes
                    more = type(piece) is not LastPiece
                    await send({"type": "http.response.body", "body": piece, "more_body": more})
                    ended = not more
        except Exception as error:
            ended = await send_piece(send, LastPiece(self._late_error(as_http_error(error))))
        if not ended:
            await send_piece(send, LastPiece())

    async def _send_with_comments(self, send: Send) -> bool:
        """Fill silences with comments. Whether the answer has ended."""
        while True:
            following = asyncio.ensure_future(anext(self._events, None))
            try:
                while not (await asyncio.wait({following}, timeout=self._interval))[0]:
                    await send_piece(send, KEEP_ALIVE)
            finally:
                following.cancel()
            piece = await following
            if piece is None:
                return False
            if await send_piece(send, piece):
                return True


async def send_piece(send: Send, piece: bytes) -> bool:
    """Send what comes next. Whether it ends the answer."""
    is_last = type(piece) is LastPiece
    await send({"type": "http.response.body", "body": piece, "more_body": not is_last})
    return is_last


async def answer_or_leave(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The answer that `work` makes, unless the client leaves before: then the work is cancelled."""
    answer = await until_disconnect(request.receive, work)
    return Response(status_code=CLIENT_CLOSED_REQUEST) if answer is None else answer


async def until_disconnect[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Run `work`; None, with the work cancelled, when the client goes away first. The body must have been read."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
