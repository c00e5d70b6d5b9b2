"""How many tokens each request drafts: as many as pay, by measured costs.

A draft pays off by the probability that it is made and accepted, together with all drafts before it. It costs the time
by which it makes a step longer. Let `found` be the share of steps in which the drafter had drafts for a request, `rate`
the share of its drafts that were accepted, and `price` the time of a draft, in units of the time of a token in a step
without drafts. The n-th draft pays while found * rate ** n is more than price.

Steps are padded to buckets, so drafts come in lots: all drafts that fill a bucket cost as much as one of them. The
bucket with the most expected tokens per second is chosen among those that the drafts of all requests could fill. No
draft is made where a step is bound by products, or in a multi-step decode. Costs of buckets are measured, the smallest
bucket first. The next larger bucket is supposed to cost in proportion to its size.

A step after a step of another size takes longer than the next ones. So it is not measured, and drafts are tried for
several steps in a row. Lots are tried that would be better if they cost less than was measured; otherwise one slow
moment of the machine would be believed for ever.

Where no draft pays, nothing is computed again until a request comes or goes, or drafts are tried again. Then a step
costs the host as much as in an engine that never drafts.

This module decides only the length. The worker verifies drafts, so they change no token.
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
"""The weight of a request's earlier drafts when the next ones are seen."""
FIRST_RATE, FIRST_WEIGHT = 0.6, 2.0
"""The rate that is supposed of a request before any drafts were seen, and how many drafts this counts as."""
KEPT_OF_ALL = 0.98
"""The same as `KEPT` for the drafts of all requests, from which the rate of a new request is supposed."""
LEAST_FIRST_RATE = 0.25
"""The rate that is supposed of a new request even where all drafts of others were wrong."""
LEAST_PRICE = 0.02
LEAST_RATE = 1e-6
PATIENCE = 100
"""Drafts that do not seem to pay are tried again after so many times the time of a trial."""
TRIAL, PROBE = 4, 1
"""Steps of a trial, of which the first is not measured; and of a trial that only asks whether drafts are better now."""
CHANGE = 0.5
"""Steps' time that a trial costs besides its drafts."""
DOUBT = 3.0
"""Drafts may have looked so many times too dear when they were measured, unless the smallest lot says otherwise."""
NUM_KEPT, NUM_ENOUGH = 7, 3
"""The time of a size is the lower quartile of its newest steps, once there are enough. A result that the host takes
late makes its step longer and the next one shorter; other work on the machine makes steps longer, never shorter."""
LEAST_GAIN = 1.02
"""Drafts must give so many times the tokens per second, since measurements err."""
NUM_MEASURED = NUM_KEPT + 1
"""Steps before a trial that are looked at; the first of them only says when the second began."""
NUM_PLAIN = 4
"""Steps without drafts that are measured before the first drafts."""
REMEASURE = 128
"""Steps with drafts after which one without is measured again, since contexts grow."""


@dataclass
class DraftRecord:
    """The record of a request's drafts. `most`: how many it allows in a step. `found` of `asked` steps had drafts."""

    most: int
    accepted: float = FIRST_RATE * FIRST_WEIGHT
    seen: float = FIRST_WEIGHT
    found: float = FIRST_WEIGHT
    asked: float = FIRST_WEIGHT

    @property
    def rate(self) -> float:
        return self.accepted / self.seen

    def add(self, num_accepted: int, num_drafts: int, kept: float = KEPT) -> None:
        """Count the drafts of a step. The first wrong one counts; those behind it were not verified."""
        self.found = kept * self.found + (num_drafts > 0)
        self.asked = kept * self.asked + 1
        if num_drafts:
            self.accepted = kept * self.accepted + num_accepted
            self.seen = kept * self.seen + num_accepted + (num_accepted < num_drafts)

    def worth(self, price: float) -> int:
        """How many drafts pay at a `price` each."""
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
    """Times of steps of one size, in which all requests decode."""

    newest: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_KEPT))

    @property
    def seconds(self) -> float:
        """The lower quartile."""
        return sorted(self.newest)[len(self.newest) // 4]


class Lot(NamedTuple):
    """The drafts that fill a step: `num_drafts` of all requests, `most` of one request, at a price each. `cost` is the
    time of the step in units of a step without drafts; `known` says whether it was measured."""

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
    """Times of steps with drafts and without, by the number of tokens to which they are padded. `buckets` are these
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
        """Count a step in which all requests decoded, if the step before it was of the same size."""
        before, self._last = self._last, (num_requests, self.padded(num_requests + num_drafts) if num_drafts else 0)
        if self._last != before:
            return
        plain = self.padded(num_requests)
        times, key = (self._drafting, self.padded(num_requests + num_drafts)) if num_drafts else (self._plain, plain)
        times.setdefault(key, StepTime()).newest.append(seconds)
        self._age[plain] = self._age.get(plain, 0) + 1 if num_drafts else 0

    def interrupt(self) -> None:
        """A step of another kind came, or steps that were not measured."""
        self._last = None

    def is_known(self, num_requests: int) -> bool:
        """Whether enough steps without drafts were measured."""
        plain = self.padded(num_requests)
        return plain in self._plain and len(self._plain[plain].newest) >= NUM_PLAIN and self._age[plain] <= REMEASURE

    def lots(self, num_requests: int, most: int) -> list[Lot]:
        """The lots of so many requests, `most` drafts each: one that fills each bucket, the smallest first, up to the
        first bucket that is larger than all measured ones."""
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
        """The cost of a step with drafts of `size` tokens: measured, or else from the next larger measured size, or the
        next smaller; 1 before any was measured."""
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
        """A request was admitted. It decodes a step before it drafts."""
        if request.drafts is None:
            rate = max(self._all.rate, LEAST_FIRST_RATE)
            request.drafts = DraftRecord(min(most_drafts(request), self._most), rate * FIRST_WEIGHT)
            self._resting = 0

    def note(self, step_id: int) -> None:
        """A step was scheduled."""
        self._scheduled_at[step_id] = self._clock()

    def observe(self, requests: Mapping[str, Request], scheduled: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """The tokens of a step are there, and not taken yet: count its drafts, and set the numbers of the next."""
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
        """Learn how long a step took whose result is here."""
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
        """The lot that this step tries in place of the best one, if any: a trial goes on, or begins where it is due, or
        where the cost of the best lot is not known."""
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
        """The next lot to try, and in how many steps: one after the other of those that would be better than `lot` if
        they cost less than they seemed to. There is always one: drafts may have become better, and lots cheaper."""
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
        """Set how many tokens each of these requests drafts in the next step of so many requests: none while too few
        steps without drafts were measured."""
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
    """How many times the tokens per second are expected with a lot, if all requests are like the record; `LEAST_GAIN`
    for the lot without drafts."""
    if lot is NO_LOT:
        return LEAST_GAIN
    length = min(together.worth(lot.price), lot.most)
    within = min(lot.num_drafts / max(length * num_requests, 1), 1.0)
    return (1 + within * together.expected(length)) / lot.cost


def most_drafts(request: Request) -> int:
    """How many drafts a request allows in a step: `extra_args` may say fewer than the engine does."""
    extra = request.sampling_params.extra_args or {}
    return int(extra.get("num_speculative_tokens", request.max_total_tokens))
