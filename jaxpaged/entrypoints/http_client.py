"""An HTTP/1.1 client that costs little and says when every byte came: connections that are kept, and httptools' parser.

Benchmarks and the proxy ask with it. It follows no redirects, uses no proxy and tries nothing twice, since all of that
would be measured. The client that huggingface_hub brings along (httpx2 2.16) takes 3 times as long for a chunk of a
stream (63 us against 20, a small server in the same process included) and 6 times for a request (760 us against 115),
and says of no byte when it came. This module knows nothing of what is asked.
"""

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import httptools

from jaxpaged.errors import UsageError, shown_option

MAX_REFUSAL_BYTES = 4096
IDLE_SECONDS = 2.0
"""A kept connection is not used again after this time: servers close idle ones, uvicorn after 5 seconds."""
Sink = Callable[[bytes, float], None]
"""Takes bytes of a response, and when they came."""


class Flow:
    """Holds a response up while its taker has enough of it, so that it waits in the server."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._is_held = False

    def hold(self) -> None:
        if self._transport is not None and not self._is_held:
            self._is_held = True
            self._transport.pause_reading()

    def go_on(self) -> None:
        if self._is_held:
            self._is_held = False
            self._transport.resume_reading()

    def begin(self, transport: Any) -> None:
        """The response comes from here."""
        self._transport = transport

    def end(self) -> None:
        """There is no more of it: the connection may bring other responses."""
        self.go_on()
        self._transport = None


class Connection(asyncio.Protocol):
    """One connection. A response other than 200 goes to `refusal`, cut to what an error needs."""

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

    async def ask(self, request: bytes, sink: Sink, flow: Flow) -> int:
        """Send a request and read its response to the end. Returns the status; raises OSError."""
        self._answered = asyncio.get_running_loop().create_future()
        self._parser, self._sink = httptools.HttpResponseParser(self), sink
        self.status, self.refusal = 0, bytearray()
        flow.begin(self._transport)
        self._transport.write(request)
        try:
            await self._answered
        except BaseException:
            self.close()
            raise
        finally:
            flow.end()
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
        elif len(self.refusal) < MAX_REFUSAL_BYTES:
            self.refusal += body[: MAX_REFUSAL_BYTES - len(self.refusal)]

    def on_message_complete(self) -> None:
        self.is_usable = self.is_usable and self._parser.should_keep_alive()
        if not self._answered.done():
            self._answered.set_result(None)


class HttpClient:
    """A server at a base URL, asked over as many connections as there are requests at a time."""

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str],
        *,
        insecure: bool = False,
        ca_certificate: str | None = None,
        certificate: tuple[str, str | None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """`certificate`: files with our own one and its key. Raises UsageError for a URL or a header that is none."""
        self.base_url = base_url.rstrip("/")
        self._host, self._port, self._tls = server_of(self.base_url)
        self._path = urlsplit(self.base_url).path
        self._clock = clock
        place = self.base_url.partition("://")[2].partition("/")[0]
        self._headers = header_lines({"Host": place, "User-Agent": "jaxpaged-bench", **headers})
        self._context = tls_context(insecure, ca_certificate, certificate) if self._tls else None
        self._idle: list[Connection] = []

    async def get(self, path: str, timeout: float, more: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        """The status and the content at a path. Raises OSError, also when it takes longer than `timeout` seconds."""
        parts: list[bytes] = []
        request = f"GET {self._path}{path} HTTP/1.1\r\n{self._headers}{header_lines(more or {})}\r\n"
        async with asyncio.timeout(timeout):
            status, refusal = await self._ask(request.encode(), lambda data, now: parts.append(data), Flow())
        return status, b"".join(parts) if status == 200 else refusal

    async def post(
        self,
        path: str,
        body: bytes,
        sink: Sink,
        more: Mapping[str, str],
        timeout: float,
        flow: Flow | None = None,
        *,
        method: str = "POST",
    ) -> tuple[int, bytes]:
        """Post JSON; a good response goes to `sink`, as fast as `flow` lets it. Returns the status and what a bad
        response says. Raises OSError."""
        headers = (
            f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}{header_lines(more)}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        async with asyncio.timeout(timeout):
            return await self._ask(headers.encode() + body, sink, flow or Flow())

    async def reach(self, timeout: float) -> None:
        """Have a connection for the next request. Raises OSError where there is none to be had."""
        async with asyncio.timeout(timeout):
            connection = self._kept() or await self._connect()
        connection.last_used = self._clock()
        self._idle.append(connection)

    async def _ask(self, request: bytes, sink: Sink, flow: Flow) -> tuple[int, bytes]:
        connection = self._kept() or await self._connect()
        status = await connection.ask(request, sink, flow)
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
    raise UsageError(
        f"the address {shown_option('url', url)} is none of a server; it must look like http://127.0.0.1:8000 or https://host/path."
    )


def header_lines(headers: Mapping[str, str]) -> str:
    """Headers as they are sent. Raises UsageError for one that would end the line."""
    for name, value in headers.items():
        if not name or any(not " " < letter <= "~" or letter == ":" for letter in name):
            raise UsageError(f"{name!r} cannot be the name of a header.")
        if not value.isascii() or any(letter < " " for letter in value):
            raise UsageError(f"the header {name} has a value that cannot be sent: only visible ASCII characters can.")
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())


def tls_context(
    insecure: bool, ca_certificate: str | None, certificate: tuple[str, str | None] | None = None
) -> ssl.SSLContext:
    """Certificates are checked, by the system's authorities or a file of one's own, unless `insecure`."""
    try:
        context = ssl.create_default_context(cafile=ca_certificate)
    except OSError as error:
        raise UsageError(f"cannot read the authorities' certificates in {ca_certificate}: {error}.") from None
    if insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if certificate is not None:
        try:
            context.load_cert_chain(*certificate, password=lambda: b"")  # nobody is there to be asked
        except OSError as error:
            raise UsageError(f"{certificate[0]} and its key serve for no connection: {error}.") from None
    return context
