"""The order of waiting requests: first come first served, or by priority.

Both queues cost O(1) or O(log n) for every operation, removal from the middle included. They know nothing of
why a request waits.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol

from jaxpaged.core.request import Request


class RequestQueue(Protocol):
    """Requests that wait. `peek` and `pop` need one to be there."""

    def add(self, request: Request) -> None:
        """Put a new request where it belongs."""

    def add_preempted(self, request: Request) -> None:
        """Put a request back that was running before."""

    def peek(self) -> Request:
        """The request that is next."""

    def pop(self) -> Request:
        """Take the request that is next."""

    def remove(self, request: Request) -> None:
        """Take a request out from anywhere; it will not come back."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]:
        """All of them, in no promised order."""


class FCFSQueue:
    """First come, first served; preempted requests go to the front."""

    def __init__(self):
        self._requests: OrderedDict[Request, None] = OrderedDict()

    def add(self, request: Request) -> None:
        self._requests[request] = None

    def add_preempted(self, request: Request) -> None:
        self._requests[request] = None
        self._requests.move_to_end(request, last=False)

    def peek(self) -> Request:
        return next(iter(self._requests))

    def pop(self) -> Request:
        return self._requests.popitem(last=False)[0]

    def remove(self, request: Request) -> None:
        del self._requests[request]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)


def priority_order(request: Request) -> tuple[int, float, int]:
    """Sort key of the priority policy: a smaller one goes first."""
    return request.priority, request.arrival_time, request.arrival_order


class PriorityQueue:
    """Smallest (priority, arrival time) first. Removed requests stay in the heap until they surface."""

    def __init__(self):
        self._heap: list[tuple[tuple[int, float, int], Request]] = []
        self._removed: set[Request] = set()

    def add(self, request: Request) -> None:
        heapq.heappush(self._heap, (priority_order(request), request))

    add_preempted = add

    def peek(self) -> Request:
        self._drop_removed_heads()
        return self._heap[0][1]

    def pop(self) -> Request:
        self._drop_removed_heads()
        return heapq.heappop(self._heap)[1]

    def remove(self, request: Request) -> None:
        self._removed.add(request)
        if 2 * len(self._removed) > len(self._heap):  # so that removed requests never outnumber the others
            self._heap = [entry for entry in self._heap if entry[1] not in self._removed]
            heapq.heapify(self._heap)
            self._removed.clear()

    def _drop_removed_heads(self) -> None:
        while self._removed and self._heap[0][1] in self._removed:
            self._removed.discard(heapq.heappop(self._heap)[1])

    def __len__(self) -> int:
        return len(self._heap) - len(self._removed)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in self._heap if request not in self._removed)


QUEUES: dict[str, Callable[[], RequestQueue]] = {"fcfs": FCFSQueue, "priority": PriorityQueue}
"""Queue class by the name of the scheduling policy."""
