"""The order of waiting requests: first come first served, or by priority; and rows that are kept for short requests.

Neither queue looks at more requests than it must, removal from the middle included. They know nothing of why a
request waits.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any, Protocol

from jaxpaged.config import SchedulerConfig, settled
from jaxpaged.core.by_age import ByAge
from jaxpaged.core.request import Request, RequestStatus


class Openings:
    """The requests that may begin in a step, the next one first, and the number of rows that are free for them.

    The last `num_kept` rows are only for short requests.
    """

    __slots__ = ("_is_short", "_num_kept", "num_rows", "requests")

    def __init__(
        self,
        requests: Iterator[Request],
        num_rows: int,
        num_kept: int = 0,
        is_short: Callable[[Request], bool] = lambda request: False,
    ):
        self.requests = requests
        self.num_rows = num_rows
        self._num_kept = num_kept
        self._is_short = is_short

    def has_row_for(self, request: Request) -> bool:
        return self.num_rows > self._num_kept or (self.num_rows > 0 and self._is_short(request))

    def take_row(self, request: Request) -> None:
        self.num_rows -= 1
        if self._num_kept and self._is_short(request):
            self._num_kept -= 1


class RequestQueue(Protocol):
    """Requests that wait."""

    def add(self, request: Request) -> None:
        """Put a new request where it belongs."""

    def add_preempted(self, request: Request) -> None:
        """Put a preempted request back."""

    def remove(self, request: Request) -> None:
        """Take a request out from anywhere."""

    def openings(self, num_rows: int) -> Openings:
        """The requests that may have the free rows."""

    def is_short(self, request: Request) -> bool:
        """Whether the request goes before longer ones; False where the queue makes no difference."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]:
        """All requests, the next one first."""


class InOrder:
    """A queue without exceptions."""

    def openings(self, num_rows: int) -> Openings:
        return Openings(iter(self), num_rows)

    def is_short(self, request: Request) -> bool:
        return False

    def __iter__(self) -> Iterator[Request]:
        raise NotImplementedError


class FCFSQueue(OrderedDict[Request, None], InOrder):
    """First come, first served; preempted requests go to the front. Every step asks how many wait."""

    def add(self, request: Request) -> None:
        self[request] = None

    def add_preempted(self, request: Request) -> None:
        self[request] = None
        self.move_to_end(request, last=False)

    def remove(self, request: Request) -> None:
        del self[request]


def priority_order(request: Request) -> tuple[int, float, int]:
    """Sort key of the priority policy: a smaller one goes first."""
    return request.priority, request.arrival_time, request.arrival_order


AGES: dict[str, Callable[[Request], Any]] = {
    "fcfs": lambda request: request.arrival_order,
    "priority": priority_order,
}
"""Sort key of requests by the name of the scheduling policy: the oldest, or the most important, is the first."""


class SortedQueue(ByAge[Request], InOrder):
    """The smallest key first, wherever a request comes from."""

    def add_preempted(self, request: Request) -> None:
        self.add(request)


class PriorityQueue(SortedQueue):
    """Smallest (priority, arrival time) first."""

    def __init__(self) -> None:
        super().__init__(priority_order)


QUEUES: dict[str, Callable[[], RequestQueue]] = {"fcfs": FCFSQueue, "priority": PriorityQueue}
"""Queue class by the name of the scheduling policy."""
SHORT_ANSWER = 16
"""The most tokens that a short request generates."""


class ShortFirst:
    """A queue that keeps rows for short requests while more wait than there are rows for.

    Under overload a short request waits for others like it, and not for all that came before. A request is short when
    it generates few tokens and its prompt fits the half of a step that short prompts get first (`prefill.py`), so its
    row is soon free again. No row is kept while all waiting requests can run.
    """

    def __init__(self, queue: RequestQueue, num_rows: int, max_prompt_tokens: int):
        self._queue = queue
        self._num_rows = num_rows
        self._max_prompt_tokens = max_prompt_tokens
        self._short: dict[Request, None] = {}  # that wait
        self._left: list[Request] = []  # short ones that left the queue, to run or for good: mostly those that run

    def is_short(self, request: Request) -> bool:
        return (
            request.max_total_tokens <= request.num_prompt_tokens + SHORT_ANSWER
            and request.num_prompt_tokens <= self._max_prompt_tokens
        )

    def openings(self, num_rows: int) -> Openings:
        num_kept = 0
        if len(self._queue) > num_rows:
            self._forget_ended()
            num_kept = min(self._num_rows - len(self._left), num_rows)
        if num_kept <= 0:
            return Openings(iter(self._queue), num_rows)
        most_important = next(iter(self._queue)).priority
        important = (each for each in self._short if each.priority <= most_important)
        first = dict.fromkeys(islice(important, num_kept))
        others = (each for each in self._queue if each not in first)
        return Openings(chain(first, others), num_rows, num_kept, self.is_short)

    def add(self, request: Request) -> None:
        self._queue.add(request)
        if self.is_short(request):
            self._short[request] = None

    def add_preempted(self, request: Request) -> None:
        self._queue.add_preempted(request)
        if self.is_short(request):
            self._short[request] = None

    def remove(self, request: Request) -> None:
        self._queue.remove(request)
        if request in self._short:
            del self._short[request]
            self._forget_ended()
            self._left.append(request)

    def _forget_ended(self) -> None:
        self._left = [each for each in self._left if each.status is RequestStatus.RUNNING]

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)


def waiting_queue(config: SchedulerConfig, *, by_age: bool = False) -> RequestQueue:
    """The queue that the options ask for. `config` is resolved. `by_age`: requests come to it in any order, and are
    served as if they had come in theirs."""
    queue: RequestQueue = SortedQueue(AGES[config.scheduling_policy]) if by_age else QUEUES[config.scheduling_policy]()
    num_rows = config.num_short_request_rows or 0
    return ShortFirst(queue, num_rows, settled(config.max_num_batched_tokens) // 2) if num_rows else queue
