"""Which program is prepared next, and whether now: steps come first.

On a CPU the steps of requests are computed by the cores that compile, and XLA's compiler has threads of its own, whose
priority nobody chooses. So compiling stands back by itself: while steps are computed, a program that somebody waits for
is prepared at once, one for whose lack steps were padded soon, and any other now and then.

This module knows neither threads nor programs. Whoever shares a queue between threads locks it.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable

from jaxpaged.messages import ProgramKey

PAUSE_SECONDS = 1.0
"""No step for so long is a pause, in which everything is prepared. Between two steps, or two requests of a program that
asks one after the other, there is less."""
MISSED_TOKENS = 1000
"""A program is missed once steps were padded by so many tokens without need: about what preparing it costs."""
FIRST_MISSED_TOKENS = 256
"""The same for the first of all small programs, for which the cores are left alone: a few steps show their size."""
REST_SHARE = 19
"""How much longer than it took to compile a program that nobody missed the next one waits, while steps are computed."""
LOAD_REST_SHARE = 1
"""The same of a program that was loaded, which takes a tenth of the time, and no threads but one."""


class Activity:
    """When steps are computed. Steps are one chain: where one has ended, so have those before it.

    `shares_cores` False: not where programs are compiled, so that it is always quiet there.
    """

    def __init__(self, shares_cores: bool, now: Callable[[], float] = time.monotonic):
        self.shares_cores, self.now = shares_cores, now
        self._last_begun = self._last_ended = -1
        self._quiet_since = -math.inf

    def begin(self, step_id: int) -> None:
        self._last_begun = step_id

    def end(self, step_id: int) -> None:
        self._last_ended, self._quiet_since = step_id, self.now()

    def end_all(self) -> None:
        """Nothing is in flight any more."""
        self.end(self._last_begun)

    def quiet_seconds(self) -> float:
        """Since the last step ended; 0 while one is in flight, infinity before there was any."""
        if not self.shares_cores:
            return math.inf
        return self.now() - self._quiet_since if self._last_ended >= self._last_begun else 0.0


class CompileQueue:
    """Keys in the order in which they are prepared; `first` of them are waited for from the beginning.

    At most `most_unhurried` that nobody waits for are in preparation at a time. Those in `loaded` need not be compiled.
    """

    def __init__(
        self, keys: Iterable[ProgramKey], first: int, most_unhurried: int, activity: Activity,
        loaded: Collection[ProgramKey] = (),
    ):  # fmt: skip
        self._waiting = list(keys)
        self._loaded = frozenset(loaded)
        self._first = set(self._waiting[:first])
        self._hurried = set(self._first)
        self._missed_tokens: dict[ProgramKey, int] = {}
        self._most_unhurried, self._activity = most_unhurried, activity
        self._begun: dict[ProgramKey, float] = {}  # when, of those in preparation
        self._rests_until = -math.inf
        self._compile_seconds = 1.0  # of the last one that was compiled here
        self._largest: dict[str, int] = {}  # of each kind, of those that are prepared
        self._asked_for: set[ProgramKey] = set()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, key: ProgramKey) -> None:
        """Append a program that would make steps faster, or that `hurry` says somebody waits for. It goes before those
        that nobody has asked for, and rests first, as if another one had just been compiled: otherwise it would begin
        in the middle of somebody's answer."""
        self._waiting.append(key)
        self._asked_for.add(key)
        rest = REST_SHARE * self._compile_seconds
        self._rests_until = max(self._rests_until, self._activity.now() + rest)

    def hurry(self, key: ProgramKey) -> None:
        """Somebody waits for a program: if it has not been begun, it is next."""
        if key in self._waiting:
            self._waiting.remove(key)
            self._waiting.insert(0, key)
            self._hurried.add(key)
            self._first.discard(key)

    def miss(self, key: ProgramKey, num_tokens: int) -> None:
        """A step was padded by so many tokens more than with this program."""
        self._missed_tokens[key] = self._missed_tokens.get(key, 0) + num_tokens

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
        self._largest[key.kind] = max(self._largest.get(key.kind, 0), key.size)
        seconds, share = now - self._begun.pop(key), LOAD_REST_SHARE
        if key not in self._loaded:
            self._compile_seconds, share = seconds, REST_SHARE
        self._rests_until = now + share * seconds

    def _is_urgent(self, key: ProgramKey) -> bool:
        """Whether a program is waited for. Of the first of a kind, if these share the cores, a step takes whichever is
        there: so the second waits for the first, and while steps are computed until some were padded for want of it."""
        if key in self._first and self._activity.shares_cores:
            if any(key.kind == other.kind for other in self._begun):
                return False
            if self._is_smaller(key) and self._activity.quiet_seconds() == 0:
                return self._missed_tokens.get(self._in_place_of(key), 0) >= FIRST_MISSED_TOKENS
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
        return key.size < self._largest.get(key.kind, 0)

    def _in_place_of(self, key: ProgramKey) -> ProgramKey:
        """Of the programs that would make steps smaller, as this one would, the one that was missed most."""
        smaller = [other for other in self._waiting if other.kind == key.kind and self._is_smaller(other)]
        return max(smaller, key=lambda other: (self._missed_tokens.get(other, 0), other == key))

    def _next(self) -> ProgramKey | None:
        if not self._waiting:
            return None
        if (key := next(filter(self._is_urgent, self._waiting), None)) is not None:
            return self._of_this_size(key)
        unhurried = self._begun.keys() - self._hurried
        if self._activity.shares_cores and unhurried != self._begun.keys():
            return None  # somebody waits, and nothing else should take the cores
        most_missed = max(self._waiting, key=lambda key: (self._missed_tokens.get(key, 0), key in self._asked_for))
        if self._activity.quiet_seconds() >= PAUSE_SECONDS:
            return most_missed if len(unhurried) < self._most_unhurried else None
        is_missed = self._missed_tokens.get(most_missed, 0) >= MISSED_TOKENS
        may_begin = is_missed or self._activity.now() >= self._rests_until
        return most_missed if may_begin and not unhurried else None
