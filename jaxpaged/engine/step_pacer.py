"""How many decode steps a program should run: one, unless what a dispatch costs the host shows in the time of a step.

Two moving averages over decode steps decide: the host's time to schedule and dispatch, which a run of k steps pays
once, and the time from result to result, per step. This module knows neither requests nor programs.
"""

import math

from jaxpaged.messages import StepRecord

LEAST_SHARE = 0.1
"""Below this share of a step, dispatching is not worth saving: programs, and tokens that come in bursts, cost more."""
GOAL_SHARE = 0.02
"""A run is as long as it takes for dispatching to have this share of it."""
MOST_SECONDS = 0.05
"""A new request waits for the runs in flight: together they take about this long at most."""
NUM_OBSERVATIONS = 16
"""Steps before the averages mean something."""
WEIGHT = 0.1


class StepPacer:
    """`fixed` is the number of steps that an option asks for, None to measure; `depth` runs are in flight at a time."""

    def __init__(self, fixed: int | None, depth: int):
        self._fixed, self._most_seconds = fixed, MOST_SECONDS / depth
        self._before: StepRecord | None = None
        self._num_seen = 0
        self.dispatch_seconds = self.step_seconds = 0.0

    def observe(self, record: StepRecord) -> None:
        """Learn from a finished step. Steps with prompts in them, and the first after idling, tell nothing."""
        before, self._before = self._before, record
        decodes = 0 < record.num_tokens == record.num_sampled
        if before is None or not before.num_unfinished or not decodes:
            return
        self._num_seen += 1
        weight = max(WEIGHT, 1 / self._num_seen)
        dispatch = record.dispatch_end - record.schedule_begin - record.program_wait
        step = (record.result_ready - before.result_ready - record.program_wait) / record.num_steps
        self.dispatch_seconds += weight * (dispatch - self.dispatch_seconds)
        self.step_seconds += weight * (step - self.step_seconds)

    def interrupt(self) -> None:
        """Nothing is computed for a while: the time until the next result tells nothing."""
        self._before = None

    @property
    def num_steps(self) -> int:
        """How many steps a program should run now, if it can."""
        if self._fixed is not None:
            return self._fixed
        step = self.step_seconds
        if self._num_seen < NUM_OBSERVATIONS or self.dispatch_seconds < LEAST_SHARE * step:
            return 1
        longest = max(int(self._most_seconds / step), 1)
        return min(math.ceil(self.dispatch_seconds / (GOAL_SHARE * step)), longest)
