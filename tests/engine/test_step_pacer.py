"""When runs of decode steps are worth it, and how long they are."""

import pytest

from jaxpaged.engine.step_pacer import MOST_SECONDS, NUM_OBSERVATIONS, StepPacer
from jaxpaged.messages import StepRecord


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
