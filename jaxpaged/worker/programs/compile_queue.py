"""Which program is prepared next, and whether now: steps come first.

On a CPU the steps of requests are computed by the cores that compile, and compiling at a lower priority of the system
gains them nothing. So compiling stands back by itself: while steps are computed, a program that somebody waits for is
prepared at once, one for whose lack steps have lost half of the time that it takes next, and any other now and then.

This module knows neither threads nor programs. Whoever shares a queue between threads locks it.
"""

import math
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType

from jaxpaged.messages import ProgramKey

PAUSE_SECONDS = 1.0
"""No step for so long is a pause, in which everything is prepared. Between two steps, or two requests of a program that
asks one after the other, there is less."""
FIRST_MISSED_TOKENS = 256
"""The first of all small programs, for which the cores are left alone, is that for whose lack steps were padded by so
many tokens: a few steps show their size."""
MISSED_SHARE = 0.5
"""What steps have lost without a program, of what preparing it costs, when it is prepared without rest. Who waits for
all of the cost never spends more than twice what was needed; mostly what was missed goes on being missed."""
COMPILE_SECONDS, LOAD_SECONDS, TOKEN_SECONDS = 1.0, 0.1, 0.001
"""What a program is taken to cost, and a token of padding, before any was measured."""
REST_SHARE = 49
"""How much longer than it took to compile a program that nobody missed the next one waits, while steps are computed."""
LOAD_REST_SHARE = 1
"""The same of a program that was loaded, which takes a tenth of the time, and no threads but one."""


class Activity:
    """When steps are computed. Steps are one chain: where one has ended, so have those before it. Nobody need tell of
    steps while nothing waits to be compiled.

    `shares_cores` False: not where programs are compiled, so that it is always quiet there.
    """

    def __init__(self, shares_cores: bool, now: Callable[[], float] = time.monotonic):
        self.shares_cores, self.now = shares_cores, now
        self._last_begun = self._last_ended = -1
        self._chain_since = -math.inf  # since when steps follow each other
        self._quiet_since = -math.inf
        self._bucket, self._bucket_seconds, self._bucket_steps = 0, 0.0, 0

    def begin(self, step_id: int) -> None:
        if self._last_ended >= self._last_begun:
            self._chain_since = self.now()
        self._last_begun = step_id

    def end(self, step_id: int, bucket: int = 0) -> None:
        """A step has ended, which was padded to `bucket` tokens, or to as many as nobody learns from."""
        now, begin = self.now(), max(self._chain_since, self._quiet_since)
        self._last_ended, self._quiet_since = step_id, now
        if bucket > self._bucket:
            self._bucket, self._bucket_seconds, self._bucket_steps = bucket, 0.0, 0
        if bucket and bucket == self._bucket:
            self._bucket_seconds += now - begin
            self._bucket_steps += 1

    def listen_again(self) -> None:
        """Nobody told of steps for a while: one may be in flight, so it is not quiet before a pause was heard."""
        self._quiet_since = self.now()

    def end_all(self) -> None:
        """Nothing is in flight any more."""
        self.end(self._last_begun)

    @property
    def token_seconds(self) -> float:
        """What a token of padding takes: what one takes of the largest steps there were. A small step takes as long as
        reading all weights does, whatever its size. They are taken together, since the host may hear of one late."""
        if not self._bucket_seconds:
            return TOKEN_SECONDS
        return self._bucket_seconds / (self._bucket * self._bucket_steps)

    def quiet_seconds(self) -> float:
        """Since the last step ended; 0 while one is in flight, infinity before there was any."""
        if not self.shares_cores:
            return math.inf
        return self.now() - self._quiet_since if self._last_ended >= self._last_begun else 0.0


