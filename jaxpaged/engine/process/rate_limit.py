"""Half of the event loop's time at most for one kind of work, so that it does not grow into all of it.

Work that comes in time with a clock, such as a device's steps, fills the loop as soon as it takes as long as the clock
gives. All else then gets a round of the loop for each piece of it, and what takes many rounds hardly happens: of new
calls grpc.aio accepts one in several. Left alone for a while the work gathers instead, and done together it costs less.
This module knows nothing of what the work is.
"""

import asyncio
import time
from collections.abc import Callable

SHORTEST, LONGEST = 0.001, 0.05
"""Seconds: work that took less needs no rest, and no rest is longer."""
ROUNDS = 2
"""Of the loop, after which the tasks that work has woken have had their turn: each begins with what was asked for
first."""


class RateLimit:
    """After each piece of work, a time in which there is none: as long as that took, woken tasks' turns included.

    For one event loop at a time, in which all methods but `cancel` are called. `clock`: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._end = 0.0  # of the rest
        self._work: asyncio.Handle | None = None  # it is under way, and what follows it is not known
        self._timer: asyncio.Handle | None = None  # set when there is something to do at the end of the rest
        self._resume: Callable[[], None] | None = None  # what

    def lasts(self, resume: Callable[[], None]) -> bool:
        """Whether there must be no work now. If so, `resume` is called when there may be."""
        if self._resume is None and (self._work is not None or self._clock() < self._end):
            self._resume = resume
            if self._work is None:
                self._wait()
        return self._resume is not None

    def begin_work(self) -> None:
        """Work begins that is done when the loop goes on, but for the tasks that it wakes."""
        self.cancel()
        self._work = asyncio.get_running_loop().call_soon(self._count, self._clock(), ROUNDS - 1)

    def cancel(self) -> None:
        """Nobody is to be called any more, and work may begin at once."""
        for handle in filter(None, (self._work, self._timer)):
            handle.cancel()
        self._end, self._work, self._timer, self._resume = 0.0, None, None, None

    def _count(self, begin: float, rounds_left: int) -> None:
        if rounds_left:
            self._work = asyncio.get_running_loop().call_soon(self._count, begin, rounds_left - 1)
            return
        self._work, now = None, self._clock()
        if now - begin >= SHORTEST:
            self._end = now + min(now - begin, LONGEST)
        if self._resume is not None:
            self._wait()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(max(0.0, self._end - self._clock()), self._over)

    def _over(self) -> None:
        resume = self._resume
        self.cancel()
        assert resume is not None, "the timer is for it"
        resume()
