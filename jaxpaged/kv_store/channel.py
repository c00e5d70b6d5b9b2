"""Messages of engines that lend pages to each other, over a socket: typed, limited in size, and signed with a secret.

A message is the lengths of a msgpack frame and of the pages behind it, the frame, its signature where there is a
secret, and the bytes of the pages (`frames.py`). It begins with both sides' `Hello`; signatures cover both nonces, who
speaks, and the number of the message, so that none can be repeated. A page has its own signature, which covers its
bytes. TLS encrypts (`tls.py`). Between engines on one host pages lie in shared memory, where there is room, and only
the rest comes over the (Unix) socket (`shared_memory.py`).
"""

import hashlib
import hmac
import os
import socket
import ssl
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from jaxpaged.encoding.frames import FrameDecoder, FrameEncoder
from jaxpaged.errors import PageError
from jaxpaged.kv_store import shared_memory
from jaxpaged.kv_store.buffers import aligned_empty
from jaxpaged.kv_store.connections import hang_up
from jaxpaged.kv_store.tls import FIRST_BYTES, SPEAKS_TLS, refusal

VERSION = 3
MAGIC = b"JPKV"
HEAD = struct.Struct("!4sIH")
MAX_MESSAGE = 1 << 14
MAX_PAGES = 64
"""Of one message."""
SHARED = 1 << 63
"""Marks the length of a page that lies in shared memory."""
TAG_BYTES, NONCE_BYTES = 32, 16
TRANSPORTS = ("shared_memory", "unix", "tcp", "tls")
"""Engines on one host use the first, and the second for what has no room there."""


class Hello(msgspec.Struct, tag=True, frozen=True):
    """What each side says first."""

    namespace: str
    nonce: bytes
    is_signed: bool
    page_tokens: int = 0
    """For people; 0: it does not say."""
    version: int = VERSION


class Get(msgspec.Struct, tag=True, frozen=True):
    """Asks for pages under a lease, by block hash and group. Where none is there yet, one is waited for."""

    lease: str
    keys: list[tuple[bytes, int]]


class Pages(msgspec.Struct, tag=True, frozen=True):
    """Pages that were asked for, as `page.py` describes them, and which of the question they are; which will never
    come; and whether the prompt is still being computed, so that others may."""

    contents: list[np.ndarray]
    there: list[int]
    gone: list[int]
    is_open: bool


class Gone(msgspec.Struct, tag=True, frozen=True):
    """There is no such lease, or nothing at all for this peer, and why."""

    reason: str


class Release(msgspec.Struct, tag=True, frozen=True):
    """The lease is not needed any more."""

    lease: str


class Released(msgspec.Struct, tag=True, frozen=True):
    """Whether there was such a lease."""

    was_there: bool


class Renew(msgspec.Struct, tag=True, frozen=True):
    """The lease is needed for longer."""

    lease: str


class Renewed(msgspec.Struct, tag=True, frozen=True):
    """For how many seconds from now there will be such a lease, 0 where there is none."""

    seconds: float


Message = Hello | Get | Pages | Gone | Release | Released | Renew | Renewed


def transport_of(connection: socket.socket) -> str:
    """What carries the bytes that are read from a connection."""
    if isinstance(connection, ssl.SSLSocket):
        return "tls"
    return "unix" if connection.family == socket.AF_UNIX else "tcp"


