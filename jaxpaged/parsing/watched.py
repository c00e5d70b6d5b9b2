"""A parser of a stranger's format: one that raises or hangs costs the requests that use it, and no others.

It runs in a thread of its own, which costs some tens of microseconds a piece. When it takes longer than PIECE_SECONDS
for one, it is not asked again. Formats of the package need none of this.
"""

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from jaxpaged.errors import EngineError

logger = logging.getLogger(__name__)

PIECE_SECONDS = 1.0
"""How long everybody waits at most for a parser that hangs, once."""


class Watch:
    """Runs the code of one format, from any thread."""

    def __init__(self, name: str, seconds: float = PIECE_SECONDS):
        self.name, self._seconds = name, seconds
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]] = queue.SimpleQueue()
        self._is_started = self.has_hung = False
        self._one_at_a_time = threading.Lock()

    def run[R](self, call: Callable[[], R]) -> R:
        """What it returns. Raises EngineError for whatever it raises, and when it takes too long."""
        with self._one_at_a_time:
            if self.has_hung:
                raise EngineError(f"the parser {self.name} has hung, and is not asked again. Restart the server.")
            if not self._is_started:
                threading.Thread(target=self._serve, name=f"parser {self.name}", daemon=True).start()
                self._is_started = True
            answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
            self._work.put((call, answer))
            try:
                result, error = answer.get(timeout=self._seconds)
            except queue.Empty:
                self.has_hung = True
                logger.error("the parser %s took more than %g s for a piece of text", self.name, self._seconds)
                raise EngineError(f"the parser {self.name} took more than {self._seconds:g} s.") from None
        if error is not None:
            logger.error("the parser %s failed", self.name, exc_info=error)
            raise EngineError(f"the parser {self.name} failed on this answer; the server's log says why.") from error
        return result

    def _serve(self) -> None:
        while True:
            call, answer = self._work.get()
            try:
                answer.put((call(), None))
            except Exception as error:
                answer.put((None, error))
