"""How many connections a listener has: where there are too many, the one that has waited longest without asking goes.

So who opens thousands and says nothing locks out nobody. This module knows no protocol.
"""

import logging
from typing import Protocol

logger = logging.getLogger(__name__)

FILES_BESIDES = 256
"""Files that a process needs besides its connections."""


class Connection(Protocol):
    """What can be ended at once."""

    def end(self) -> None: ...


class Connections:
    """At most `most` at a time."""

    def __init__(self, most: int):
        self._most = most
        self._open: set[Connection] = set()
        self._idle: dict[Connection, None] = {}  # those that ask nothing, by how long they have not

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, connection: Connection) -> None:
        """A new one, which is idle. If there is no place for it, one that is idle is ended, maybe itself."""
        self._open.add(connection)
        self._idle[connection] = None
        if len(self._open) > self._most:
            longest = next(iter(self._idle))
            self.closed(longest)
            logger.warning("%d connections are open: those that wait longest without a request are ended", self._most)
            longest.end()

    def asks(self, connection: Connection) -> None:
        """It has a request under way."""
        self._idle.pop(connection, None)

    def waits(self, connection: Connection) -> None:
        """It has none any more."""
        if connection in self._open:
            self._idle[connection] = None

    def closed(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)


def allowed_connections(wanted: int) -> int:
    """So many of the connections that are wanted as this process may have: it is allowed as many files as the system
    lets it have."""
    try:
        import resource
    except ImportError:  # not on Windows
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + FILES_BESIDES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < needed:
            logger.warning(
                "this process may open %d files, so it keeps %d connections instead of %d. Raise 'ulimit -Hn'.",
                soft,
                max(soft - FILES_BESIDES, 1),
                wanted,
            )
            return max(soft - FILES_BESIDES, 1)
    return wanted
