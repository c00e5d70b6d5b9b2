"""Says what a server waits for between its start and the moment at which it is ready.

In a terminal that is one line, which is rewritten; elsewhere it is a line in the log every few seconds.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from jaxpaged.entrypoints.terminal import ProgressLine

logger = logging.getLogger(__name__)

LOG_SECONDS = 5.0
"""Between two lines in the log."""
LOOK_SECONDS = 0.25
"""Between two looks at what the engine waits for."""


class StartReport:
    """From the start to `close`. `update` fits `messages.Progress` and may be called by several threads."""

    def __init__(self) -> None:
        self._line = ProgressLine()
        self._began = self._logged = time.monotonic()
        self._is_loading = True

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._began

    def update(self, what: str, done: int, total: int) -> None:
        """Loading has come so far. What is told once somebody waits for readiness is not shown: that tells of all."""
        if self._is_loading:
            self.waits(f"loading: {what} {done / max(total, 1):.0%}")

    def waits(self, words: str) -> None:
        if self._line.open:
            self._line.show(words)
        elif time.monotonic() - self._logged >= LOG_SECONDS:
            self._logged = time.monotonic()
            logger.info("after %.0f s: %s", self.seconds, words)

    async def until_ready(self, obstacle: Callable[[], str | None]) -> float:
        """Wait until there is no `obstacle` to serving any more. Returns the seconds since the start."""
        self._is_loading = False
        while (reason := obstacle()) is not None:
            self.waits(f"not ready yet: {reason}")
            await asyncio.sleep(LOOK_SECONDS)
        self.close()
        return self.seconds

    def close(self) -> None:
        """Take the line away, for good."""
        self._line.close()
