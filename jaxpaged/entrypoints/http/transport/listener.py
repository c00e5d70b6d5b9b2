"""Sockets, and the HTTP protocol on them with limits that the protocol's library does not have.

This module knows uvicorn, and neither endpoints nor engines.
"""

import asyncio
import contextlib
import errno
import functools
import os
import re
import socket
import stat
import weakref
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from jaxpaged.entrypoints.http.errors import HttpError, error_body, status_of
from jaxpaged.entrypoints.http.transport.connections import Connections
from jaxpaged.entrypoints.http.transport.sending import PIPE
from jaxpaged.errors import UsageError
from jaxpaged.serving.errors import ServingError

HEADER_TIMEOUT = 30.0
"""Seconds within which the headers of a request must have come, or the rest of a body after its response."""
WRITE_TIMEOUT = 300.0
"""Seconds within which a client must take something of what waits for it."""
CLOSING_TIMEOUT = 5
"""Seconds that connections get to close when nothing is under way any more."""
BACKLOG = 2048
MAX_CONNECTIONS = 4096
HOST = re.compile(rb"[\w.~!$&'()*+;=%:\[\]-]*")
"""What may stand in the header Host: a name or an address, and a port. It may be empty."""


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
        wrong = "--host" if error.errno == errno.EADDRNOTAVAIL else option
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}. Choose another {wrong}.") from None
    return bound


def bind_unix(path: str, option: str = "--uds") -> socket.socket:
    """A Unix socket at `path`, for its owner and group, in place of one that nobody listens on any more.

    Raises UsageError when the path cannot be had.
    """
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        remove_stale(path)
        bound.bind(path)
        os.chmod(path, 0o660)
    except OSError as error:
        bound.close()
        raise UsageError(f"cannot listen on {path}: {error.strerror or error}. Choose another {option}.") from None
    return bound


