"""How many tokens to draft for each request: as many as are worth what they cost, measured.

A draft is worth the probability that it is accepted, which is that of the tokens before it too; it costs the time by
which it makes a step longer. With `rate` the share of a request's drafts that were accepted, and `price` the time of a
draft in units of the time that a token of a step without drafts takes, the n-th draft is worth it while rate ** n is
more than price. The price follows the number of requests: where a step is bound by memory drafts cost next to nothing,
and where it is bound by products, or where decode steps are run several in one program, much.

Only the length is decided here. That drafts change no token is the worker's, which verifies them.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxpaged.core.counters import Counters
from jaxpaged.core.request import Request
from jaxpaged.messages import ModelRunnerOutput, SchedulerOutput

KEPT = 0.8
"""What was seen of a request's drafts counts that much when the next ones are seen."""
FIRST_RATE, FIRST_WEIGHT = 0.6, 2.0
"""What is supposed of a request whose drafts were not seen yet, and how many drafts that is as good as."""
LEAST_PRICE = 0.02
LEAST_RATE = 1e-6
PATIENCE = 48
"""Steps after which requests that are not worth drafts try them again, more where drafts are dear: a try costs less
than a hundredth."""
WEIGHT_LOWER, WEIGHT_HIGHER = 0.5, 0.05
"""Of a new measurement, after the first ones. What else the machine does makes steps longer, never shorter, so short
ones tell more."""
NUM_PLAIN = 4
"""Steps without drafts that are measured before the first drafts."""
REMEASURE = 128
"""Steps with drafts after which one without is measured again, since contexts grow."""


@dataclass
class DraftRecord:
    """What was seen of a request's drafts. `most` is what the request allows."""

    most: int
    accepted: float = FIRST_RATE * FIRST_WEIGHT
    seen: float = FIRST_WEIGHT

    def add(self, num_accepted: int, num_asked: int) -> None:
        """Drafts of a step. The first that was wrong counts, those behind it were not seen."""
        self.accepted = KEPT * self.accepted + num_accepted
        self.seen = KEPT * self.seen + num_accepted + (num_accepted < num_asked)

    def worth(self, price: float) -> int:
        """How many drafts are worth `price`."""
        rate = max(self.accepted / self.seen, LEAST_RATE)
        if price >= 1:
            return 0
        return self.most if rate >= 1 else min(int(math.log(max(price, LEAST_PRICE)) / math.log(rate)), self.most)


@dataclass
class StepTimes:
    """Of steps with about so many requests: seconds of one without drafts, and the price of a draft."""

    plain: float = 0.0
    num_plain: int = 0
    price: float = LEAST_PRICE
    num_priced: int = 0
    age: int = 0  # steps with drafts since the last without

    def add(self, seconds: float, num_requests: int, num_drafts: int) -> None:
        """A step in which everybody decoded."""
        if not num_drafts:
            self.plain = followed(self.plain, seconds, self.num_plain)
            self.num_plain, self.age = self.num_plain + 1, 0
        elif self.num_plain:
            price = max(seconds / self.plain - 1, 0.0) * num_requests / num_drafts
            self.price = followed(self.price, price, self.num_priced)
            self.num_priced, self.age = self.num_priced + 1, self.age + 1

    @property
    def is_known(self) -> bool:
        return self.num_plain >= NUM_PLAIN and self.age <= REMEASURE


class DraftLengths:
    """Sets `Request.num_drafts`. `most`: tokens that a row may draft, 0: none, and then nothing is measured."""

    def __init__(self, most: int, counters: Counters, clock: Callable[[], float] = time.perf_counter):
        self._most, self._counters, self._clock = most, counters, clock
        self._times: dict[int, StepTimes] = {}  # by the number of requests, to a power of two
        self._scheduled_at: dict[int, float] = {}
        self._last_result = -math.inf
        self._patience = PATIENCE  # steps until the next try
        counters.num_accepted_per_pos = [0] * most

    def begin(self, request: Request) -> None:
        """A request was admitted. It decodes a step before anything is drafted."""
        if self._most and request.drafts is None:
            request.drafts = DraftRecord(min(most_drafts(request), self._most))

    def note(self, step_id: int) -> None:
        """A step was scheduled."""
        if self._most:
            self._scheduled_at[step_id] = self._clock()

    def observe(self, requests: Mapping[str, Request], scheduled: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """The tokens of a step are there, and not taken yet: count drafts, and say how many there are next."""
        if not self._most:
            return
        times, price = self._measure(scheduled, output), None
        self._patience -= scheduled.num_steps
        tries = self._patience <= 0
        if times.is_known:
            price = times.price
            self._patience = int(PATIENCE * (1 + self._most * price)) if tries else self._patience
        asked = dict(zip(scheduled.request_ids, scheduled.max_new_tokens))
        for i, request_id in enumerate(output.request_ids):
            request, num_asked = requests[request_id], asked[request_id] - 1
            if request.drafts is None or request.is_finished:
                continue
            if output.num_drafts is not None and num_asked:
                num_accepted = max(len(output.sampled_token_ids[i]) - 1, 0)
                request.drafts.add(num_accepted, num_asked)
                self._count(output.num_drafts[i], num_accepted)
            self._set_length(request, price, tries)

    def _measure(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> StepTimes:
        """Learn how long a step took, of which the result is here; returns the times of such steps."""
        now, begin, num_requests = self._clock(), self._last_result, len(scheduled.request_ids)
        self._last_result = now
        for step_id in [each for each in self._scheduled_at if each <= scheduled.step_id]:
            begin = max(begin, self._scheduled_at.pop(step_id))
        times = self._times.setdefault(num_requests.bit_length(), StepTimes())
        waited = output.buckets is not None and output.buckets.program_wait > 0
        if scheduled.num_scheduled_tokens == scheduled.max_new_tokens and not waited:
            num_drafts = 0 if scheduled.num_steps > 1 else sum(scheduled.max_new_tokens) - num_requests
            times.add((now - begin) / scheduled.num_steps, num_requests, num_drafts)
        return times

    def _count(self, num_drafts: int, num_accepted: int) -> None:
        counters = self._counters
        counters.num_drafts += num_drafts > 0
        counters.num_draft_tokens += num_drafts
        counters.num_accepted_tokens += num_accepted
        for place in range(num_accepted):
            counters.num_accepted_per_pos[place] += 1

    def _set_length(self, request: Request, price: float | None, tries: bool) -> None:
        """`price` None: it is to be measured first."""
        request.num_drafts = 0 if price is None else request.drafts.worth(price)
        if tries and price is not None and not request.num_drafts:
            request.num_drafts = request.drafts.most
        if request.num_drafts:
            request.decode_limit = 0  # to decode needs a decision


def followed(before: float, now: float, num_before: int) -> float:
    """An average that is near the smallest of its newest values, once there are some; the first is taken as it is."""
    weight = WEIGHT_LOWER if now < before else WEIGHT_HIGHER
    return before + max(weight, 1 / (1 + num_before)) * (now - before)


def most_drafts(request: Request) -> int:
    """What a request allows: `extra_args` may say less than the engine does."""
    extra = request.sampling_params.extra_args or {}
    return int(extra.get("num_speculative_tokens", request.max_total_tokens))
