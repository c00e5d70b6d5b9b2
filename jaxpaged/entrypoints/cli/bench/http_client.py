"""An HTTP/1.1 client that costs little and says when every byte came: connections that are kept, and httptools' parser.

It follows no redirects, uses no proxy and tries nothing twice, since all of that would be measured. This module knows
nothing of what is asked.
"""

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import httptools

from jaxpaged.entrypoints.cli.server_answers import MAX_ERROR_BYTES
from jaxpaged.errors import UsageError

IDLE_SECONDS = 2.0
"""A kept connection is not used again after this time: servers close idle ones, uvicorn after 5 seconds."""
Sink = Callable[[bytes, float], None]
"""Takes bytes of an answer, and when they came."""


class Connection(asyncio.Protocol):
    """One connection. An answer other than 200 goes to `refusal`, cut to what an error needs."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._transport: Any = None
        self._parser: Any = None
        self._answered: asyncio.Future[None] | None = None
        self._sink: Sink = lambda data, now: None
        self._now = 0.0
        self.status = 0
        self.refusal = bytearray()
        self.is_usable = True
        self.last_used = 0.0

    async def ask(self, request: bytes, sink: Sink) -> int:
        """Send a request and read its answer to the end. Returns the status; raises OSError."""
        self._answered = asyncio.get_running_loop().create_future()
        self._parser, self._sink = httptools.HttpResponseParser(self), sink
        self.status, self.refusal = 0, bytearray()
        self._transport.write(request)
        try:
            await self._answered
        except BaseException:
            self.close()
            raise
        self.last_used = self._clock()
        return self.status

    def close(self) -> None:
        self.is_usable = False
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, reason: str) -> None:
        self.is_usable = False
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(ConnectionError(reason))

    # ---- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._now = self._clock()
        try:
            if self._parser is not None:
                self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"the answer is not HTTP: {error}")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(f"the connection was lost: {error}" if error else "the server closed the connection")

    # ---- the parser's side

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self.status == 200:
            self._sink(body, self._now)
        elif len(self.refusal) < MAX_ERROR_BYTES:
            self.refusal += body[: MAX_ERROR_BYTES - len(self.refusal)]

    def on_message_complete(self) -> None:
        self.is_usable = self.is_usable and self._parser.should_keep_alive()
        if not self._answered.done():
            self._answered.set_result(None)


class HttpClient:
    """A server at a base URL, asked over as many connections as there are requests at a time."""

    def __init__(
        self, base_url: str, headers: Mapping[str, str], *, insecure: bool = False, ca_certificate: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):  # fmt: skip
        """Raises UsageError for a URL or a header that is none."""
        self.base_url = base_url.rstrip("/")
        self._host, self._port, self._tls = server_of(self.base_url)
        self._path = urlsplit(self.base_url).path
        self._clock = clock
        place = self.base_url.partition("://")[2].partition("/")[0]
        self._headers = header_lines({"Host": place, "User-Agent": "jaxpaged-bench", **headers})
        self._context = tls_context(insecure, ca_certificate) if self._tls else None
        self._idle: list[Connection] = []

    async def get(self, path: str, timeout: float) -> tuple[int, bytes]:
        """The status and the content at a path. Raises OSError, also when it takes longer than `timeout` seconds."""
        parts: list[bytes] = []
        async with asyncio.timeout(timeout):
            status, refusal = await self._ask(f"GET {self._path}{path} HTTP/1.1\r\n{self._headers}\r\n".encode(),
                                              lambda data, now: parts.append(data))  # fmt: skip
        return status, b"".join(parts) if status == 200 else refusal

    async def post(
        self, path: str, body: bytes, sink: Sink, more: Mapping[str, str], timeout: float
    ) -> tuple[int, bytes]:
        """Post JSON; a good answer goes to `sink`. Returns the status and what a bad answer says. Raises OSError."""
        headers = (
            f"POST {self._path}{path} HTTP/1.1\r\n{self._headers}{header_lines(more)}Content-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        async with asyncio.timeout(timeout):
            return await self._ask(headers.encode() + body, sink)

    async def _ask(self, request: bytes, sink: Sink) -> tuple[int, bytes]:
        connection = self._kept() or await self._connect()
        status = await connection.ask(request, sink)
        if connection.is_usable:
            self._idle.append(connection)
        else:
            connection.close()
        return status, bytes(connection.refusal)

    def _kept(self) -> Connection | None:
        """The connection that was used last, if it is fit to be used again."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable and self._clock() - connection.last_used < IDLE_SECONDS:
                return connection
            connection.close()
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: Connection(self._clock), self._host, self._port, ssl=self._context
        )
        return connection

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


def server_of(url: str) -> tuple[str, int, bool]:
    """(host, port, whether TLS) of a URL. Raises UsageError."""
    try:
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        if parts.scheme in ("http", "https") and parts.hostname and not parts.query and not parts.fragment:
            return parts.hostname, parts.port or (443 if tls else 80), tls
    except ValueError:  # a port that is no number
        pass
    raise UsageError(f"--base-url is {url!r}; it must look like http://127.0.0.1:8000 or https://host/path.")


def header_lines(headers: Mapping[str, str]) -> str:
    """Headers as they are sent. Raises UsageError for one that would end the line."""
    for name, value in headers.items():
        if not name or any(not " " < letter <= "~" or letter == ":" for letter in name):
            raise UsageError(f"{name!r} cannot be the name of a header.")
        if not value.isascii() or any(letter < " " for letter in value):
            raise UsageError(f"the header {name} has a value that cannot be sent: only visible ASCII characters can.")
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())


def tls_context(insecure: bool, ca_certificate: str | None) -> ssl.SSLContext:
    """Certificates are checked, by the system's authorities or a file of one's own, unless `insecure`."""
    try:
        context = ssl.create_default_context(cafile=ca_certificate)
    except OSError as error:
        raise UsageError(f"cannot read --ca-certificate {ca_certificate}: {error}.") from None
    if insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
