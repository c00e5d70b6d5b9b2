"""Memory that two engines on one host share, and how they find each other there.

Besides TCP a producer listens at a Unix socket. Its name follows from host and port, and is in the kernel's own name
space (it begins with a zero byte). For each consumer that connects, with the same user id, it makes memory without a
name (memfd) and passes its descriptor on: nobody chooses a path, and the kernel frees it with the last process that has
it, however that ends. It is sealed, so that it cannot shrink below whoever reads it. The producer writes pages there,
the consumer copies them out and checks its copy, one answer at a time.
"""

import fcntl
import mmap
import os
import socket
import struct
import sys

import numpy as np

from jaxpaged.errors import PageError
from jaxpaged.kv_store.buffers import ALIGNMENT, aligned_empty

IS_HERE = sys.platform == "linux"
"""Elsewhere engines on one host speak TCP."""
ARENA_BYTES = 8 << 20
SEALS = 0x0001 | 0x0002 | 0x0004
"""F_SEAL_SEAL, F_SEAL_SHRINK and F_SEAL_GROW of Linux."""
CREDENTIALS = struct.Struct("3i")  # process, user, group


class Arena:
    """Memory of one connection. Pages are put there one behind the other, anew for every message."""

    def __init__(self, descriptor: int, size: int, *, is_ours: bool):
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_ours else 0)
        self._bytes = np.frombuffer(mmap.mmap(descriptor, size, mmap.MAP_SHARED, protection), np.uint8)
        self._end = 0

    def begin(self) -> None:
        """A message begins."""
        self._end = 0

    def put(self, page: memoryview) -> bool:
        """Copy a page behind those of this message. False where it does not fit."""
        start = self._place(len(page))
        if start is None:
            return False
        self._bytes[start : self._end] = page
        return True

    def take(self, size: int) -> np.ndarray:
        """A copy of the next page of this message. Raises PageError for one that cannot be there."""
        start = self._place(size)
        if start is None:
            raise PageError(f"The peer says that {size} bytes are in memory that has {self._bytes.nbytes}.")
        copy = aligned_empty(size)
        copy[:] = self._bytes[start : self._end]
        return copy

    def _place(self, size: int) -> int | None:
        start = -(-self._end // ALIGNMENT) * ALIGNMENT
        if start + size > self._bytes.nbytes:
            return None
        self._end = start + size
        return start


def offer(connection: socket.socket) -> Arena:
    """Make memory, and give it to the peer of a Unix socket. Raises OSError."""
    descriptor = os.memfd_create("jaxpaged-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, ARENA_BYTES)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        socket.send_fds(connection, [b"m"], [descriptor])
        return Arena(descriptor, ARENA_BYTES, is_ours=True)
    finally:
        os.close(descriptor)


def accept(connection: socket.socket) -> Arena:
    """The memory that a peer gives. Raises OSError, and PageError for what is none that can be read safely."""
    content, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    try:
        if not content:
            raise ConnectionError("the peer closed the connection")
        if len(descriptors) != 1 or fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise PageError("The peer gave no memory that keeps its size.")
        size = os.fstat(descriptors[0]).st_size
        if not 0 < size <= ARENA_BYTES:
            raise PageError(f"The peer gave memory of {size} bytes; it must be {ARENA_BYTES} at most.")
        return Arena(descriptors[0], size, is_ours=False)
    finally:
        for each in descriptors:
            os.close(each)


def name_of(host: str, port: int) -> str:
    """The name of the Unix socket of a producer at `host` and `port`."""
    return f"\0jaxpaged-kv-{host}-{port}"


def listen(host: str, port: int) -> socket.socket | None:
    """Where engines on this host connect; None where that cannot be, and TCP is all there is."""
    if not IS_HERE:
        return None
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(name_of(host, port))
        listener.listen()
        return listener
    except OSError:
        listener.close()
        return None


def connect(host: str, port: int, seconds: float) -> socket.socket | None:
    """A connection to a producer on this host, of our own user; None where there is none."""
    if not IS_HERE:
        return None
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(seconds)
    try:
        connection.connect(name_of(host, port))
        if is_our_user(connection):
            return connection
    except OSError:
        pass
    connection.close()
    return None


def is_our_user(connection: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket has our user id."""
    _, user, _ = CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return user == os.geteuid()
