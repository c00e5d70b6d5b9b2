"""Stores in other processes: a thread asks them in the background, and what comes from them is checked.

Other programs write to such a store too, so only the store knows what it has. The first look-up of a key is PENDING
while a thread asks, at most for `patience_s`. The answer yes holds until a `get` finds nothing, at most for
`found_for_s`; the answer no holds for `ask_again_s`. Every call runs in a thread of the store's own and has a time
limit. A store that does not answer is left alone for a while (`breaker.py`), and every look-up is a miss. A store's
capacity and its eviction are its own affair. `AsyncRemoteStore` knows no protocol, nor what is kept; `RemoteTier` is
one that keeps pages.
"""

import abc
import contextlib
import dataclasses
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from jaxpaged.errors import PageError
from jaxpaged.kv_store.breaker import CircuitBreaker
from jaxpaged.kv_store.buffers import Buffer, joined, read_only
from jaxpaged.kv_store.page import PageKey, decode
from jaxpaged.kv_store.threads import NoAnswerError, Threads
from jaxpaged.kv_store.tier import Counters, Lookup, TierUsage
from jaxpaged.kv_store.tier_events import STORAGE, TierEventLog

logger = logging.getLogger(__name__)

MAX_ASKED = 4096
"""Keys that wait to be asked for; further ones are misses."""
BATCH = 256
NUM_CALLS = 16
"""Calls of one store at a time."""
CALL_SECONDS = 3.0
"""Beyond its patience, that a store may take for a page, and longer the larger it is:"""
LEAST_RATE = 4 << 20
"""bytes a second."""
DISCONNECT_SECONDS = 2.0


class NotKept(Exception):
    """A store has no room for this now. Nothing is wrong with it, so it goes on being used."""


@dataclasses.dataclass
class Answer:
    """Whether the store had a key when it was last asked, and until when (monotonic) that holds."""

    is_there: bool
    until: float
    is_asked: bool = False
    """It is being asked now, until then: what it had before does not hold any more."""


