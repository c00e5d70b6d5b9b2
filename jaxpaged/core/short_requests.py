"""Rows that are kept for short requests while more wait than there are rows for: under overload a short one waits for
others like it, and not for the answers of everybody who came before.

A request is short when its answer is, and its prompt fits the half of a step that short prompts get first
(`prompt_grants.py`), so a row that is kept is soon free again. Nothing is kept while all that wait can run.
"""

from collections.abc import Iterator
from itertools import chain, islice

from jaxpaged.config import SchedulerConfig, settled
from jaxpaged.core.request import Request, RequestStatus
from jaxpaged.core.request_queue import QUEUES, Openings, RequestQueue

SHORT_ANSWER = 16
"""Tokens of the longest answer that is short."""


class ShortFirst:
    """A queue in which those short ones go first for which a row is kept."""

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


def waiting_queue(config: SchedulerConfig) -> RequestQueue:
    """The queue that the options ask for. `config` is resolved."""
    queue, num_rows = QUEUES[config.scheduling_policy](), config.num_short_request_rows or 0
    return ShortFirst(queue, num_rows, settled(config.max_num_batched_tokens) // 2) if num_rows else queue
