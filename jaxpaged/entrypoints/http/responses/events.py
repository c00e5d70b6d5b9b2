"""Events of a response's stream: numbered, and encoded at once, since what they show goes on changing.

This module knows server-sent events, and nothing of what an event means.
"""

from typing import Any

import msgspec

from jaxpaged.entrypoints.http.errors import HttpError

ENCODER = msgspec.json.Encoder()


class EventLog:
    """Encodes events and hands them out. `sequence_number` counts from 0. Silent: nobody wants them."""

    def __init__(self, silent: bool = False):
        self.silent = silent
        self._number = 0
        self._frames: list[bytes] = []

    def add(self, kind: str, **fields: Any) -> None:
        if self.silent:
            return
        data = ENCODER.encode({"type": kind, "sequence_number": self._number, **fields})
        self._frames.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), data))
        self._number += 1

    def take(self) -> list[bytes]:
        """The events since the last time."""
        frames, self._frames = self._frames, []
        return frames

    def late_error(self, error: HttpError) -> bytes:
        """An event for a failure of the stream itself; a response that fails has one of its own."""
        self.add("error", code=str(error.status), message=str(error), param=error.parameter)
        return b"".join(self.take())
