"""Which requests are under way, whether another one may come in, and how the server comes to rest.

This module knows counts and ids; it knows neither HTTP bodies nor what a request asks for.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxpaged.entrypoints.http.errors import RETRY_AFTER, HttpError


@dataclass(frozen=True)
class Load:
    """What one HTTP request puts on the engine: an engine request per prompt, each of some sequences.

    Clients choose `request_id`, so several requests may have the same; `engine_ids` are ours alone.
    """

    request_id: str
    engine_ids: Sequence[str]
    num_sequences: int
    num_prompt_tokens: int


class Traffic:
    """Counts what is under way.

    What exceeds the `max_running` sequences that the engine computes at a time waits, newest last, and at most
    `max_queued` sequences and `max_queued_tokens` prompt tokens may. None: any number.
    """

    def __init__(self, max_running: int, max_queued: int | None = None, max_queued_tokens: int | None = None):
        self._max_running = max_running
        self._max_queued = max_queued
        self._max_queued_tokens = max_queued_tokens
        self._loads: dict[int, Load] = {}  # by number of the HTTP request, oldest first
        self._numbers = itertools.count()
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    def __len__(self) -> int:
        """HTTP requests under way."""
        return len(self._loads)

    @contextlib.contextmanager
    def admitted(self, load: Load) -> Iterator[None]:
        """Count a request while the context lasts.

        Raises HttpError: 503 while the server is draining, 429 when the queue is full.
        """
        self._check_room(load)
        number = next(self._numbers)
        self._loads[number] = load
        self._idle.clear()
        try:
            yield
        finally:
            del self._loads[number]
            if not self._loads:
                self._idle.set()

    def engine_ids(self, request_ids: Sequence[str] | None = None) -> list[str]:
        """What to abort in the engine to end these HTTP requests, or all of them. Unknown ids pass."""
        loads = [load for load in self._loads.values() if request_ids is None or load.request_id in request_ids]
        return [engine_id for load in loads for engine_id in load.engine_ids]

    async def wait_until_idle(self, timeout: float) -> bool:
        """Wait for the requests under way; False when some are left after `timeout` seconds."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            return False
        return True

    def _check_room(self, load: Load) -> None:
        if self.draining:
            raise HttpError(503, "The server is shutting down. Send the request to another one.", headers=RETRY_AFTER)
        sequences, tokens = self._queued_with(load)
        if self._max_queued is not None and sequences > self._max_queued:
            raise self._full(f"{sequences} sequences would wait, but at most {self._max_queued} may")
        if self._max_queued_tokens is not None and tokens > self._max_queued_tokens:
            raise self._full(f"{tokens} prompt tokens would wait, but at most {self._max_queued_tokens} may")

    def _queued_with(self, load: Load) -> tuple[int, int]:
        """Sequences and prompt tokens that wait once `load` is in: what the oldest leave no place for."""
        places, sequences, tokens = self._max_running, 0, 0
        for each in itertools.chain(self._loads.values(), [load]):
            waiting = max(each.num_sequences - places, 0)
            places = max(places - each.num_sequences, 0)
            sequences += waiting
            tokens += each.num_prompt_tokens if waiting else 0
        return sequences, tokens

    def _full(self, reason: str) -> HttpError:
        return HttpError(429, f"The queue is full: {reason}. Try again later.", headers=RETRY_AFTER)
