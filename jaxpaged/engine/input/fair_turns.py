"""Turns at something scarce, shared fairly among callers: no caller waits behind all turns that another asked for.

This module knows neither requests nor what a turn is used for.
"""

import asyncio
import itertools
from collections import Counter
from dataclasses import dataclass, field

Name = tuple[str, ...]


@dataclass(eq=False)
class Waiting:
    """Somebody who waits. `client` and `user` are the names under which turns are counted."""

    client: Name
    user: Name
    size: int
    place: int
    granted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class FairTurns:
    """At most `num_places` turns at a time, and `most_each` of them for one client, in one event loop.

    A free place goes to the client that has the fewest turns now, and of these to the one that has used least, by the
    costs that were told; the same among the users of a client, who are only as many as it says. Of what is left the
    smallest goes first. Who comes new has used as much as the one who has used least. Who neither waits nor has a turn
    is forgotten.
    """

    def __init__(self, num_places: int, most_each: int):
        self.num_places = num_places
        self.most_each = most_each
        self._running: Counter[Name] = Counter()  # turns of clients, and of their users
        self._waiting: list[Waiting] = []
        self._used: dict[Name, float] = {}
        self._places = itertools.count()

    def __len__(self) -> int:
        """Clients that wait or have a turn."""
        return sum(len(name) == 1 for name in self._used)

    async def take(self, client: str, user: str = "", size: int = 0) -> None:
        """Wait for a turn, and `give_back` it afterwards. A caller that is cancelled meanwhile has none."""
        waiting = Waiting((client,), (client, user), size, next(self._places))
        self._enter(waiting)
        self._waiting.append(waiting)
        self._grant()
        try:
            await waiting.granted
        except asyncio.CancelledError:
            if not waiting.granted.cancelled():  # the turn came together with the cancellation
                self.give_back(client, user)
            else:
                self._waiting.remove(waiting)
                self._forget_if_idle(waiting.user)
            raise

    def give_back(self, client: str, user: str = "", cost: float = 0.0) -> None:
        """End a turn, which cost so much."""
        for name in ((client,), (client, user)):
            self._used[name] += cost
            self._running[name] -= 1
        self._forget_if_idle((client, user))
        self._grant()

    def _enter(self, waiting: Waiting) -> None:
        alike = [used for name, used in self._used.items() if len(name) == 1]
        self._used.setdefault(waiting.client, min(alike, default=0.0))
        users = [used for name, used in self._used.items() if len(name) == 2 and name[:1] == waiting.client]
        self._used.setdefault(waiting.user, min(users, default=0.0))

    def _forget_if_idle(self, user: Name) -> None:
        for name in (user, user[:1]):
            if not self._running[name] and not any(name in (each.client, each.user) for each in self._waiting):
                self._running.pop(name)
                self._used.pop(name)

    def _grant(self) -> None:
        while self._num_running() < self.num_places:
            waiting = [each for each in self._waiting if not each.granted.done()]
            able = [each for each in waiting if self._running[each.client] < self.most_each]
            if not able:
                return
            chosen = min(able, key=self._claim)
            self._waiting.remove(chosen)
            self._running[chosen.client] += 1
            self._running[chosen.user] += 1
            chosen.granted.set_result(None)

    def _num_running(self) -> int:
        return sum(count for name, count in self._running.items() if len(name) == 1)

    def _claim(self, each: Waiting) -> tuple[float, ...]:
        """The caller with the fewest turns goes first."""
        names = (each.client, each.user)
        return (*(value for name in names for value in (self._running[name], self._used[name])), each.size, each.place)
