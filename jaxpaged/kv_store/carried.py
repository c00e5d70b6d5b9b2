"""What carried the pages that came from other engines, counted for metrics."""

import socket
import ssl
import threading

TRANSPORTS = ("shared_memory", "unix", "tcp", "tls")
"""Engines on one host use the first, and the second for what has no room there."""


def transport_of(connection: socket.socket) -> str:
    """What carries the bytes that are read from a connection."""
    if isinstance(connection, ssl.SSLSocket):
        return "tls"
    return "unix" if connection.family == socket.AF_UNIX else "tcp"


class Carried:
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
