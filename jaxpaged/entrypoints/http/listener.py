"""Sockets, and the HTTP protocol on them with limits that the protocol's library does not have.

This module knows uvicorn, and neither endpoints nor engines.
"""

import asyncio
import contextlib
import functools
import logging
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jaxpaged.entrypoints.http.errors import HttpError, error_body
from jaxpaged.errors import UsageError

HEADER_TIMEOUT = 30.0
"""Seconds within which the headers of a request must have come."""
CLOSING_TIMEOUT = 5
"""Seconds that connections get to close when nothing is under way any more."""
BACKLOG = 2048


def bind(host: str, port: int, option: str = "--port") -> socket.socket:
    """A socket at this address, which does not listen yet. Raises UsageError when the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"cannot find the address {host!r}: {error.strerror}. Choose another --host.") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}. Choose another {option}.") from None
    return bound


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Listener(uvicorn.Server):
    """Serves one application on one socket. Signals are left to who runs it."""

    def __init__(self, app: ASGIApp, bound: socket.socket, *, max_header_bytes: int, access_log: bool = False):
        if access_log:
            logging.getLogger("uvicorn.access").setLevel(logging.INFO)
        protocol: Any = functools.partial(LimitedProtocol, max_header_bytes)
        super().__init__(
            uvicorn.Config(
                app, http=protocol, ws="none", lifespan="off", log_config=None, access_log=access_log,
                server_header=False, backlog=BACKLOG, timeout_graceful_shutdown=CLOSING_TIMEOUT,
            )
        )  # fmt: skip
        self._bound = bound

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def run_until_stopped(self) -> None:
        """Serve until `should_exit` is set."""
        await self.serve([self._bound])


class LimitedProtocol(HttpToolsProtocol):
    """HTTP/1.1 whose headers must be short, and come soon."""

    def __init__(self, max_header_bytes: int, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self._max_header_bytes = max_header_bytes
        self._num_header_bytes = 0
        self._in_headers = True
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._expect_headers()

    def connection_lost(self, error: Exception | None) -> None:
        self._end_timer()
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_headers:  # the library collects what is not complete
            self._num_header_bytes += len(data)
            if self._num_header_bytes > self._max_header_bytes:
                self._refuse_headers()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_headers()

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._end_timer()
        length = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if length > self._max_header_bytes:
            self._refuse_headers()
        else:
            super().on_headers_complete()

    def _expect_headers(self) -> None:
        self._in_headers, self._num_header_bytes = True, 0
        self._end_timer()
        self._timer = self.loop.call_later(HEADER_TIMEOUT, self.transport.close)

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse_headers(self) -> None:
        limit = self._max_header_bytes
        body = error_body(HttpError(431, f"The headers have more than {limit} bytes. Shorten them."))
        head = (
            "HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        if not self.transport.is_closing():
            self.transport.write(head.encode() + body)
            self.transport.close()
