"""A store that fails is left alone for a while: a dead one costs one time-out, not one for each page.

It also keeps the log to one line when trouble begins and one when it ends. Knows no store.
"""

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


class CircuitBreaker:
    """Closed while all is well. A failure opens it for `retry_after_s`; then one attempt goes through, and decides."""

    def __init__(self, name: str, retry_after_s: float, clock: Callable[[], float] = time.monotonic):
        self.name = name
        self.retry_after_s = retry_after_s
        self._clock = clock
        self._lock = threading.Lock()
        self._open_until: float | None = None

    def allows(self) -> bool:
        """Whether to try now. While it is open, one attempt in `retry_after_s` may."""
        if self._open_until is None:
            return True
        with self._lock:
            now = self._clock()
            if self._open_until is not None and now < self._open_until:
                return False
            if self._open_until is not None:
                self._open_until = now + self.retry_after_s
            return True

    @property
    def blocks(self) -> bool:
        """Whether `allows` would say no."""
        until = self._open_until
        return until is not None and self._clock() < until

    @property
    def is_open(self) -> bool:
        return self._open_until is not None

    def failed(self, error: object) -> None:
        """`error`: what happened, an exception or words."""
        with self._lock:
            is_news = self._open_until is None
            self._open_until = self._clock() + self.retry_after_s
        if is_news:
            words = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
            logger.warning(
                "%s failed: %.300s. It is left alone and tried again every %g s; requests go on without it.",
                self.name,
                words.rstrip("."),
                self.retry_after_s,
            )

    def succeeded(self) -> None:
        if self._open_until is None:
            return
        with self._lock:
            self._open_until = None
        logger.warning("%s works again.", self.name)