class AsyncRemoteStore[K: Hashable, V: Buffer](abc.ABC):
    """A store that is reached by a connection. Subclasses say how, what that may end in, and what is believed."""

    name: str
    failures: tuple[type[Exception], ...] = (OSError,)
    """What calls of the store raise when it cannot be reached, or refuses."""
    refusals: tuple[type[Exception], ...] = ()
    """Those among them that a store says itself, which is alive then: it is full, or may not be written to."""
    max_known = 1 << 20
    """Answers that are remembered, the latest."""
    found_for_s = math.inf
    """How long the answer yes holds, after which the store is asked again."""

    def __init__(
        self,
        where: str,
        *,
        retry_after_s: float = 30.0,
        patience_s: float = 2.0,
        ask_again_s: float = 30.0,
    ):
        self._patience_s, self._ask_again_s = patience_s, ask_again_s
        self.counters = Counters()
        self._all_failures: tuple[type[Exception], ...] = (NoAnswerError, *self.failures)
        self._breaker = CircuitBreaker(f"The store of pages at {where}", retry_after_s)
        self._writes = CircuitBreaker(f"Writing pages to {where}", retry_after_s)
        self._reads = CircuitBreaker(f"Reading pages from {where}", retry_after_s)
        self._calls, self._largest = Threads(NUM_CALLS, f"kv-{self.name}-call"), 0  # bytes
        self._changed = threading.Condition()  # for everything below; never held during input and output
        self._known: OrderedDict[K, Answer] = OrderedDict()
        self._to_ask: OrderedDict[K, None] = OrderedDict()
        self._to_remove: OrderedDict[K, None] = OrderedDict()
        self._being_written: set[K] = set()
        self._closing = self._found_damaged = False
        self._thread = threading.Thread(target=self._keep_asking, name=f"kv-{self.name}", daemon=True)
        self._thread.start()

    # ---- what a store is asked; each may raise one of `failures` -------------------------------------------

    @abc.abstractmethod
    def exist(self, keys: Sequence[K]) -> list[bool]: ...

    @abc.abstractmethod
    def fetch(self, key: K) -> V | None:
        """What the store has. May raise PageError for what it should not have."""

    @abc.abstractmethod
    def store(self, key: K, buffers: Sequence[Buffer]) -> None:
        """Keep it. May raise NotKept."""

    @abc.abstractmethod
    def remove(self, keys: Sequence[K]) -> None: ...

    @abc.abstractmethod
    def disconnect(self) -> None:
        """Release connections. They are not used any more."""

    # ---- what comes and goes ------------------------------------------------------------------------------

    @abc.abstractmethod
    def checked(self, key: K, content: V) -> V:
        """What is handed out of what was fetched. Raises PageError for what is damaged, or another's."""

    @abc.abstractmethod
    def noted(self, key: K, is_there: bool) -> None:
        """Something is known to be there now, or not any more. Called with the lock held: it must not call back."""

    # ---- asking ------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[K]) -> list[Lookup]:
        now = time.monotonic()
        with self._changed:
            return [self._state(key, now) for key in keys]

    def _state(self, key: K, now: float) -> Lookup:
        if key in self._being_written:
            return Lookup.PENDING
        if self._breaker.blocks or self._reads.blocks:
            return Lookup.MISS
        answer = self._known.get(key)
        if answer is not None and now < answer.until:
            return Lookup.PENDING if answer.is_asked else Lookup.HIT if answer.is_there else Lookup.MISS
        if answer is not None and answer.is_asked:
            self._learn(key, False)  # it takes too long: whoever asked must get on
        elif len(self._to_ask) < MAX_ASKED and not self._closing and self._breaker.allows():
            was_there = answer is not None and answer.is_there
            self._known[key] = Answer(was_there, now + self._patience_s, is_asked=True)
            self._to_ask[key] = None
            self._changed.notify_all()
            return Lookup.PENDING
        return Lookup.MISS

    def _learn(self, key: K, is_there: bool) -> None:
        self._note(key, self._known.get(key), is_there)
        self._known[key] = Answer(is_there, time.monotonic() + (self.found_for_s if is_there else self._ask_again_s))
        self._known.move_to_end(key)
        if len(self._known) > self.max_known:
            oldest, answer = self._known.popitem(last=False)
            self._note(oldest, answer, False)

    def _note(self, key: K, before: Answer | None, is_there: bool) -> None:
        if (before is not None and before.is_there) is not is_there:
            self.noted(key, is_there)

    def forget(self, keys: Iterable[K]) -> None:
        """Nobody will ask for these again."""
        with self._changed:
            for key in keys:
                self._to_ask.pop(key, None)
                self._note(key, self._known.pop(key, None), False)

    def get(self, key: K) -> V | None:
        page, has_answered = None, False
        if not self._closing and self._breaker.allows() and self._reads.allows():
            try:
                page = self._calls.call(self._seconds_for(self._largest), self._fetch_checked, key)
                has_answered = True
                self._breaker.succeeded()
                self._reads.succeeded()
            except self._all_failures as error:
                self._failed(error, self._reads)
        with self._changed:
            answer = self._known.get(key)
            if has_answered and (page is None or answer is None or not answer.is_there):
                self._learn(key, page is not None)  # that it was read does not make an answer hold for longer
            self.counters.hits += page is not None
            self.counters.misses += page is None
            self.counters.loaded_bytes += memoryview(page).nbytes if page is not None else 0
        return page

    def _fetch_checked(self, key: K) -> V | None:
        """None where there is nothing, or something damaged, which is removed."""
        try:
            content = self.fetch(key)
            return None if content is None else self.checked(key, content)
        except PageError as error:
            with self._changed:
                self.counters.corrupt += 1
                is_news, self._found_damaged = not self._found_damaged, True
            if is_news:
                logger.warning("What is in the tier %s is removed: %s Further ones are counted only.", self.name, error)
            self.remove([key])
            return None

    def put(self, key: K, buffers: Sequence[Buffer]) -> bool:
        with self._changed:
            if self._holds(key) or key in self._being_written:
                return True
            begins = not self._closing and self._breaker.allows() and self._writes.allows()
            if begins:
                self._being_written.add(key)
                self._to_remove.pop(key, None)
        written = False
        try:
            if begins:
                size = sum(memoryview(buffer).nbytes for buffer in buffers)
                self._largest = max(self._largest, size)
                self._calls.call(self._seconds_for(size), self.store, key, buffers)
                written = True
                self._breaker.succeeded()
                self._writes.succeeded()
        except NotKept:
            self._breaker.succeeded()
        except self._all_failures as error:
            self._failed(error, self._writes)
        finally:
            with self._changed:
                if begins:
                    self._being_written.discard(key)
                if written:
                    self._learn(key, True)
                    self.counters.stored += 1
                    self.counters.stored_bytes += sum(memoryview(buffer).nbytes for buffer in buffers)
                else:
                    self.counters.dropped += 1
        return written

    def _holds(self, key: K) -> bool:
        """Whether the store is known to have it."""
        answer = self._known.get(key)
        return answer is not None and answer.is_there and not answer.is_asked and time.monotonic() < answer.until

    def _seconds_for(self, num_bytes: int) -> float:
        """That a call may take which moves so many."""
        return self._patience_s + CALL_SECONDS + num_bytes / LEAST_RATE

    def _failed(self, error: Exception, slow: CircuitBreaker | None = None) -> None:
        """`slow`: what to leave alone where a call of one kind did not end in time. Others may."""
        breaker = self._writes if isinstance(error, self.refusals) else self._breaker
        (slow if slow is not None and isinstance(error, NoAnswerError) else breaker).failed(error)
        with self._changed:
            self.counters.errors += 1

    def delete(self, keys: Iterable[K]) -> None:
        with self._changed:
            for key in keys:
                self._to_ask.pop(key, None)
                self._learn(key, False)
                if len(self._to_remove) < MAX_ASKED:
                    self._to_remove[key] = None
            self._changed.notify_all()

    def usage(self) -> list[TierUsage]:
        """What is known to be there; bytes are the store's to count."""
        with self._changed:
            num_pages = sum(bool(answer.is_there) for answer in self._known.values())
            return [TierUsage(self.name, 0, 0, num_pages, dataclasses.replace(self.counters))]

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(self._patience_s + 1.0)
        with contextlib.suppress(NoAnswerError):
            self._calls.call(DISCONNECT_SECONDS, self.disconnect)
        self._calls.close(0.0, cancels=True)

    # ---- the thread that asks --------------------------------------------------------------------------------

    def _keep_asking(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._to_ask or self._to_remove)
                if self._closing and not self._to_remove:
                    return
                removed = [self._to_remove.popitem(last=False)[0] for _ in range(min(BATCH, len(self._to_remove)))]
                asked = [self._to_ask.popitem(last=False)[0] for _ in range(min(BATCH, len(self._to_ask)))]
            try:
                if removed and not self._breaker.is_open:
                    self._calls.call(self._patience_s, self.remove, removed)
                found = self._calls.call(self._patience_s, self.exist, asked) if asked else []
                self._breaker.succeeded()
            except self._all_failures as error:
                self._failed(error)
                found = [False] * len(asked)
            with self._changed:
                for key, is_there in zip(asked, found):
                    if key not in self._to_remove and not self._holds(key):  # it may have been written meanwhile
                        self._learn(key, is_there)


class RemoteTier(AsyncRemoteStore[PageKey, Buffer], abc.ABC):
    """A tier whose store is reached by a connection. Subclasses say how, and what errors that may end in."""

    def __init__(self, where: str, namespace: str, *, secret: bytes | None = None, **waits: Any):
        """`waits`: how long what is waited for (`AsyncRemoteStore`)."""
        self.namespace, self._secret = namespace, secret
        self._log: TierEventLog | None = None
        super().__init__(where, **waits)

    def checked(self, key: PageKey, content: Buffer) -> Buffer:
        """The page in aligned memory."""
        page = read_only(joined([content]))
        decode(page, expect_namespace=self.namespace, key=key, secret=self._secret)
        return page

    def noted(self, key: PageKey, is_there: bool) -> None:
        if self._log is not None:
            self._log.note(STORAGE, key, is_there)

    def touch(self, keys: Iterable[PageKey]) -> None:
        """What the store evicts follows from what is read."""
        return

    def watch(self, log: TierEventLog) -> None:
        """What the store evicts is not heard of before it is missed."""
        with self._changed:
            self._log = log
