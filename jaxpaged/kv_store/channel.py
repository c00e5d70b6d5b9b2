"""Messages of engines that lend pages to each other, over a socket: typed, limited in size, and signed with a secret.

A message is two lengths, a msgpack frame, its signature where there is a secret, and a second frame with a page's bytes
(`frames.py`). It begins with both sides' `Hello`; signatures cover both nonces, who speaks, and the number of the
message, so that none can be repeated. A page has its own signature, which covers its bytes. TLS encrypts (`tls.py`).
"""

import hashlib
import hmac
import os
import socket
import ssl
import struct
from typing import Any

import msgspec
import numpy as np

from jaxpaged.errors import PageError
from jaxpaged.frames import FrameDecoder, FrameEncoder
from jaxpaged.kv_store.buffers import aligned_empty
from jaxpaged.kv_store.tls import FIRST_BYTES, SPEAKS_TLS, refusal

VERSION = 2
MAGIC = b"JPKV"
HEAD = struct.Struct("!4sIQ")
MAX_MESSAGE = 1 << 14
TAG_BYTES, NONCE_BYTES = 32, 16


class Hello(msgspec.Struct, tag=True, frozen=True):
    """What each side says first."""

    namespace: str
    nonce: bytes
    is_signed: bool
    version: int = VERSION


class Get(msgspec.Struct, tag=True, frozen=True):
    """Asks for a page under a lease."""

    lease: str
    block_hash: bytes
    group: int


class Page(msgspec.Struct, tag=True, frozen=True):
    """A page, as `page.py` describes it."""

    content: np.ndarray


class Gone(msgspec.Struct, tag=True, frozen=True):
    """There is no such page under the lease, and why."""

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


Message = Hello | Get | Page | Gone | Release | Released | Renew | Renewed


class Channel:
    """One connection. Failures are OSError, and PageError for a peer that is none of ours or says what cannot be; after
    either it must be closed."""

    def __init__(self, connection: socket.socket, namespace: str, secret: bytes | None, *, is_server: bool, most: int):
        """`most`: bytes of a page that may come, 0: none does."""
        self._socket, self._most, self._secret = connection, most, secret
        self._sides = (b"server", b"client") if is_server else (b"client", b"server")
        self._counts, self._session = [0, 0], b""
        self._encoder, self._decoder = FrameEncoder(), FrameDecoder(Message)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._greet(Hello(namespace, os.urandom(NONCE_BYTES), secret is not None), is_server)

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
        page = pages[0] if pages else b""
        head = HEAD.pack(MAGIC, len(frame), len(page))
        self._socket.sendall(head + frame + self._tag(0, head + frame))
        if page:
            self._socket.sendall(page)

    def receive(self) -> Message:
        head = self._read(HEAD.size)
        magic, num_message, num_page = HEAD.unpack(head)
        if magic[:2] in FIRST_BYTES:
            raise PageError(SPEAKS_TLS)
        if magic != MAGIC or num_message > MAX_MESSAGE or num_page > self._most:
            raise PageError(
                f"The peer sent a message that begins with {magic!r} and has {num_message} + {num_page} bytes; at most "
                f"{MAX_MESSAGE} + {self._most} are taken. Is it an engine of this version and model?"
            )
        frame = self._read(num_message)
        tag = self._tag(1, bytes(head) + bytes(frame))
        if tag and not hmac.compare_digest(bytes(self._read(TAG_BYTES)), tag):
            raise PageError("The peer's message is not signed with our page_secret.")
        try:
            return self._decoder.decode([bytes(frame), self._read(num_page)] if num_page else [bytes(frame)])
        except ValueError as error:
            raise PageError(f"The peer's message is none: {error}") from None

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

    def close(self) -> None:
        self._socket.close()


def why_not(own: Hello, other: Message) -> str:
    """Why two peers cannot go on with each other; empty: they can."""
    if not isinstance(other, Hello) or len(other.nonce) != NONCE_BYTES:
        return "It did not begin with a greeting."
    if other.version != own.version:
        return f"One has version {own.version} of the protocol, the other {other.version}."
    if other.namespace != own.namespace:
        return (
            f"One has the namespace {own.namespace[:12]}, the other {other.namespace[:12]}: weights, configuration, "
            "cache type and block size must be the same."
        )
    if other.is_signed != own.is_signed:
        return "One signs with a page_secret (kv_offload_secrets), the other does not."
    return ""
