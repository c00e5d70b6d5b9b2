"""Steps come before compiling, on a clock that the tests turn."""

import math
from types import SimpleNamespace

import pytest

from jaxpaged.messages import ProgramKey
from jaxpaged.worker.programs.compile_queue import (
    FIRST_MISSED_TOKENS,
    LOAD_REST_SHARE,
    LOAD_SECONDS,
    MISSED_SHARE,
    PAUSE_SECONDS,
    REST_SHARE,
    TOKEN_SECONDS,
    Activity,
    CompileQueue,
)

KEYS = [ProgramKey("forward", size) for size in (64, 2, 8, 16, 32)]


class Clock:
    seconds = 1000.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def made():
    """A queue, nothing of which is waited for, while a step is computed."""
    clock = Clock()
    activity = Activity(shares_cores=True, now=clock)
    activity.begin(1)
    return SimpleNamespace(clock=clock, activity=activity, queue=CompileQueue(KEYS, 0, 2, activity))


def prepare(made, seconds=1.0):
    """One program, which takes so long."""
    key = made.queue.take()
    made.clock.seconds += seconds
    made.queue.done(key)
    return key


def test_activity_is_quiet_from_the_end_of_the_newest_step_on(made):
    activity, clock = made.activity, made.clock
    assert Activity(shares_cores=True).quiet_seconds() == math.inf, "before the first step"
    activity.begin(2)
    activity.end(1)
    clock.seconds += 5
    assert activity.quiet_seconds() == 0, "step 2 is in flight"
    activity.end(2)
    clock.seconds += 5
    assert activity.quiet_seconds() == 5
    activity.begin(3)
    assert activity.quiet_seconds() == 0
    activity.end_all()
    assert (activity.quiet_seconds(), activity.begin(4)) == (0, None)
    elsewhere = Activity(shares_cores=False)
    elsewhere.begin(1)
    assert elsewhere.quiet_seconds() == math.inf


def test_while_steps_are_computed_a_program_that_nobody_missed_comes_after_a_rest_and_alone(made):
    assert made.queue.take() == KEYS[0]
    assert made.queue.take() is None, "one at a time"
    made.clock.seconds += 2
    made.queue.done(KEYS[0])
    assert made.queue.take() is None
    made.clock.seconds += 2 * REST_SHARE - 0.1
    assert made.queue.take() is None
    made.clock.seconds += 0.2
    assert made.queue.take() == KEYS[1]


def test_a_program_that_is_only_loaded_is_followed_by_the_next_after_as_long_as_it_took(made):
    made.queue = CompileQueue(KEYS, 0, 2, made.activity, loaded=KEYS[:2])
    prepare(made)
    assert made.queue.take() is None
    made.clock.seconds += LOAD_REST_SHARE * 1.0
    assert prepare(made) == KEYS[1]
    made.clock.seconds += LOAD_REST_SHARE * 1.0
    assert prepare(made) == KEYS[2]
    made.clock.seconds += REST_SHARE * 1.0 - 0.1
    assert made.queue.take() is None, "it was compiled"


def test_in_a_pause_there_is_no_rest(made):
    prepare(made)
    made.activity.end(1)
    assert made.queue.take() is None, "the next step may follow at once"
    made.clock.seconds += PAUSE_SECONDS
    assert [made.queue.take() for _ in range(3)] == [KEYS[1], KEYS[2], None], "one thread is left for who waits"
    made.activity.begin(2)
    made.queue.done(KEYS[1])
    assert made.queue.take() is None


def step(made, seconds, bucket, step_id=2):
    made.activity.begin(step_id)
    made.clock.seconds += seconds
    made.activity.end(step_id, bucket)


def test_a_token_of_padding_takes_what_one_of_the_largest_steps_does(made):
    activity = made.activity
    assert activity.token_seconds == TOKEN_SECONDS, "nothing was measured"
    activity.end(1)
    assert activity.token_seconds == TOKEN_SECONDS, "of no size that anybody knows"
    step(made, 0.032, bucket=8)
    assert activity.token_seconds == pytest.approx(0.004)
    made.clock.seconds += 100  # a pause is no step
    step(made, 0.128, bucket=64)
    assert activity.token_seconds == pytest.approx(0.002)
    step(made, 0.032, bucket=8)
    assert activity.token_seconds == pytest.approx(0.002), "a small step reads all weights too"


