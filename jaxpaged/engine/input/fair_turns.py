"""Turns at something scarce, shared fairly among those who ask: nobody waits behind all that another one asked for.

This module knows neither requests nor what a turn is used for.
"""

import asyncio
from collections import Counter, deque


class FairTurns:
    """At most `num_places` turns at a time, and `most_each` of them for one client, in one event loop.

    A free place goes to the client that has the fewest turns now, and of these to the one that has used least, by the
    costs that were told; who comes new begins where the one stood that was served last. A client that neither waits nor
    has a turn is forgotten.
    """

    def __init__(self, num_places: int, most_each: int):
        self.num_places = num_places
        self.most_each = most_each
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._used: dict[str, float] = {}
        self._level = 0.0  # what the client had used that got the last turn

    def __len__(self) -> int:
        """Clients that wait or have a turn."""
        return len(self._used)

    async def take(self, client: str) -> None:
        """Wait for a turn. Who is cancelled meanwhile has none; everybody else must `give_back` it."""
        self._used.setdefault(client, self._level)
        granted = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(granted)
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled():  # the turn came together with the cancellation
                self.give_back(client, 0.0)
            else:
                self._waiting[client].remove(granted)
                self._forget_if_idle(client)
            raise

    def give_back(self, client: str, cost: float) -> None:
        """End a turn, which cost so much."""
        self._used[client] += cost
        self._running[client] -= 1
        self._forget_if_idle(client)
        self._grant()

    def _forget_if_idle(self, client: str) -> None:
        if not self._waiting[client] and not self._running[client]:
            del self._waiting[client], self._running[client], self._used[client]

    def _grant(self) -> None:
        while self._running.total() < self.num_places:
            able = [each for each, queue in self._waiting.items() if queue and self._running[each] < self.most_each]
            if not able:
                return
            client = min(able, key=lambda each: (self._running[each], self._used[each]))
            self._level = self._used[client]
            self._running[client] += 1
            self._waiting[client].popleft().set_result(None)