def remove_stale(path: str) -> None:
    """Raises OSError unless nothing is there, or a socket that nobody listens on."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise FileExistsError(errno.EEXIST, "it exists and is no socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def url_of(bound: socket.socket, scheme: str = "http") -> str:
    if bound.family == socket.AF_UNIX:
        return f"unix:{bound.getsockname()}"
    host, port = bound.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class Listener(uvicorn.Server):
    """Serves one application on one socket, over `max_connections` at a time at most.

    Signals are left to who runs it. `tls`: see `tls.tls_settings`.
    """

    def __init__(
        self,
        app: ASGIApp,
        bound: socket.socket,
        *,
        max_header_bytes: int,
        max_connections: int = MAX_CONNECTIONS,
        tls: Mapping[str, Any] | None = None,
    ):
        self.connections = Connections(max_connections)
        protocol: Any = functools.partial(LimitedProtocol, max_header_bytes, self.connections)
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=CLOSING_TIMEOUT,
                **(tls or {}),
            )
        )
        self._bound = bound

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def listen(self) -> None:
        """From now on clients that connect are not refused; they wait for `run_until_stopped`."""
        self._bound.listen(BACKLOG)

    async def run_until_stopped(self) -> None:
        """Serve until `should_exit` is set."""
        await self.serve([self._bound])


class AnswerPipe:
    """The `Pipe` of one response: its chunks go straight to the connection.

    The library's record of the exchange has the scope, and that has the pipe, which therefore does not keep the record:
    what holds itself stays until the garbage collector looks.
    """

    def __init__(self, cycle: RequestResponseCycle, loop: asyncio.AbstractEventLoop):
        self._cycle = weakref.ref(cycle)
        self._transport = cycle.transport
        self._now = loop.time
        self.num_bytes = 0
        self.last_time = 0.0

    @property
    def is_clear(self) -> bool:
        cycle = self._cycle()
        if cycle is None or not cycle.chunked_encoding:
            return False
        return not (cycle.response_complete or cycle.disconnected or cycle.flow.write_paused)

    def write(self, piece: bytes) -> None:
        self.num_bytes += len(piece)
        self.last_time = self._now()
        self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))


class AnswerTransport:
    """The transport of a connection as its responses have it: they end it by `LimitedProtocol.leave`.

    Answers do not keep the connection, as `AnswerPipe` does not keep them.
    """

    def __init__(self, protocol: "LimitedProtocol"):
        self.write = protocol.transport.write
        self.is_closing = protocol.transport.is_closing
        self._leave = weakref.WeakMethod(protocol.leave)

    def close(self) -> None:
        if (leave := self._leave()) is not None:
            leave()


class LimitedProtocol(HttpToolsProtocol):
    """HTTP/1.1 whose headers must be short, come soon, and name one host; who neither asks nor reads is left."""

    def __init__(self, max_header_bytes: int, connections: Connections, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self._max_header_bytes = max_header_bytes
        self._connections = connections
        self._num_bare_bytes = 0  # that came since there was a part of a body
        self._in_headers = True
        self._had_body = False  # in the data that came last
        self._refused = False
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._for_answers = AnswerTransport(self)
        self._expect_headers()
        self._connections.opened(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._end_timer()
        self._end_write_timer()
        self._connections.closed(self)
        super().connection_lost(error)

    def end(self) -> None:
        """Leave the client at once."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._had_body = False
        super().data_received(data)
        # The library collects headers that are not complete, and those after a body.
        if self._refused or self._had_body:
            return
        if self._in_headers or self.cycle.more_body:
            self._num_bare_bytes += len(data)
            if self._num_bare_bytes > self._max_header_bytes:
                self._refuse(self._too_long())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_headers()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # what follows a body is none of what the request was let in for
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_headers, self._num_bare_bytes = False, 0
        self._end_timer()
        self._connections.asks(self)
        problem = None if self._refused else self._headers_problem()
        if problem is not None:
            self._refuse(problem)
        if not self._refused:
            super().on_headers_complete()
            self.scope[PIPE] = AnswerPipe(self.cycle, self.loop)
            self.cycle.transport = self._for_answers

    def leave(self) -> None:
        """End the connection after a response, or where there can be none."""
        if self.cycle.response_complete and self.cycle.more_body:
            self._linger()
        else:
            self._close()

    def _linger(self) -> None:
        """Look at nothing more, but take it until the client goes, or until `HEADER_TIMEOUT`: one that still sends
        reads its response after that, and would lose it if the socket were closed meanwhile."""
        self._refused = True
        self._connections.waits(self)
        self._start_timer()
        self._leave_if_not_read()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def on_response_complete(self) -> None:
        last = not self.pipeline
        if self._refused:
            return
        super().on_response_complete()
        if self.transport.is_closing():
            self._close()
        elif last:
            self._connections.waits(self)
            self._start_timer()
            if not self.cycle.more_body:
                self._in_headers, self._num_bare_bytes = True, 0

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._end_write_timer()
        self._write_timer = self.loop.call_later(WRITE_TIMEOUT, self.transport.abort)

    def resume_writing(self) -> None:
        self._end_write_timer()
        super().resume_writing()

    def on_body(self, body: bytes) -> None:
        self._had_body, self._num_bare_bytes = True, 0
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._refused:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What the library answers to what is not HTTP."""
        self._refuse(ServingError(msg))

    def _headers_problem(self) -> ServingError | None:
        """Why a request is refused for its headers: their length, or the host that it is meant for."""
        length = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if length > self._max_header_bytes:
            return self._too_long()
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
            count = "no Host header" if not hosts else f"{len(hosts)} Host headers"
            return ServingError(f"The request has {count}. Send one.", "Host")
        if hosts and not HOST.fullmatch(hosts[0]):
            return ServingError(f"The header Host is {hosts[0].decode('latin-1')!r}, no host. Correct it.", "Host")
        return None

    def _expect_headers(self) -> None:
        self._in_headers, self._num_bare_bytes = True, 0
        self._start_timer()

    def _start_timer(self) -> None:
        self._end_timer()
        self._timer = self.loop.call_later(HEADER_TIMEOUT, self._close)

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _close(self) -> None:
        """Close the connection, at the latest when the client has long not taken what was written for it."""
        self._end_timer()
        self.transport.close()
        self._leave_if_not_read()

    def _leave_if_not_read(self) -> None:
        if self.transport.get_write_buffer_size():
            self._end_write_timer()
            self._write_timer = self.loop.call_later(WRITE_TIMEOUT, self.transport.abort)

    def _too_long(self) -> ServingError:
        return HttpError(431, f"The headers have more than {self._max_header_bytes} bytes. Shorten them.")

    def _refuse(self, error: ServingError) -> None:
        """Answer, and close the connection: what follows on it is not looked at."""
        self._refused = True
        body, status = error_body(error), status_of(error)
        headers = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        if not self.transport.is_closing():
            self.transport.write(headers.encode() + body)
            is_answering = self.cycle is not None and not self.cycle.response_complete
            self._close() if is_answering else self._linger()
