"""How many tokens to draft for each request: as many as are worth what they cost, measured.

A draft is worth the probability that it is made and accepted, which is that of the tokens before it too; it costs the
time by which it makes a step longer. With `found` the share of steps in which the drafter had something to say of a
request, `rate` the share of its drafts that were accepted, and `price` the time of a draft in units of the time that a
token of a step without drafts takes, the n-th draft is worth it while found * rate ** n is more than price.

Steps are padded, so drafts come in lots: those with which a step just fills a bucket cost what one of them costs. Of
the buckets that the drafts of all requests could fill the one is chosen in which most tokens are expected per second;
or none, where a step is bound by products, or where decode steps are run several in one program. What buckets cost is
measured, the smallest first; the next larger one is supposed to cost as much more as it is larger.

A step behind one of another size takes longer than those that follow it, so it is not measured, and drafts are tried
for several steps in a row. What is tried would be better if it cost less than was measured: otherwise one slow moment
of the machine would be believed for ever.

Where nothing is worth drafting, nothing is thought over again until a request comes or goes, or drafts are tried again:
a step without drafts costs the host what it costs an engine that never drafts.

Only the length is decided here. That drafts change no token is the worker's, which verifies them.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from jaxpaged.core.request import Request
from jaxpaged.messages import ModelRunnerOutput, SchedulerOutput, SchedulerStats

KEPT = 0.8
"""What was seen of a request's drafts counts that much when the next ones are seen."""
FIRST_RATE, FIRST_WEIGHT = 0.6, 2.0
"""What is supposed of a request whose drafts were not seen yet, before any were, and how many drafts that is as good
as."""
KEPT_OF_ALL = 0.98
"""The same as `KEPT`, of the drafts of all requests, from which follows what is supposed of new ones."""
LEAST_FIRST_RATE = 0.25
"""So much is supposed of a new request even where the others' drafts were all wrong."""
LEAST_PRICE = 0.02
LEAST_RATE = 1e-6
PATIENCE = 100
"""Drafts that do not look worth it are tried again when so many times the time of a trial is over."""
TRIAL, PROBE = 4, 1
"""Steps of a trial, of which the first is not measured, and of one that only asks whether requests are better now."""
CHANGE = 0.5
"""Steps' time that a trial costs besides its drafts."""
DOUBT = 3.0
"""How many times too dear drafts may have looked when they were measured, if not as many as the smallest lot says."""
NUM_KEPT, NUM_ENOUGH = 7, 3
"""Of the newest steps of a size the lower quartile counts, once there are enough. A result that the host takes late
makes its step longer, and the next one shorter; other work on the machine makes steps longer, never shorter."""
LEAST_GAIN = 1.02
"""How many times as many tokens per second there must be with drafts: measurements err."""
NUM_MEASURED = NUM_KEPT + 1
"""Steps before a trial that are looked at; the first of them only says when the second began."""
NUM_PLAIN = 4
"""Steps without drafts that are measured before the first drafts."""
REMEASURE = 128
"""Steps with drafts after which one without is measured again, since contexts grow."""


@dataclass
class DraftRecord:
    """What was seen of a request's drafts. `most` is what the request allows. Of `asked` steps `found` had drafts."""

    most: int
    accepted: float = FIRST_RATE * FIRST_WEIGHT
    seen: float = FIRST_WEIGHT
    found: float = FIRST_WEIGHT
    asked: float = FIRST_WEIGHT

    @property
    def rate(self) -> float:
        return self.accepted / self.seen

    def add(self, num_accepted: int, num_drafts: int, kept: float = KEPT) -> None:
        """Drafts of a step. The first that was wrong counts, those behind it were not seen."""
        self.found = kept * self.found + (num_drafts > 0)
        self.asked = kept * self.asked + 1
        if num_drafts:
            self.accepted = kept * self.accepted + num_accepted
            self.seen = kept * self.seen + num_accepted + (num_accepted < num_drafts)

    def worth(self, price: float) -> int:
        """How many drafts are worth `price`."""
        rate = max(self.rate, LEAST_RATE)
        price = max(price, LEAST_PRICE) * self.asked / max(self.found, LEAST_RATE)
        if price >= 1:
            return 0
        return self.most if rate >= 1 else min(int(math.log(price) / math.log(rate)), self.most)

    def expected(self, num_drafts: int) -> float:
        """How many of so many drafts will be accepted."""
        rate = self.rate
        return self.found / self.asked * sum(rate**n for n in range(1, num_drafts + 1))