def test_what_the_host_hears_late_of_one_step_is_missing_of_the_next(made):
    activity, clock = made.activity, made.clock
    activity.end(1)
    activity.begin(2)
    activity.begin(3)
    clock.seconds += 0.25
    activity.end(2, 64)  # which ended long before
    activity.end(3, 64)
    assert activity.token_seconds == pytest.approx(0.25 / 128)


def test_what_steps_were_padded_for_most_comes_without_a_rest_once_they_lost_what_it_costs(made):
    prepare(made, seconds=2.0)
    made.activity.end(1)
    step(made, 0.256, bucket=64)
    made.activity.begin(3)
    even = MISSED_SHARE * 2.0 / 0.004  # tokens that take that share of what compiling took
    made.queue.miss(KEYS[3], even - 1)
    assert made.queue.take() is None
    made.queue.miss(KEYS[4], even + 1)
    made.queue.miss_seconds(KEYS[3], 0.012)
    assert [prepare(made, 2.0), prepare(made, 2.0)] == [KEYS[3], KEYS[4]]
    assert made.queue.take() is None


def test_a_program_that_is_only_loaded_is_missed_sooner(made):
    made.queue = CompileQueue(KEYS, 0, 2, made.activity, loaded=[KEYS[3]])
    prepare(made)
    enough = MISSED_SHARE * LOAD_SECONDS / TOKEN_SECONDS
    made.queue.miss(KEYS[1], enough + 2)
    assert made.queue.take() is None
    made.queue.miss(KEYS[3], enough + 3)
    assert made.queue.take() == KEYS[3]


def test_a_program_is_missed_by_smaller_steps_too_until_one_that_suits_them_better_is_there(made):
    """Of 64 tokens there is a program: steps of 2, 8 and 32 tokens take it."""
    assert prepare(made) == KEYS[0] == ("forward", 64)
    enough = MISSED_SHARE * 1.0 / TOKEN_SECONDS
    for size, num_steps in ((2, 3), (8, 3), (32, 2)):
        for _ in range(num_steps):
            made.queue.pad(ProgramKey("forward", size))
    made.queue.pad(ProgramKey("sample", 2))  # of another kind
    saved = {2: 3 * 62, 8: 6 * 56, 16: 6 * 48, 32: 8 * 32}
    made.queue.miss(KEYS[2], enough - saved[8] - 1)
    assert made.queue.take() is None
    made.queue.miss(KEYS[2], 1)
    assert prepare(made) == ("forward", 8)
    made.queue.miss(KEYS[1], enough - 3 * (8 - 2) - 1)  # steps of 2 take the program of 8 now
    made.queue.miss(KEYS[3], enough - 1)  # and nobody is left for the one of 16
    made.queue.miss(KEYS[4], enough - 2 * 32 - 1)
    assert made.queue.take() is None
    made.queue.miss(KEYS[1], 1)
    made.queue.miss(KEYS[4], 2)
    assert [prepare(made), prepare(made), made.queue.take()] == [("forward", 32), ("forward", 2), None]


def test_what_would_only_be_faster_does_not_begin_in_the_middle_of_an_answer_however_long_nothing_was_compiled(made):
    made.queue.clear()
    made.queue.add(faster := ProgramKey("decode", 8))
    assert made.queue.take() is None, "nothing was compiled yet, and a second is assumed"
    made.clock.seconds += REST_SHARE
    assert prepare(made, seconds=4.0) == faster
    made.clock.seconds += 1000
    made.queue.add(other := ProgramKey("decode", 2))
    assert made.queue.take() is None
    made.clock.seconds += 4 * REST_SHARE - 0.1
    assert made.queue.take() is None
    made.clock.seconds += 0.2
    assert made.queue.take() == other
    made.queue.add(faster)
    made.activity.end(1)
    made.clock.seconds += PAUSE_SECONDS
    assert made.queue.take() == faster, "in a pause it costs nobody anything"
    made.queue.add(other)
    made.activity.begin(2)
    made.queue.hurry(other)
    assert made.queue.take() == other, "somebody waits for it"


