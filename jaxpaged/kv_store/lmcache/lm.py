"""LMCache's server of its own, `lm://HOST:PORT` (`lmcache_server HOST PORT`): one socket, one answer after the other.

A request is 186 bytes: command, length, layout, type, location, 4 extents as 32-bit numbers, little-endian, and a name
of 150 bytes filled up with spaces; the bytes of a chunk follow a PUT. An answer is 36 bytes: code, length, layout,
type, 4 extents, location, and the bytes of a chunk follow that of a GET. A PUT has no answer, so it is asked whether
the chunk is there. The server has neither passwords nor encryption nor checksums, and never evicts.
"""

import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import batched

import numpy as np

from jaxpaged.kv_store.buffers import Buffer, bytes_of
from jaxpaged.kv_store.lmcache.chunks import Chunk
from jaxpaged.kv_store.lmcache.layout import ChunkLayout
from jaxpaged.kv_store.lmcache.settings import address_of
from jaxpaged.kv_store.lmcache.store import ChunkStore, check_description, description_of

REQUEST, ANSWER = struct.Struct("<9i150s"), struct.Struct("<9i")
PUT, GET, EXIST = 1, 2, 3
FOUND, NOT_FOUND = 200, 400
LEAST_RATE = 8 << 20
"""Bytes in a second that a server must manage, or it is given up."""
MAX_PIPELINED = 64
MAX_IDLE = 16
"""Connections that are kept for the next question."""


class LMStore(ChunkStore):
    """Chunks in the server at `url`. Raises ConfigError for what is no address."""

    def __init__(
        self, url: str, layout: ChunkLayout, model: str, *, timeout_s: float = 2.0, retry_after_s: float = 30.0
    ):
        self.address = address_of(url, "lm")
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()
        super().__init__(url, layout, model, timeout_s=timeout_s, retry_after_s=retry_after_s)

    def exist(self, chunks: Sequence[Chunk]) -> list[bool]:
        questions = [(i, name) for i, chunk in enumerate(chunks) for name in self.names(chunk)]
        found = [True] * len(chunks)
        with self._connection() as connection:
            for some in batched(questions, MAX_PIPELINED):
                self._send(connection, b"".join(request(EXIST, name) for _, name in some))
                for i, _ in some:
                    found[i] &= self._answer(connection)[0] == FOUND
        return found

    def fetch(self, chunk: Chunk) -> np.ndarray | None:
        parts = []
        with self._connection() as connection:
            for name in self.names(chunk):
                self._send(connection, request(GET, name))
                code, *said = self._answer(connection)
                if code != FOUND:
                    return None
                check_description(said[:7], self.layout, name)
                part = self.layout.empty_part()
                self._receive(connection, bytes_of(part.reshape(-1).view(np.uint8)))
                parts.append(part)
        return self.whole(parts)

    def store(self, chunk: Chunk, buffers: Sequence[Buffer]) -> None:
        names = self.names(chunk)
        with self._connection() as connection:
            for name, part in zip(names, self.parts_of(buffers), strict=True):
                self._send(connection, request(PUT, name, description_of(self.layout)))
                self._send(connection, bytes_of(part))
            for name in names:
                self._send(connection, request(EXIST, name))
                if self._answer(connection)[0] != FOUND:
                    raise ConnectionError("a chunk that was put is not there")

    def disconnect(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    # ---- the socket ----------------------------------------------------------------------------------------

    @contextmanager
    def _connection(self) -> Iterator[socket.socket]:
        """One that nobody else uses meanwhile. It is not used again after anything went wrong: an answer may come."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None and not is_quiet(connection):
            connection.close()
            connection = None
        if connection is None:
            connection = socket.create_connection(self.address, self.timeout_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        with self._lock:
            if len(self._idle) < MAX_IDLE and not self._closing:
                self._idle.append(connection)
                return
        connection.close()

    def _send(self, connection: socket.socket, content: bytes | memoryview) -> None:
        connection.settimeout(self.timeout_s + len(content) / LEAST_RATE)
        connection.sendall(content)

    def _answer(self, connection: socket.socket) -> tuple[int, ...]:
        head = bytearray(ANSWER.size)
        self._receive(connection, memoryview(head))
        answer = ANSWER.unpack(head)
        if answer[0] not in (FOUND, NOT_FOUND):
            raise ConnectionError(f"it answers with the code {answer[0]}, as no server of LMCache does")
        return answer

    def _receive(self, connection: socket.socket, target: memoryview) -> None:
        """Fill `target`. TimeoutError where that takes too long altogether."""
        deadline, num_read = time.monotonic() + self.timeout_s + len(target) / LEAST_RATE, 0
        while num_read < len(target):
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
            count = connection.recv_into(target[num_read:])
            if count == 0:
                raise ConnectionError(f"the connection ended after {num_read} of {len(target)} bytes")
            num_read += count


def request(command: int, name: str, described: tuple[int, ...] = (0, 1, 2, 0, 0, 0, 0)) -> bytes:
    """`described`: length, layout, type and extents."""
    length, form, dtype, *extents = described
    return REQUEST.pack(command, length, form, dtype, 0, *extents, name.encode().ljust(150))


def is_quiet(connection: socket.socket) -> bool:
    """Whether a connection that nobody asked anything on stands, and says nothing."""
    try:
        connection.setblocking(False)
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
