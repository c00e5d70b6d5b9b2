"""Threads that nobody has to wait for: a store may hang, and neither its callers nor the end of the program do."""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

Work = tuple[Future[Any], Callable[[], Any]]


class NoAnswerError(TimeoutError):
    """A call takes longer than it may."""


class Threads:
    """At most `num_threads` that do what they are given, in this order. They start when they are needed."""

    def __init__(self, num_threads: int, name: str):
        self._most, self._name, self._lock = num_threads, name, threading.Lock()
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._num_idle, self._closing = 0, False

    def submit[R](self, function: Callable[..., R], *args: Any) -> "Future[R]":
        """Have `function(*args)` called. Behind `close` it is cancelled."""
        future: Future[R] = Future()
        with self._lock:
            if self._closing:
                future.cancel()
                return future
            self._work.put((future, lambda: function(*args)))
            if self._num_idle > 0:
                self._num_idle -= 1
            elif len(self._threads) < self._most:
                self._start()
            has_threads = bool(self._threads)
        if not has_threads and (work := self._work.get()) is not None:
            do(*work)
        return future

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter ends, and those that there are do it all, or who submits
            return
        self._threads.append(thread)

    def call[R](self, seconds: float, function: Callable[..., R], *args: Any) -> R:
        """What `function(*args)` gives, or raises. Raises NoAnswerError where that takes longer; if no thread has
        begun it by then, none will."""
        future = self.submit(function, *args)
        try:
            return future.result(seconds)
        except TimeoutError:
            if future.done() and not future.cancelled():
                raise  # its own
            future.cancel()
            raise NoAnswerError(f"no answer within {seconds:g} s") from None

    def close(self, seconds: float, *, cancels: bool = False) -> bool:
        """Do what was given, unless it `cancels` that, and end the threads: within so many seconds, or not at all.
        Whether they have ended."""
        with self._lock:
            self._closing = True
            while cancels and not self._work.empty():
                if (work := self._work.get()) is not None:
                    work[0].cancel()
            for _ in self._threads:
                self._work.put(None)
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (work := self._next()) is not None:
            do(*work)
            del work

    def _next(self) -> Work | None:
        try:
            return self._work.get_nowait()
        except queue.Empty:
            with self._lock:
                self._num_idle += 1
            return self._work.get()


def do(future: Future[Any], function: Callable[[], Any]) -> None:
    """Call a function, unless it is cancelled, and let its future know."""
    if future.set_running_or_notify_cancel():
        try:
            result = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