EVIDENCE = attrgetter("accepted", "seen", "found", "asked")


@dataclass
class StepTime:
    """Of steps of one size, in which everybody decodes."""

    newest: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_KEPT))

    @property
    def seconds(self) -> float:
        """Their lower quartile."""
        return sorted(self.newest)[len(self.newest) // 4]


class Lot(NamedTuple):
    """Drafts that a step has room for: `num_drafts` of all requests, `most` of one, at a price each. `cost` is the time
    of the step in units of that without drafts, `known` whether it was measured."""

    num_drafts: int
    most: int
    price: float
    cost: float
    known: bool

    def with_cost(self, cost: float, num_requests: int) -> "Lot":
        """The same drafts in a step that takes `cost`."""
        return self._replace(cost=cost, price=max((cost - 1) * num_requests / self.num_drafts, LEAST_PRICE))


NO_LOT = Lot(0, 0, math.inf, 1.0, True)


class StepTimes:
    """Seconds of steps by the number of tokens to which they are padded, with drafts and without. `buckets` are these
    numbers, sorted; empty: nothing is padded."""

    def __init__(self, buckets: Sequence[int]):
        self._buckets = buckets
        self._plain: dict[int, StepTime] = {}
        self._drafting: dict[int, StepTime] = {}
        self._age: dict[int, int] = {}  # steps with drafts since the last without
        self._last: tuple[int, int] | None = None  # requests and padded tokens of the step before; 0: no drafts

    def padded(self, num_tokens: int) -> int:
        return next((size for size in self._buckets if size >= num_tokens), num_tokens)

    def add(self, seconds: float, num_requests: int, num_drafts: int) -> None:
        """A step in which everybody decoded. It counts behind one of its own size."""
        before, self._last = self._last, (num_requests, self.padded(num_requests + num_drafts) if num_drafts else 0)
        if self._last != before:
            return
        plain = self.padded(num_requests)
        times, key = (self._drafting, self.padded(num_requests + num_drafts)) if num_drafts else (self._plain, plain)
        times.setdefault(key, StepTime()).newest.append(seconds)
        self._age[plain] = self._age.get(plain, 0) + 1 if num_drafts else 0

    def interrupt(self) -> None:
        """Another step came, or several that nobody measured."""
        self._last = None

    def is_known(self, num_requests: int) -> bool:
        """Whether enough is known of steps without drafts."""
        plain = self.padded(num_requests)
        return plain in self._plain and len(self._plain[plain].newest) >= NUM_PLAIN and self._age[plain] <= REMEASURE

    def lots(self, num_requests: int, most: int) -> list[Lot]:
        """What so many requests may draft, `most` each: as much as fills each of the buckets, the smallest first, up to
        the first that is larger than those that were measured."""
        plain_size = self.padded(num_requests)
        known = {size for size, time in self._drafting.items() if size >= plain_size and len(time.newest) >= NUM_ENOUGH}
        lots = []
        for size in sorted({self.padded(num_requests * (1 + n)) for n in range(1, most + 1)} | {plain_size}):
            if num_drafts := min(size - num_requests, num_requests * most):
                lot = Lot(num_drafts, -(-num_drafts // num_requests), LEAST_PRICE, 1.0, size in known)
                lots.append(lot.with_cost(self._cost(size, plain_size, known), num_requests))
                if size > max(known, default=0):
                    break
        return lots

    def _cost(self, size: int, plain_size: int, known: Set[int]) -> float:
        """The time of a step with drafts, of `size` tokens: measured, or else from the next larger size that was, or
        the next smaller; nothing before any was."""
        seen = [each for each in known if each == size or each > plain_size]
        if not seen:
            return 1.0
        nearest = min(seen, key=lambda each: (each != size, each < size, abs(each - size)))
        more = self._drafting[nearest].seconds / self._plain[plain_size].seconds - 1
        if nearest != size:
            more *= (size - plain_size) / (nearest - plain_size)
        return 1 + max(more, 0.0)


class DraftLengths:
    """Sets `Request.num_drafts`. `most`: tokens that a row may draft. `stats` counts drafts.

    `buckets`: numbers of tokens to which steps are padded. `most_in_step`: drafts that a step may have.
    """

    def __init__(
        self,
        most: int,
        stats: SchedulerStats,
        buckets: Sequence[int] = (),
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._most, self._stats, self._clock = most, stats, clock
        self._times = StepTimes(buckets)
        self._scheduled_at: dict[int, float] = {}
        self._last_result = -math.inf
        self._patience = PATIENCE  # steps until the next trial
        self._trial = 0  # drafts that are tried
        self._trial_steps = self._trial_left = 0  # in so many steps; of which so many are to come
        self._all = DraftRecord(most)  # of the drafts of all requests
        self._resting = 0  # that many requests have thought it over, and none drafts
        self.most_in_step = 0
        stats.num_accepted_per_pos = [0] * most

    def begin(self, request: Request) -> None:
        """A request was admitted. It decodes a step before anything is drafted."""
        if request.drafts is None:
            rate = max(self._all.rate, LEAST_FIRST_RATE)
            request.drafts = DraftRecord(min(most_drafts(request), self._most), rate * FIRST_WEIGHT)
            self._resting = 0

    def note(self, step_id: int) -> None:
        """A step was scheduled."""
        self._scheduled_at[step_id] = self._clock()

    def observe(self, requests: Mapping[str, Request], scheduled: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """The tokens of a step are there, and not taken yet: count drafts, and say how many there are next."""
        self._patience -= scheduled.num_steps
        rests = output.num_drafts is None and self._resting == len(scheduled.request_ids)
        if not rests or self._patience < NUM_MEASURED * scheduled.num_steps:
            self._measure(scheduled, output)
        else:
            self._times.interrupt()
        if rests and self._patience > 0:
            return
        asked = dict(zip(scheduled.request_ids, scheduled.max_sampled_tokens))
        going_on = []
        for i, request_id in enumerate(output.request_ids):
            request, num_asked = requests[request_id], asked[request_id] - 1
            if request.drafts is None or request.is_finished:
                continue
            if output.num_drafts is not None and num_asked:
                num_drafts, num_accepted = output.num_drafts[i], max(len(output.sampled_token_ids[i]) - 1, 0)
                request.drafts.add(num_accepted, num_drafts)
                self._all.add(num_accepted, num_drafts, KEPT_OF_ALL)
                self._count(num_drafts, num_accepted)
            going_on.append(request)
        if going_on:
            self._set_lengths(going_on, len(scheduled.request_ids))

    def _measure(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Learn how long a step took, of which the result is here."""
        now, begin, num_requests = self._clock(), self._last_result, len(scheduled.request_ids)
        self._last_result = now
        for step_id in [each for each in self._scheduled_at if each <= scheduled.step_id]:
            begin = max(begin, self._scheduled_at.pop(step_id))
        waited = output.buckets is not None and output.buckets.program_wait > 0
        if scheduled.num_scheduled_tokens == scheduled.max_sampled_tokens and not waited:
            num_drafts = 0 if scheduled.num_steps > 1 else sum(scheduled.max_sampled_tokens) - num_requests
            self._times.add((now - begin) / scheduled.num_steps, num_requests, num_drafts)
        else:
            self._times.interrupt()

    def _count(self, num_drafts: int, num_accepted: int) -> None:
        stats = self._stats
        stats.num_drafts += num_drafts > 0
        stats.num_draft_tokens += num_drafts
        stats.num_accepted_tokens += num_accepted
        for nth in range(num_accepted):
            stats.num_accepted_per_pos[nth] += 1

    def _next_trial(self, lot: Lot, lots: Sequence[Lot], together: DraftRecord, num_requests: int) -> Lot | None:
        """What this step tries in place of the best `lot`, if anything: it goes on with a trial, or begins one where
        that is due, or where nothing is known of the best."""
        trial = next((each for each in lots if each.num_drafts == self._trial and self._trial_left), None)
        if trial is None:
            if self._patience > 0 and lot.known:
                return None
            trial, steps = lot, TRIAL
            if self._patience <= 0:
                trial, steps = self._doubted(lot, lots, together, num_requests)
            self._trial, self._trial_steps, self._trial_left = trial.num_drafts, steps, steps
        self._trial_left -= 1
        self._patience = int(PATIENCE * (CHANGE + self._trial_steps * (trial.cost - 1)))
        return trial

    def _doubted(self, lot: Lot, lots: Sequence[Lot], together: DraftRecord, num_requests: int) -> tuple[Lot, int]:
        """One after the other of what would be better than `lot` if it cost less than it seemed to; something at least:
        requests may have become better, and the smallest lot cheaper. And in how many steps to try it."""
        slope, now = (lots[0].cost - 1) / lots[0].num_drafts, gain(lot, together, num_requests)
        better = []
        for each in lots:
            cost = 1 + min((each.cost - 1) / DOUBT, slope * each.num_drafts)
            if gain(each.with_cost(cost, num_requests), together, num_requests) > LEAST_GAIN * now:
                better.append(each)
        better = better or [lots[0] if lot is NO_LOT else lot]
        are_good = gain(better[0].with_cost(1.0, num_requests), together, num_requests) > LEAST_GAIN
        chosen = next((each for each in better if each.num_drafts > self._trial), better[0])
        return chosen, TRIAL if are_good else PROBE

    def _set_lengths(self, requests: Sequence[Request], num_requests: int) -> None:
        """How many tokens each of these drafts next, in a step of so many requests: none while nothing is known of
        steps without drafts."""
        lot, tries, self._resting = NO_LOT, False, 0
        if self._times.is_known(num_requests):
            lots = self._times.lots(num_requests, self._most)
            records = [request.drafts for request in requests]
            together = DraftRecord(self._most, *(sum(column) for column in zip(*map(EVIDENCE, records))))
            lot = max([NO_LOT, *lots], key=lambda lot: gain(lot, together, num_requests))
            trial = self._next_trial(lot, lots, together, num_requests)
            lot, tries = trial or lot, trial is not None
        self.most_in_step = lot.num_drafts
        rests = self._times.is_known(num_requests)
        for request in requests:
            wanted = request.drafts.most if tries else request.drafts.worth(lot.price)
            request.num_drafts = min(wanted, lot.most)
            if request.num_drafts:
                request.decode_limit = 0  # to decode needs a decision
                rests = False
        if rests:
            self._resting = num_requests


def gain(lot: Lot, together: DraftRecord, num_requests: int) -> float:
    """How many times as many tokens per second are expected with these drafts of requests that are all like those of
    the record; `LEAST_GAIN` for none of them."""
    if lot is NO_LOT:
        return LEAST_GAIN
    length = min(together.worth(lot.price), lot.most)
    within = min(lot.num_drafts / max(length * num_requests, 1), 1.0)
    return (1 + within * together.expected(length)) / lot.cost


def most_drafts(request: Request) -> int:
    """What a request allows: `extra_args` may say less than the engine does."""
    extra = request.sampling_params.extra_args or {}
    return int(extra.get("num_speculative_tokens", request.max_total_tokens))
