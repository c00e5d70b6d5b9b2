"""How fast requests begin that come together: a few in each round of the event loop.

To let one in takes as long as dozens of tokens. A crowd that begins at once would hold up the tokens of others and its
own first ones, and the device would wait for the last of it. This module knows nothing of what requests ask for.
"""

import asyncio
from collections import deque

BEGINNINGS_AT_ONCE = 8
"""It is what two milliseconds suffice for."""
BEGINNINGS_A_SECOND = 1000
"""Where other work makes rounds long, so many begin for its time: rounds get half as long again, and nobody waits for
hundreds of them."""


class Pace:
    """Lets `most` begin in a round of the event loop, or more after a long one, in the order in which they came."""

    def __init__(self, most: int = BEGINNINGS_AT_ONCE):
        self._most = self._left = most
        self._is_running = False  # some began in this round
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def turn(self) -> None:
        """Wait until a request may begin; not at all, unless many have begun in this round."""
        loop = asyncio.get_running_loop()
        if not self._is_running:
            self._is_running = True
            loop.call_soon(self._next_round, loop, loop.time())
        if self._left:
            self._left -= 1
            return
        waiting = loop.create_future()
        self._waiting.append(waiting)
        await waiting

    def _next_round(self, loop: asyncio.AbstractEventLoop, last: float) -> None:
        """The round that began at `last` is over."""
        now = loop.time()
        self._left = most = max(self._most, int((now - last) * BEGINNINGS_A_SECOND))
        while self._left and self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():  # its client has not left
                waiting.set_result(None)
                self._left -= 1
        self._is_running = self._left < most
        if self._is_running:
            loop.call_soon(self._next_round, loop, now)
        else:
            self._left = self._most
