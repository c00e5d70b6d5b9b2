"""What an engine says to the proxy, piece by piece as it comes."""

import asyncio
from collections.abc import AsyncIterator, Mapping

from jaxpaged.entrypoints.http_client import Flow
from jaxpaged.entrypoints.proxy.backends import Backend

MOST_WAITING = 1 << 20
"""Bytes of a response that wait here for a client; what it does not take waits in the engine."""
MOST_WHOLE = 4 << 20
"""Bytes up to which a response that is no stream is only passed on when all of it is there, so that one that breaks off
is an error; longer ones break off too."""
ELSEWHERE = (429, 500, 502, 503, 504)
"""Answers after which another engine is asked."""


class EngineResponse:
    """What an engine says, as it comes: `begun` tells whether it is a good one."""

    def __init__(
        self,
        backend: Backend,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        timeout: float,
        method: str = "POST",
    ):
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._num_waiting, self._flow = 0, Flow()
        self._first: bytes | None = None
        self._backend = backend
        backend.num_under_way += 1
        backend.num_requests += 1
        asking = backend.client.post(path, body, self._take, headers, timeout, self._flow, method=method)
        self._asking = asyncio.create_task(asking)
        self._asking.add_done_callback(self._ended)

    def _take(self, data: bytes, now: float) -> None:
        self._pieces.put_nowait(data)
        self._num_waiting += len(data)
        if self._num_waiting > MOST_WAITING:
            self._flow.hold()

    def _ended(self, task: asyncio.Task) -> None:
        self._backend.num_under_way -= 1  # also where a client left before anybody looked at the response
        self._pieces.put_nowait(None)
        if not task.cancelled():
            task.exception()  # whoever reads on hears of it

    async def _next(self) -> bytes | None:
        piece = await self._pieces.get()
        self._num_waiting -= len(piece or b"")
        if self._num_waiting <= MOST_WAITING // 2:
            self._flow.go_on()
        return piece

    async def begun(self) -> tuple[int, bytes]:
        """(200, nothing) once a good response begins, otherwise the status and what a bad one says. Raises OSError."""
        self._first = await self._next()
        if self._first is not None:
            return 200, b""
        return await self._asking

    async def pieces(self) -> AsyncIterator[bytes]:
        """The response. Raises OSError where it breaks off."""
        piece = self._first
        while piece is not None:
            yield piece
            piece = await self._next()
        await self._asking

    async def some(self, most: int) -> tuple[bytes, AsyncIterator[bytes] | None]:
        """The response, and nothing where that is all; of one longer than `most` its beginning, and how it goes on."""
        pieces, found, size = self.pieces(), [], 0
        async for piece in pieces:
            found.append(piece)
            size += len(piece)
            if size > most:
                return b"".join(found), pieces
        return b"".join(found), None

    def close(self) -> None:
        """Nothing more of it is wanted."""
        self._asking.cancel()
