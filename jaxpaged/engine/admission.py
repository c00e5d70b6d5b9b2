"""How much of what belongs together the core has at a time: enough that it never waits, and no more for others to wait
behind, however many prompts and sequences one client asks for.

What waits here is sent, oldest first, when sequences of the same group have ended. This module knows neither sockets
nor what a request asks for.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxpaged.messages import EngineCoreRequest


@dataclass
class Group:
    """Sequences of one prompt, or of several that came together. `num_prompts` of them are under way."""

    num_prompts: int = 0
    in_core: list[str] = field(default_factory=list)  # and some that have ended since
    waiting: deque[EngineCoreRequest] = field(default_factory=deque)


class AdmissionWindow:
    """Of each group at most `most` sequences are in the core. `is_unfinished`: whether a sequence, by its id, is
    still expected; `send` takes those that go to the core."""

    def __init__(
        self, most: int, is_unfinished: Callable[[str], bool], send: Callable[[Sequence[EngineCoreRequest]], None]
    ):
        self._most, self._is_unfinished, self._send = most, is_unfinished, send
        self._groups: dict[str, Group] = {}
        self._waiting: set[str] = set()  # names of groups of which something waits

    def enter(self, name: str, sequences: Sequence[EngineCoreRequest]) -> None:
        """A prompt of a group begins; `refill` sends its sequences. `leave` must follow."""
        group = self._groups.setdefault(name, Group())
        group.num_prompts += 1
        group.waiting.extend(sequences)
        self._waiting.add(name)

    def leave(self, name: str) -> None:
        """A prompt of a group has ended."""
        group = self._groups[name]
        group.num_prompts -= 1
        if not group.num_prompts:
            del self._groups[name]
            self._waiting.discard(name)

    def refill(self, name: str, at_once: int) -> bool:
        """Send up to `at_once` sequences of a group; whether more of them could go."""
        group = self._groups[name]
        if len(group.in_core) >= self._most:
            group.in_core = list(filter(self._is_unfinished, group.in_core))
        room = min(self._most - len(group.in_core), at_once)
        more: list[EngineCoreRequest] = []
        while group.waiting and len(more) < room:
            request = group.waiting.popleft()
            if self._is_unfinished(request.request_id):  # it was not aborted
                more.append(request)
        group.in_core += [request.request_id for request in more]
        if not group.waiting:
            self._waiting.discard(name)
        if more:
            self._send(more)
        return bool(group.waiting) and len(group.in_core) < self._most

    def refill_all(self) -> None:
        """Sequences have ended: others go in their place."""
        for name in list(self._waiting):
            self.refill(name, self._most)