class CompileQueue:
    """Keys in the order in which they are prepared; `first` of them are waited for from the beginning.

    At most `most_unhurried` that nobody waits for are in preparation at a time. Those in `loaded` need not be compiled.
    `row_shares`: what a row of a kind of program is of the work of a token, if it is not all of it.
    """

    def __init__(
        self,
        keys: Iterable[ProgramKey],
        first: int,
        most_unhurried: int,
        activity: Activity,
        loaded: Collection[ProgramKey] = (),
        row_shares: Mapping[str, float] = MappingProxyType({}),
    ):
        self._row_shares = row_shares
        self._waiting = list(keys)
        self._loaded = frozenset(loaded)
        self._first = set(self._waiting[:first])
        self._hurried = set(self._first)
        self._padded: Counter[ProgramKey] = Counter()  # steps that took a larger one, by the smallest that would do
        self._lost_tokens: dict[ProgramKey, float] = {}  # for want of a program, however
        self._most_unhurried, self._activity = most_unhurried, activity
        self._begun: dict[ProgramKey, float] = {}  # when, of those in preparation
        self._rests_until = -math.inf
        self._compile_seconds: dict[str, float] = {}  # of the last one of a kind
        self._load_seconds = LOAD_SECONDS
        self._prepared: dict[str, list[int]] = {}  # the sizes of each kind, sorted
        self._asked_for: set[ProgramKey] = set()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, key: ProgramKey) -> None:
        """Append a program that would make steps faster, or that `hurry` says somebody waits for. It goes before those
        that nobody has asked for, and rests first, as if another one had just been compiled: otherwise it would begin
        in the middle of somebody's answer."""
        self._waiting.append(key)
        self._asked_for.add(key)
        rest = REST_SHARE * self._compile_seconds.get(key.kind, COMPILE_SECONDS)
        self._rests_until = max(self._rests_until, self._activity.now() + rest)

    def hurry(self, key: ProgramKey) -> None:
        """Somebody waits for a program: if it has not been begun, it is next."""
        if key in self._waiting:
            self._waiting.remove(key)
            self._waiting.insert(0, key)
            self._hurried.add(key)
            self._first.discard(key)

    def pad(self, key: ProgramKey) -> None:
        """A step took a larger program than this one, which is the smallest for it."""
        self._padded[key] += 1

    def miss(self, key: ProgramKey, num_tokens: float) -> None:
        """A step took longer than with this program, by what so many tokens take."""
        self._lost_tokens[key] = self._lost_tokens.get(key, 0) + num_tokens

    def miss_seconds(self, key: ProgramKey, seconds: float) -> None:
        """A step took so much longer than with this program."""
        self.miss(key, seconds / self._activity.token_seconds)

    def clear(self) -> None:
        self._waiting.clear()

    def take(self) -> ProgramKey | None:
        """The program to prepare now, which is in preparation until `done`; None: nothing may begin now."""
        key = self._next()
        if key is not None:
            self._waiting.remove(key)
            self._begun[key] = self._activity.now()
        return key

    def done(self, key: ProgramKey) -> None:
        """A program is prepared, or cannot be."""
        now = self._activity.now()
        insort(self._prepared.setdefault(key.kind, []), key.size)
        seconds = now - self._begun.pop(key)
        if key in self._loaded:
            self._load_seconds, share = seconds, LOAD_REST_SHARE
        else:
            self._compile_seconds[key.kind], share = seconds, REST_SHARE
        self._rests_until = now + share * seconds

    def _is_urgent(self, key: ProgramKey) -> bool:
        """Whether a program is waited for. Of the first of a kind, if these share the cores, a step takes whichever is
        there: so the second waits for the first, and while steps are computed until some were padded for want of it."""
        if key in self._first and self._activity.shares_cores:
            if any(key.kind == other.kind for other in self._begun):
                return False
            if self._is_smaller(key) and self._activity.quiet_seconds() == 0:
                return self._missed_tokens(self._in_place_of(key)) >= FIRST_MISSED_TOKENS
        return key in self._hurried

    def _of_this_size(self, key: ProgramKey) -> ProgramKey:
        """One of the first as it is, or as the steps that are computed are: then it is none of them any more."""
        if key not in self._first or not self._is_smaller(key):
            return key
        better = self._in_place_of(key)
        if better != key:
            self._first.remove(key)
            self._hurried.remove(key)
            self._hurried.add(better)
        return better

    def _is_smaller(self, key: ProgramKey) -> bool:
        """Whether steps that take a larger program meanwhile would be smaller with this one."""
        sizes = self._prepared.get(key.kind)
        return bool(sizes) and key.size < sizes[-1]

    def _in_place_of(self, key: ProgramKey) -> ProgramKey:
        """Of the programs that would make steps smaller, as this one would, the one that was missed most."""
        smaller = [other for other in self._waiting if other.kind == key.kind and self._is_smaller(other)]
        return max(smaller, key=lambda other: (self._missed_tokens(other), other == key))

    def _missed_tokens(self, key: ProgramKey) -> float:
        """How many tokens the steps that there were would have been padded by less, with this program and all that are
        prepared: those of its size, and smaller ones, whose own program would save more of each but fewer of them."""
        saved, sizes = self._lost_tokens.get(key, 0.0), self._prepared.get(key.kind, ())
        row_share = self._row_shares.get(key.kind, 1.0)
        for (kind, size), num_steps in self._padded.items():
            if kind == key.kind and size <= key.size:
                taken = next((prepared for prepared in sizes if prepared >= size), key.size)
                saved += row_share * num_steps * max(taken - key.size, 0)
        return saved

    def _is_missed(self, key: ProgramKey) -> bool:
        compiling = self._compile_seconds.get(key.kind, COMPILE_SECONDS)
        cost = self._load_seconds if key in self._loaded else compiling
        return self._missed_tokens(key) * self._activity.token_seconds >= MISSED_SHARE * cost

    def _next(self) -> ProgramKey | None:
        if not self._waiting:
            return None
        if (key := next(filter(self._is_urgent, self._waiting), None)) is not None:
            return self._of_this_size(key)
        unhurried = self._begun.keys() - self._hurried
        if self._activity.shares_cores and unhurried != self._begun.keys():
            return None  # somebody waits, and nothing else should take the cores
        most_missed = max(self._waiting, key=lambda key: (self._missed_tokens(key), key in self._asked_for))
        if self._activity.quiet_seconds() >= PAUSE_SECONDS:
            return most_missed if len(unhurried) < self._most_unhurried else None
        may_begin = self._is_missed(most_missed) or self._activity.now() >= self._rests_until
        return most_missed if may_begin and not unhurried else None
