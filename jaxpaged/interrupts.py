"""Ctrl-C while an engine works: accepted where it waits, and kept for later where it changes its books.

Python raises KeyboardInterrupt between any two lines. In the middle of a schedule that would leave blocks that nobody
owns, and requests in two queues. So the engine's methods hold interrupts, and say where one is welcome:

    with held_interrupts():         # an interrupt that comes from here on waits
        ...
        with accepted_interrupts(): # ... until here,
            result = pending.result()
        ...                         # or until the end

A second Ctrl-C that comes before the first was taken is not held: whatever hangs, people get out. The handler of
SIGINT is there while somebody holds; the handler that was there before hears of every interrupt, so whatever it does
(raise, cancel a task) is done. Only the main thread is ever interrupted; in others, and where SIGINT is ignored, none
of this does anything.

While the main thread is inside XLA, waiting for a device, Python runs no handler at all. Where the device never answers
nothing of the above helps, so a thread watches for interrupts that have no effect: it says so after some seconds, and
the next Ctrl-C ends the process.
"""

import contextlib
import functools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Concatenate

Handler = Callable[[int, FrameType | None], Any]

PATIENCE = 5.0
"""Seconds after which an interrupt counts as one without effect."""
REACTION = 1.0
"""Seconds that the main thread has to take one more, when it was told that the next one ends the process."""
EXIT_STATUS = 130


class Watcher:
    """A thread that hears of SIGINT through the file descriptor that Python's handler in C writes to."""

    def __init__(self, patience: float = PATIENCE, reaction: float = REACTION):
        self._patience, self._reaction = patience, reaction
        self.moves = 0
        """Counts what the main thread does with interrupts: while it is stuck, nothing."""
        self.is_watching = False
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        threading.Thread(target=self._watch, name="jaxpaged-interrupts", daemon=True).start()

    def begin(self) -> None:
        """From the main thread. An event loop that uses the descriptor keeps it, and nothing is watched."""
        before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self.is_watching = before == -1
        if not self.is_watching:
            signal.set_wakeup_fd(before, warn_on_full_buffer=False)
        self.moves += 1

    def end(self) -> None:
        if self.is_watching:
            signal.set_wakeup_fd(-1)
        self.is_watching = False

    def _watch(self) -> None:
        while True:
            self._wait_for_interrupt()
            moves = self.moves
            if not self._is_stuck_for(self._patience, moves):
                continue
            tell("Interrupted, but the device has not answered since. Press Ctrl-C again to end the process at once.")
            self._forget_interrupts()
            self._wait_for_interrupt()
            if self._is_stuck_for(self._reaction, moves):
                tell("The device does not answer: the process ends.")
                os._exit(EXIT_STATUS)

    def _wait_for_interrupt(self) -> None:
        while signal.SIGINT not in self._reader.recv(1024):
            pass

    def _forget_interrupts(self) -> None:
        """Those that came before people were told what the next one does."""
        self._reader.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(1024)
        self._reader.setblocking(True)

    def _is_stuck_for(self, seconds: float, moves: int) -> bool:
        """Whether the main thread makes no move within `seconds`, having made this many before."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.05)
            if not self.is_watching or self.moves != moves:
                return False
        return self.is_watching


def tell(message: str) -> None:
    """On standard error, whose lock the main thread may hold."""
    os.write(2, f"\njaxpaged: {message}\n".encode())


@functools.cache
def watcher() -> Watcher:
    return Watcher()


class Held:
    """The handler of SIGINT while interrupts are held."""

    def __init__(self, usual: Handler):
        self.usual = usual
        self.accepts = False
        self.pending: tuple[int, FrameType | None] | None = None

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.accepts or self.pending is not None:
            watcher().moves += 1
            self.pending = None
            self.usual(signum, frame)
        else:  # nothing has moved yet, and the watcher may look before or after this
            self.pending = signum, frame

    def deliver(self) -> None:
        """Let the usual handler hear of an interrupt that was kept."""
        assert self.pending is not None, "no interrupt was kept"
        pending, self.pending = self.pending, None
        self.usual(*pending)


class held_interrupts:  # used like a function
    """Keep interrupts until the end of the block, or until they are accepted in it. Blocks may lie in each other."""

    _held: Held | None

    def __enter__(self) -> None:
        self._held = None
        if threading.current_thread() is not threading.main_thread():
            return
        usual = signal.getsignal(signal.SIGINT)
        if callable(usual) and not isinstance(usual, Held):
            self._held = Held(usual)
            signal.signal(signal.SIGINT, self._held)
            watcher().begin()

    def __exit__(self, *exception: object) -> None:
        held = self._held
        if held is not None:
            watcher().end()
            current: object = signal.getsignal(signal.SIGINT)
            if current is held:
                signal.signal(signal.SIGINT, held.usual)
            if held.pending is not None:
                held.deliver()


class accepted_interrupts:
    """Where an interrupt does no harm, though somebody around holds them: one that was kept is delivered first."""

    def __enter__(self) -> None:
        handler = signal.getsignal(signal.SIGINT)
        in_main = threading.current_thread() is threading.main_thread()
        self._held = handler if in_main and isinstance(handler, Held) else None
        if self._held is not None:
            watcher().moves += 1
            if self._held.pending is not None:
                self._held.deliver()
            self._before, self._held.accepts = self._held.accepts, True

    def __exit__(self, *exception: object) -> None:
        if self._held is not None:
            watcher().moves += 1
            self._held.accepts = self._before


def holding_interrupts[S, **P, R](method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method that no interrupt tears apart."""

    @functools.wraps(method)
    def held(self: S, *args: P.args, **options: P.kwargs) -> R:
        with held_interrupts():
            return method(self, *args, **options)

    return held