class TransportCounters:
    """Pages and their bytes by transport, for any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums = {transport: [0, 0] for transport in TRANSPORTS}

    def add(self, transport: str, num_bytes: int) -> None:
        """A page has come."""
        with self._lock:
            sums = self._sums[transport]
            sums[0] += 1
            sums[1] += num_bytes

    def stats(self) -> dict[str, dict[str, int]]:
        """Since the start, by transport: pages, and their bytes."""
        with self._lock:
            pages, num_bytes = ({name: sums[i] for name, sums in self._sums.items()} for i in (0, 1))
        return {"kv_borrowed_pages": pages, "kv_borrowed_bytes": num_bytes}


class Channel:
    """One connection. Failures are OSError, and PageError for a peer that is none of ours or says what cannot be; after
    either it must be closed."""

    def __init__(
        self,
        connection: socket.socket,
        namespace: str,
        secret: bytes | None,
        *,
        is_server: bool,
        most: int,
        page_tokens: int = 0,
        transports: TransportCounters | None = None,
    ):
        """`most`: bytes of each page that may come, 0: none does. The other side is told `page_tokens` where it is
        refused. `transports` hears of pages that come."""
        self._transports, self._transport = transports or TransportCounters(), transport_of(connection)
        self._socket, self._most, self._secret = connection, most, secret
        self._sides = (b"server", b"client") if is_server else (b"client", b"server")
        self._counts, self._session = [0, 0], b""
        self._encoder, self._decoder = FrameEncoder(), FrameDecoder(Message)
        is_near = connection.family == socket.AF_UNIX
        if not is_near:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._arena: shared_memory.Arena | None = None
        self._greet(Hello(namespace, os.urandom(NONCE_BYTES), secret is not None, page_tokens), is_server)
        if is_near:
            self._arena = shared_memory.offer(connection) if is_server else shared_memory.accept(connection)

    def _greet(self, own: Hello, is_server: bool) -> None:
        key, self._secret = self._secret, None
        if not is_server:
            self.send(own)
        other = self.receive()
        if isinstance(other, Gone):
            raise PageError(f"The peer refuses: {other.reason[:300]}")
        reason = why_not(own, other)
        if is_server:
            self.send(Gone(reason) if reason else own)
        if reason or not isinstance(other, Hello):
            raise PageError(reason)
        self._session = other.nonce + own.nonce if is_server else own.nonce + other.nonce
        self._secret = None if key is None else hmac.digest(key, b"jaxpaged page channel", "sha256")

    def send(self, message: Message) -> None:
        frame, *pages = self._encoder.encode(message)
        if self._arena is not None and pages:
            self._arena.begin()
        is_shared = [self._arena is not None and self._arena.put(page) for page in pages]
        sizes = [len(page) | (SHARED if shared else 0) for page, shared in zip(pages, is_shared)]
        head = HEAD.pack(MAGIC, len(frame), len(pages)) + struct.pack(f"!{len(sizes)}Q", *sizes)
        self._socket.sendall(head + frame + self._tag(0, head + frame))
        for page, shared in zip(pages, is_shared):
            if not shared:
                self._socket.sendall(page)

    def receive(self) -> Message:
        head = bytes(self._read(HEAD.size))
        magic, num_message, num_pages = HEAD.unpack(head)
        if magic[:2] in FIRST_BYTES:
            raise PageError(SPEAKS_TLS)
        if magic != MAGIC or num_message > MAX_MESSAGE or num_pages > (MAX_PAGES if self._most else 0):
            raise PageError(
                f"The peer sent a message that begins with {magic!r} and has {num_message} bytes and {num_pages} "
                f"pages; at most {MAX_MESSAGE} and {MAX_PAGES} are taken. Is it an engine of this version and model?"
            )
        head += bytes(self._read(8 * num_pages))
        sizes = struct.unpack_from(f"!{num_pages}Q", head, HEAD.size)
        largest = max((size & ~SHARED for size in sizes), default=0)
        if largest > self._most:
            raise PageError(f"The peer sent a page of {largest} bytes; at most {self._most} are taken.")
        frame = bytes(self._read(num_message))
        tag = self._tag(1, head + frame)
        if tag and not hmac.compare_digest(bytes(self._read(TAG_BYTES)), tag):
            raise PageError("The peer's message is not signed with our page_secret.")
        try:
            return self._decoder.decode([frame, *self._pages(sizes)])
        except ValueError as error:
            raise PageError(f"The peer's message is none: {error}") from None

    def _pages(self, sizes: Sequence[int]) -> Iterator[Any]:
        if self._arena is not None and sizes:
            self._arena.begin()
        for size in sizes:
            if not size & SHARED:
                page, transport = self._read(size), self._transport
            elif self._arena is not None:
                page, transport = self._arena.take(size & ~SHARED), "shared_memory"
            else:
                raise PageError("The peer says that a page is in shared memory, and there is none.")
            self._transports.add(transport, size & ~SHARED)
            yield page

    def _tag(self, direction: int, content: bytes) -> bytes:
        """The signature of the next message that we send (0) or get (1), empty without a secret."""
        if self._secret is None:
            return b""
        self._counts[direction] += 1
        number = self._counts[direction].to_bytes(8, "big")
        return hmac.digest(self._secret, self._session + self._sides[direction] + number + content, hashlib.sha256)

    def _read(self, size: int) -> Any:
        content = aligned_empty(size)
        view, done = memoryview(content), 0
        while done < size:
            try:
                count = self._socket.recv_into(view[done:])
            except ssl.SSLError as error:
                raise refusal(error) from None
            if not count and bytes(view[:2]) in FIRST_BYTES and done >= 2:
                raise PageError(SPEAKS_TLS)
            if not count:
                raise ConnectionError("the peer closed the connection")
            done += count
        return content

    def hang_up(self) -> None:
        """Let the thread that waits here see the end."""
        hang_up(self._socket)

    @property
    def is_near(self) -> bool:
        """Whether pages come through memory."""
        return self._arena is not None

    def close(self) -> None:
        self._arena = None
        self._socket.close()


def why_not(own: Hello, other: Message) -> str:
    """Why two peers cannot go on with each other; empty: they can."""
    if not isinstance(other, Hello) or len(other.nonce) != NONCE_BYTES:
        return "It did not begin with a greeting."
    if other.version != own.version:
        return f"One has version {own.version} of the protocol, the other {other.version}."
    if other.namespace != own.namespace:
        return (
            f"One has the namespace {own.namespace[:12]}, the other {other.namespace[:12]}, with "
            f"{own.page_tokens or '?'} and {other.page_tokens or '?'} tokens in a page: weights, configuration, cache "
            "type, and size and form of pages must be the same."
        )
    if other.is_signed != own.is_signed:
        return "One signs with a page_secret (kv_offload_secrets), the other does not."
    return ""
