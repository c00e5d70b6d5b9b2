"""How far a core runs ahead of its results: the steps in flight, and how many decode steps a program runs.

Steps are dispatched in order and awaited in order. A masked step is dispatched in two halves: its masks follow from the
tokens of all steps before it, so it samples when it is the only one in flight. This module knows neither requests nor
programs.
"""

import math
import time
from collections import deque
from typing import NamedTuple

from jaxpaged.executor.base import PendingOutput
from jaxpaged.interrupts import accepted_interrupts
from jaxpaged.messages import ModelRunnerOutput, SchedulerOutput, StepRecord

LEAST_SHARE = 0.1
"""Below this share of a step, dispatching is not worth saving: programs, and tokens that come in bursts, cost more."""
GOAL_SHARE = 0.02
"""A multi-step decode is as long as it takes for dispatching to have this share of it."""
MOST_SECONDS = 0.05
"""A new request waits for the multi-step decodes in flight: together they take about this long at most."""
NUM_OBSERVATIONS = 16
"""Steps before the averages mean something."""
WEIGHT = 0.1


class Step(NamedTuple):
    """A step that was dispatched and not yet awaited."""

    scheduled: SchedulerOutput
    pending: PendingOutput
    times: tuple[float, float, float]  # schedule begin and end, dispatch end


class DoneStep(NamedTuple):
    """A step and its result. `times`: those of the step, and when the host began to wait and had the result."""

    scheduled: SchedulerOutput
    result: ModelRunnerOutput
    times: tuple[float, float, float, float, float]


class InFlight:
    """At most `depth` steps that were dispatched and not yet awaited, the oldest first.

    Nothing depends on `depth` but how late a new request begins, and how much is computed in vain behind a request's
    end. Interrupts are welcome while the host waits, and only there: a step whose wait is interrupted, or fails, stays
    in flight.
    """

    def __init__(self, depth: int):
        self.depth = depth
        self.awaits_masks = False  # the newest step has not sampled
        self._steps: deque[Step] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def has_room(self) -> bool:
        """Whether another step may be dispatched now."""
        return len(self._steps) < self.depth and not self.awaits_masks

    @property
    def masks_are_due(self) -> bool:
        """Whether the step that awaits masks is the only one in flight."""
        return self.awaits_masks and len(self._steps) == 1

    @property
    def oldest(self) -> SchedulerOutput | None:
        """The step that is awaited next."""
        return self._steps[0].scheduled if self._steps else None

    def push(self, scheduled: SchedulerOutput, pending: PendingOutput, times: tuple[float, float, float]) -> None:
        """A step was dispatched, all of it unless it is masked."""
        assert self.has_room, f"step {scheduled.step_id} is dispatched with {len(self._steps)} in flight"
        self._steps.append(Step(scheduled, pending, times))
        self.awaits_masks = scheduled.masked

    def wait_for_drafts(self) -> list[list[int]]:
        """What was drafted in the step whose masks are due."""
        if max(self._steps[0].scheduled.max_sampled_tokens) == 1:
            return []
        with accepted_interrupts():
            return self._steps[0].pending.drafts()

    def sampled(self, pending: PendingOutput) -> None:
        """The rest of the step whose masks were due was dispatched."""
        assert self.masks_are_due, "no step awaits masks"
        self._steps[0] = self._steps[0]._replace(pending=pending)
        self.awaits_masks = False

    def wait(self) -> DoneStep:
        """Wait for the oldest step. Raises what its result raises."""
        step, begin = self._steps[0], time.perf_counter()
        with accepted_interrupts():
            result = step.pending.result()
        self._steps.popleft()
        return DoneStep(step.scheduled, result, (*step.times, begin, time.perf_counter()))

    def clear(self) -> None:
        """No result will come: a step has failed, or the engine ends."""
        self._steps.clear()
        self.awaits_masks = False


class StepPacer:
    """How many decode steps a program should run: one, unless what a dispatch costs the host shows in the time of a
    step.

    Two moving averages over decode steps decide: the host's time to schedule and dispatch, which k
    steps pay once, and the time from result to result, per step. `fixed` is the number of steps that an option asks
    for, None to measure; `depth` dispatches are in flight at a time.
    """

    def __init__(self, fixed: int | None, depth: int):
        self._is_fixed, self._most_seconds = fixed is not None, MOST_SECONDS / depth
        self.num_steps = 1 if fixed is None else fixed
        """How many steps a program should run now, if it can."""
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
        if not self._is_fixed and self._num_seen >= NUM_OBSERVATIONS:
            self.num_steps = self._best_num_steps()

    def interrupt(self) -> None:
        """Nothing is computed for a while: the time until the next result tells nothing."""
        self._before = None

    def _best_num_steps(self) -> int:
        step = self.step_seconds
        if self.dispatch_seconds < LEAST_SHARE * step:
            return 1
        longest = max(int(self._most_seconds / step), 1)
        return min(math.ceil(self.dispatch_seconds / (GOAL_SHARE * step)), longest)
