"""One budget of bytes for all pictures on their way: files, decoded, processed, and those that are cached.

What a picture may take is reserved before anything is read, in the order in which callers come; afterwards the pixels
count as long as the array exists, whoever holds it. This module knows neither pictures nor requests.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np

from jaxpaged.errors import EngineDeadError, RequestError

LONGEST_WAIT = 0.5
"""Seconds between two looks, in case nobody tells of room that there is."""

MakeRoom = Callable[[], bool]
"""Makes some room for a caller that would wait for itself. False: it cannot."""


class ByteBudget:
    """At most `num_bytes` at a time. `evict` frees at least so many bytes of what is only cached, as far as it can.

    For several threads.
    """

    def __init__(self, num_bytes: int, evict: Callable[[int], None] = lambda num_bytes: None):
        self.num_bytes = num_bytes
        self._evict = evict
        self._used = 0
        # Reentrant: an array may be freed, and counted, in the middle of anything that this thread does.
        self._changed = threading.Condition(threading.RLock())
        self._waiting: deque[object] = deque()
        self._closed = False

    @property
    def used(self) -> int:
        """Bytes that are reserved, or are held by arrays."""
        return self._used

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def reserve(self, num_bytes: int, field: str, make_room: MakeRoom | None = None) -> "Reservation":
        """Wait until there is room. With `make_room` nobody else frees any: it is called instead of waiting.

        Raises RequestError that names `field` for more than the whole budget, and where `make_room` finds no more.
        """
        if num_bytes > self.num_bytes:
            raise RequestError(
                f"{field} needs up to {num_bytes} bytes while it is processed, and all pictures together may take "
                f"{self.num_bytes} (mm_bytes_in_flight_gb). Send fewer or smaller ones.",
                field,
            )
        turn = object()
        with self._changed:
            self._waiting.append(turn)
        try:
            while not self._taken(turn, num_bytes):
                if self._closed:
                    raise EngineDeadError("The engine has been shut down, and takes no pictures.")
                if make_room is None:
                    with self._changed:
                        if not self._closed and not (self._waiting[0] is turn and self._fits(num_bytes)):
                            self._changed.wait(LONGEST_WAIT)
                elif not make_room():
                    raise RequestError(
                        f"{field} needs up to {num_bytes} bytes while it is processed, and of {self.num_bytes} for all "
                        f"pictures (mm_bytes_in_flight_gb) {self._used} are in use. Hold fewer pictures.",
                        field,
                    )
        finally:
            with self._changed:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                self._changed.notify_all()
        return Reservation(self, num_bytes)

    def close(self) -> None:
        """Nobody waits any longer, or again: EngineDeadError for all who do."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def hold(self, array: np.ndarray) -> None:
        """Count an array, which owns its memory, until it is freed."""
        self.add(array.nbytes)
        weakref.finalize(array, self.add, -array.nbytes).atexit = False

    def add(self, num_bytes: int) -> None:
        """Count more bytes, or fewer."""
        with self._changed:
            self._used += num_bytes
            if num_bytes < 0:
                self._changed.notify_all()

    def _fits(self, num_bytes: int) -> bool:
        return self._used + num_bytes <= self.num_bytes

    def _taken(self, turn: object, num_bytes: int) -> bool:
        """Take the bytes if it is this one's turn and there is room, after what is only cached has gone."""
        with self._changed:
            if self._waiting[0] is not turn:
                return False
        missing = self._used + num_bytes - self.num_bytes
        if missing > 0:
            self._evict(missing)
        with self._changed:
            if not self._fits(num_bytes):
                return False
            self._used += num_bytes
            return True


class Reservation:
    """Bytes that are set apart for one caller until they are given back, in parts or as a whole."""

    def __init__(self, budget: ByteBudget, num_bytes: int):
        self._budget, self._left = budget, num_bytes

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(self, *exception: object) -> None:
        self.give_back(self._left)

    def give_back(self, num_bytes: int) -> None:
        """At most what is left of it."""
        num_bytes = min(num_bytes, self._left)
        self._left -= num_bytes
        self._budget.add(-num_bytes)
