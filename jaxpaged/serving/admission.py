"""Which requests may come in and how fast, which are under way, and how the server comes to rest.

To let one in takes as long as dozens of tokens. A crowd that begins at once would hold up the tokens of others and its
own first ones, and the device would wait for the last of it: so a few begin in each round of the event loop. This
module knows counts and ids; it knows neither bodies nor what a request asks for.
"""

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from jaxpaged.serving.errors import RETRY_SECONDS, ErrorKind, ServingError


@dataclass(frozen=True)
class Load:
    """What one HTTP request puts on the engine: an engine request per prompt, each of some sequences.

    Clients choose `request_id`, so several requests may have the same; `engine_ids` are ours alone.
    """

    request_id: str
    engine_ids: Sequence[str]
    num_sequences: int
    num_prompt_tokens: int
    answer_bytes: int = 0  # that must be held until they can be sent, at most and about


class Traffic:
    """Counts what is under way.

    What exceeds the `max_running` sequences that the engine computes at a time waits, newest last, and at most
    `max_queued` sequences and `max_queued_tokens` prompt tokens may. None: any number. One request has at most
    `max_sequences`, and a response of about `max_answer_bytes` at most.
    """

    def __init__(
        self,
        max_running: int,
        max_queued: int | None = None,
        max_queued_tokens: int | None = None,
        *,
        max_sequences: int = 2048,
        max_answer_bytes: int = 2**28,
    ):
        self._max_running = max_running
        self._max_sequences = max_sequences
        self._max_answer_bytes = max_answer_bytes
        self._max_queued = max_queued
        self._max_queued_tokens = max_queued_tokens
        self._loads: dict[int, Load] = {}  # by number of the HTTP request, oldest first
        self._num_sequences = 0  # of all of them
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

        Raises ServingError: INVALID for more than one request may ask, also where the queue could never take it,
        UNAVAILABLE while the server is draining, TOO_MANY when the queue is full.
        """
        if load.answer_bytes > self._max_answer_bytes:
            raise ServingError(
                f"max_tokens, n and log probabilities make an answer of up to {load.answer_bytes} bytes; one "
                f"request may ask for {self._max_answer_bytes}. Ask for less, or for a stream.",
                "max_tokens",
            )
        self._check_room(load)
        number = next(self._numbers)
        self._loads[number] = load
        self._num_sequences += load.num_sequences
        self._idle.clear()
        try:
            yield
        finally:
            del self._loads[number]
            self._num_sequences -= load.num_sequences
            if not self._loads:
                self._idle.set()

    def check_num_sequences(self, num_prompts: int, n: int) -> None:
        """Raise ServingError for more sequences than one request may ask for, before its prompts are looked at."""
        if num_prompts * n > self._max_sequences:
            raise ServingError(
                f"{num_prompts} prompts with n = {n} make {num_prompts * n} sequences; one request may have "
                f"{self._max_sequences}. Send several.",
                "n",
            )

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
            raise ServingError(
                "The server is shutting down. Send the request to another one.",
                kind=ErrorKind.UNAVAILABLE,
                retry_after=RETRY_SECONDS,
            )
        if self._max_queued is None and self._max_queued_tokens is None:
            return
        excess = self._excess(itertools.chain(self._loads.values(), [load]), self._num_sequences + load.num_sequences)
        if excess is None:
            return
        if self._excess([load], load.num_sequences) is not None:
            raise ServingError(
                f"The request has {load.num_sequences} sequences and {load.num_prompt_tokens} prompt tokens, but "
                f"{self._max_running} sequences are computed at a time, and {excess}. Send several.",
                "n",
            )
        raise ServingError(
            f"The queue is full: {excess}. Try again later.", kind=ErrorKind.TOO_MANY, retry_after=RETRY_SECONDS
        )

    def _excess(self, loads: Iterable[Load], num_sequences: int) -> str | None:
        """What of these loads, the oldest first, would have to wait without a place for it."""
        if num_sequences <= self._max_running:
            return None
        sequences, tokens = self._queued(loads)
        if self._max_queued is not None and sequences > self._max_queued:
            return f"{sequences} sequences would wait, but at most {self._max_queued} may"
        if self._max_queued_tokens is not None and tokens > self._max_queued_tokens:
            return f"{tokens} prompt tokens would wait, but at most {self._max_queued_tokens} may"
        return None

    def _queued(self, loads: Iterable[Load]) -> tuple[int, int]:
        """Sequences and prompt tokens that wait: what the oldest leave no place for."""
        places, sequences, tokens = self._max_running, 0, 0
        for each in loads:
            waiting = max(each.num_sequences - places, 0)
            places = max(places - each.num_sequences, 0)
            sequences += waiting
            tokens += each.num_prompt_tokens if waiting else 0
        return sequences, tokens


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
