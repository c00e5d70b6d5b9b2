"""Who is connected to a producer: so many at a time, of whom those that have not asked for anything yet make room.

What is refused is counted, and the log has one line of it a minute, however many come. Knows no messages.
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

MAX_CONNECTIONS, MAX_STRANGERS = 128, 32
ASK_SECONDS = 5.0
"""Within which a connection must have asked something that is signed as it must be."""
QUIET_SECONDS = 60.0


class Connections:
    """Connections, strangers until they are `known`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, float] = {}  # since when, oldest first
        self._known: set[socket.socket] = set()
        self._quiet_until, self._num_untold = 0.0, 0
        self.num_refused = 0

    def admit(self, connection: socket.socket) -> bool:
        """Whether there is room for it. A stranger may have to leave for that."""
        with self._lock:
            num_others = len(self._strangers) + len(self._known)
            is_full, is_crowd = num_others >= MAX_CONNECTIONS, len(self._strangers) >= MAX_STRANGERS
            leaves = next(iter(self._strangers), None) if is_full or is_crowd else None
            admitted = not is_full or leaves is not None
            if leaves is not None:
                del self._strangers[leaves]
            if admitted:
                self._strangers[connection] = self._clock()
        if leaves is not None:
            hang_up(leaves)
        if leaves is not None or not admitted:
            self.refused(f"more than {MAX_STRANGERS if is_crowd else MAX_CONNECTIONS} are connected")
        return admitted

    def known(self, connection: socket.socket) -> None:
        """It has asked as a consumer does."""
        with self._lock:
            if self._strangers.pop(connection, None) is not None:
                self._known.add(connection)

    def left(self, connection: socket.socket) -> None:
        """It is closed."""
        with self._lock:
            self._strangers.pop(connection, None)
            self._known.discard(connection)

    def expire(self) -> None:
        """Hang up on those that do not ask."""
        with self._lock:
            now = self._clock()
            late = [each for each, since in self._strangers.items() if now - since > ASK_SECONDS]
            for each in late:
                del self._strangers[each]
        for each in late:
            hang_up(each)
            self.refused(f"it asked nothing for {ASK_SECONDS:g} seconds")

    def refused(self, reason: object) -> None:
        """One more that is not served."""
        with self._lock:
            self.num_refused += 1
            now, num_untold = self._clock(), self._num_untold
            if now < self._quiet_until:
                self._num_untold += 1
                return
            self._quiet_until, self._num_untold = now + QUIET_SECONDS, 0
        others = f" So were {num_untold} more since that was told last." if num_untold else ""
        logger.warning("A consumer of keys and values is refused: %.300s.%s", str(reason).rstrip("."), others)

    def close(self) -> None:
        """Hang up on all."""
        with self._lock:
            everybody = [*self._strangers, *self._known]
        for each in everybody:
            hang_up(each)


def hang_up(connection: socket.socket) -> None:
    """The thread that serves it sees the end, and closes it."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # TLS's own would let that thread read what is no TLS