def test_who_waits_waits_for_nobody_and_nothing_else_takes_the_cores_meanwhile(made):
    assert made.queue.take() == KEYS[0]
    made.queue.hurry(KEYS[4])
    made.queue.hurry(KEYS[3])
    assert [made.queue.take(), made.queue.take()] == [KEYS[3], KEYS[4]]
    made.activity.end(1)
    made.clock.seconds += 100
    assert made.queue.take() is None
    made.queue.done(KEYS[3])
    made.queue.done(KEYS[4])
    assert made.queue.take() == KEYS[1]


def test_the_first_programs_are_waited_for_from_the_beginning_one_of_each_kind_at_a_time(made):
    sample = ProgramKey("sample", 2)
    queue = CompileQueue([KEYS[0], sample, *KEYS[1:]], 3, 2, made.activity)
    assert [queue.take() for _ in range(3)] == [KEYS[0], sample, None]
    queue.done(sample)
    assert queue.take() is None, "a step can take the one that is nearly there"
    made.clock.seconds += 1  # so others rest
    queue.done(KEYS[0])
    queue.miss(KEYS[1], FIRST_MISSED_TOKENS - 1)
    assert queue.take() is None, "steps may be of another size"
    queue.miss(KEYS[1], 1)
    assert [queue.take(), queue.take()] == [KEYS[1], None]


def test_a_row_that_samples_counts_as_its_share_of_a_token_and_a_kind_costs_what_its_last_one_did(made):
    samples = [ProgramKey("sample", size) for size in (64, 4)]
    queue = CompileQueue([*samples, *KEYS], 0, 2, made.activity, row_shares={"sample": 0.25})
    for key, seconds in ((samples[0], 2.0), (KEYS[0], 1.0)):
        queue.hurry(key)
        assert queue.take() == key
        made.clock.seconds += seconds
        queue.done(key)
    lost = MISSED_SHARE * 2.0 / made.activity.token_seconds  # tokens
    for _ in range(math.ceil(lost / (60 * 0.25)) - 1):
        queue.pad(samples[1])
    assert queue.take() is None
    queue.pad(samples[1])
    assert queue.take() == samples[1]


def test_what_the_first_steps_are_padded_for_goes_in_place_of_the_first_for_a_single_request(made):
    queue = CompileQueue([*KEYS, larger := ProgramKey("forward", 512)], 2, 2, made.activity)
    assert queue.take() == KEYS[0]
    queue.miss(larger, FIRST_MISSED_TOKENS + 1)  # a prompt was cut into steps
    queue.done(KEYS[0])
    queue.miss(KEYS[1], 100)
    queue.miss(KEYS[2], FIRST_MISSED_TOKENS)
    assert [queue.take(), queue.take()] == [KEYS[2], None]
    made.clock.seconds += 1
    queue.done(KEYS[2])
    assert queue.take() is None, "the other is one of many now"


def test_a_first_program_that_is_larger_than_those_there_are_is_waited_for(made):
    queue = CompileQueue([ProgramKey("forward", 8), larger := ProgramKey("forward", 16)], 2, 2, made.activity)
    queue.done(queue.take())
    assert queue.take() == larger, "steps are cut for want of it"


def test_before_any_step_all_first_programs_are_prepared(made):
    made.activity.end(1)
    queue = CompileQueue(KEYS, 2, 2, made.activity)
    assert [queue.take(), queue.take()] == [KEYS[0], None]
    queue.done(KEYS[0])
    made.clock.seconds += 0.1
    assert queue.take() == KEYS[1]


def test_a_first_program_for_which_somebody_stands_still_does_not_wait_for_another(made):
    queue = CompileQueue(KEYS, 2, 2, made.activity)
    assert [queue.take(), queue.take()] == [KEYS[0], None]
    queue.hurry(KEYS[1])
    assert queue.take() == KEYS[1]


def test_where_steps_are_computed_elsewhere_everything_is_prepared_at_once():
    activity = Activity(shares_cores=False)
    activity.begin(1)
    queue = CompileQueue(KEYS, 1, 3, activity)
    assert [queue.take() for _ in range(5)] == [*KEYS[:4], None]
    queue.add(late := ProgramKey("decode", 8))
    queue.done(KEYS[1])
    assert queue.take() == late, "somebody would use it at once"


def test_a_queue_of_nothing_gives_nothing(made):
    made.queue.clear()
    assert (bool(made.queue), made.queue.take()) == (False, None)
