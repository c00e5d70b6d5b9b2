"""Ctrl-C while an engine works: accepted where it waits, and kept for later where it changes its books.

Python raises KeyboardInterrupt between any two lines. In the middle of a schedule that would leave blocks that nobody
owns, and requests in two queues. So the engine's methods hold interrupts, and say where one is welcome:

    with held_interrupts():         # an interrupt that comes from here on waits
        ...
        with accepted_interrupts(): # ... until here,
            result = pending.result()
        ...                         # or until the end

A second Ctrl-C that comes before the first was taken is not held: whatever hangs, people get out. The handler of
SIGINT is the only state, and it is there while somebody holds; the handler that was there before hears of every
interrupt, so whatever it does (raise, cancel a task) is done. Only the main thread is ever interrupted; in others, and
where SIGINT is ignored, none of this does anything.
"""

import functools
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Concatenate

Handler = Callable[[int, FrameType | None], Any]


class Held:
    """The handler of SIGINT while interrupts are held."""

    def __init__(self, usual: Handler):
        self.usual = usual
        self.accepts = False
        self.pending: tuple[int, FrameType | None] | None = None

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.accepts or self.pending is not None:
            self.pending = None
            self.usual(signum, frame)
        else:
            self.pending = signum, frame

    def deliver(self) -> None:
        """Let the usual handler hear of an interrupt that was kept."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            self.usual(*pending)


class held_interrupts:  # used like a function
    """Keep interrupts until the end of the block, or until they are accepted in it. Blocks may lie in each other."""

    def __enter__(self) -> None:
        self._held: Held | None = None
        if threading.current_thread() is not threading.main_thread():
            return
        usual = signal.getsignal(signal.SIGINT)
        if callable(usual) and not isinstance(usual, Held):
            self._held = Held(usual)
            signal.signal(signal.SIGINT, self._held)

    def __exit__(self, *exception: object) -> None:
        held = self._held
        if held is not None:
            if signal.getsignal(signal.SIGINT) is held:
                signal.signal(signal.SIGINT, held.usual)
            held.deliver()


class accepted_interrupts:
    """Where an interrupt does no harm, though somebody around holds them: one that was kept is delivered first."""

    def __enter__(self) -> None:
        handler = signal.getsignal(signal.SIGINT)
        in_main = threading.current_thread() is threading.main_thread()
        self._held = handler if in_main and isinstance(handler, Held) else None
        if self._held is not None:
            self._held.deliver()
            self._before, self._held.accepts = self._held.accepts, True

    def __exit__(self, *exception: object) -> None:
        if self._held is not None:
            self._held.accepts = self._before


def holding_interrupts[S, **P, R](method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method that no interrupt tears apart."""

    @functools.wraps(method)
    def held(self: S, *args: P.args, **options: P.kwargs) -> R:
        with held_interrupts():
            return method(self, *args, **options)

    return held
