"""How fast requests begin that come together: a few in each round of the event loop.

To let one in takes as long as dozens of tokens. A crowd that begins at once would hold up the tokens of others and its
own first ones, and the device would wait for the last of it. This module knows nothing of what requests ask for.
"""

import asyncio
from collections import deque

BEGINNINGS_AT_ONCE = 8
"""It is what two milliseconds suffice for."""


class Pace:
    """Lets `most` begin in a round of the event loop, in the order in which they came."""

    def __init__(self, most: int = BEGINNINGS_AT_ONCE):
        self._most = self._left = most
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def turn(self) -> None:
        """Wait until a request may begin; not at all, unless many have begun in this round."""
        loop = asyncio.get_running_loop()
        if self._left == self._most:
            loop.call_soon(self._next_round, loop)
        if self._left:
            self._left -= 1
            return
        waiting = loop.create_future()
        self._waiting.append(waiting)
        await waiting

    def _next_round(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left = self._most
        while self._left and self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():  # its client has not left
                waiting.set_result(None)
                self._left -= 1
        if self._left < self._most:
            loop.call_soon(self._next_round, loop)
