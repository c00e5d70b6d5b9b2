"""Steps in flight, with masks, drafts, interrupts and failures; when runs of decode steps are worth it."""

import pytest

from jaxpaged.engine.in_flight import MOST_SECONDS, NUM_OBSERVATIONS, InFlight, StepPacer
from jaxpaged.messages import ModelRunnerOutput, SchedulerOutput, StepRecord

TIMES = (1.0, 2.0, 3.0)


class Pending:
    """A step whose wait raises `errors`, one after the other, before it has a result."""

    def __init__(self, step_id, *errors):
        self.step_id, self.errors = step_id, list(errors)

    def result(self):
        if self.errors:
            raise self.errors.pop(0)
        return ModelRunnerOutput(self.step_id, [])

    def drafts(self):
        return [[self.step_id]]


def scheduled(step_id, masked=False, most=1):
    return SchedulerOutput(step_id, [], [], ["a"], [1], [0], [most], [None], 1, masked=masked)


def in_flight(*steps, depth=2):
    flight = InFlight(depth)
    for step in steps:
        flight.push(step, Pending(step.step_id), TIMES)
    return flight


def test_steps_are_awaited_in_order_and_there_is_room_again():
    flight = in_flight(scheduled(1), scheduled(2))
    assert not flight.has_room and flight.oldest.step_id == 1
    done = flight.wait()
    assert (done.scheduled.step_id, done.result.step_id, done.times[:3]) == (1, 1, TIMES)
    assert done.times[3] <= done.times[4]
    assert flight.has_room and flight.oldest.step_id == 2 and len(flight) == 1
    with pytest.raises(AssertionError):
        in_flight(scheduled(1), scheduled(2), depth=1)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("the device is on fire")], ids=repr)
def test_a_step_whose_wait_ends_with_an_error_stays_in_flight(error):
    flight = InFlight(2)
    flight.push(scheduled(1), Pending(1, error), TIMES)
    with pytest.raises(type(error)):
        flight.wait()
    assert flight.wait().result.step_id == 1 and not flight


def test_masks_are_due_when_all_steps_before_are_known():
    flight = in_flight(scheduled(1), scheduled(2, masked=True), depth=3)
    assert flight.awaits_masks and not flight.masks_are_due
    assert not flight.has_room, "nothing is dispatched before it has sampled"
    flight.wait()
    assert flight.masks_are_due and flight.wait_for_drafts() == []
    flight.sampled(Pending(7))
    assert flight.has_room and not flight.awaits_masks
    assert flight.wait().result.step_id == 7, "the result is that of the second half"


def test_drafts_of_a_masked_step_are_read_before_its_masks_are_made():
    assert in_flight(scheduled(3, masked=True, most=2)).wait_for_drafts() == [[3]]


def test_after_a_failure_nothing_is_in_flight():
    flight = in_flight(scheduled(1, masked=True))
    flight.clear()
    assert flight.has_room and flight.oldest is None and not flight.masks_are_due


def records(count, dispatch, step, num_steps=1, num_tokens=None, num_unfinished=1):
    """Steps, one after the other, of so many seconds each; a run takes `num_steps` times as long."""
    num_tokens = num_steps if num_tokens is None else num_tokens
    for i in range(count):
        begin = i * step * num_steps
        yield StepRecord(
            i,
            num_tokens,
            8,
            1,
            num_steps,
            8,
            False,
            num_unfinished,
            begin,
            begin,
            begin + dispatch,
            begin,
            begin + step * num_steps,
            begin + step * num_steps,
            num_steps,
        )


def pacer_after(*groups, fixed=None, depth=2):
    pacer = StepPacer(fixed, depth)
    for group in groups:
        for record in group:
            pacer.observe(record)
    return pacer


@pytest.mark.parametrize(
    ("dispatch_ms", "step_ms", "num_steps"),
    [(0.25, 1.0, 13), (0.3, 2.5, 6), (0.3, 4.0, 1), (3.0, 12.0, 2), (30.0, 60.0, 1)],
)
def test_a_run_is_as_long_as_dispatching_is_dear_and_new_requests_can_wait(dispatch_ms, step_ms, num_steps):
    pacer = pacer_after(records(50, dispatch_ms / 1e3, step_ms / 1e3))
    assert pacer.num_steps == num_steps
    assert num_steps == 1 or num_steps * step_ms / 1e3 <= MOST_SECONDS / 2


def test_a_single_run_in_flight_may_be_twice_as_long():
    assert pacer_after(records(50, 0.003, 0.012), depth=1).num_steps == 4


def test_runs_go_on_while_they_are_what_is_measured():
    pacer = pacer_after(records(50, 0.0003, 0.0025), records(200, 0.0003, 0.0022, num_steps=6))
    assert pacer.num_steps == 7


def test_a_few_steps_and_steps_with_prompts_tell_nothing():
    assert pacer_after(records(NUM_OBSERVATIONS, 0.001, 0.002)).num_steps == 1
    assert pacer_after(records(100, 0.001, 0.002, num_tokens=5)).num_steps == 1
    assert pacer_after(records(100, 0.001, 0.002, num_unfinished=0)).num_steps == 1, "the engine was idle in between"


def test_a_pause_is_not_taken_for_a_slow_step():
    pacer = pacer_after(records(50, 0.0003, 0.0025))
    before = pacer.step_seconds
    pacer.interrupt()
    late = next(records(1, 0.0003, 0.0025))
    pacer.observe(late)
    assert pacer.step_seconds == before


def test_an_option_decides_without_measuring():
    assert pacer_after(fixed=4).num_steps == 4
    assert pacer_after(records(100, 0.001, 0.002), fixed=1).num_steps == 1
