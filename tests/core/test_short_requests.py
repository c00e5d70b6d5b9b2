"""Rows that are kept for short requests: a bound on their wait under overload, and nothing where there is none."""

import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.core.request_queue import SHORT_ANSWER
from tests.core.simulation import Engine, prompt_of

ENDLESS = {"ignore_eos": True, "stop_token_ids": []}
ROWS = 4


def overloaded(num_streams=12, kept=1, **options):
    """An engine in which streams of 40 tokens wait for rows."""
    engine = Engine(
        num_blocks=400,
        max_num_seqs=ROWS,
        max_model_len=64,
        num_short_request_rows=kept,
        **{"max_num_batched_tokens": 32, **options},
    )
    for number in range(num_streams):
        stream(engine, number)
    return engine


def stream(engine, number, **options):
    engine.add(f"stream{number}", prompt_of(6, number + 1), float(number), max_tokens=40, **ENDLESS, **options)


def short(engine, name, length=5, max_tokens=1, **options):
    prompt = prompt_of(length, zlib.crc32(name.encode()) % 1000 + 100)
    engine.add(name, prompt, 99.0, max_tokens=max_tokens, **ENDLESS, **options)


def steps_until(engine, *names):
    for number in range(1, 1000):
        engine.step()
        if engine.ends.keys() >= set(names):
            return number
    raise AssertionError("they do not end")


def running(engine):
    return [request.request_id for request in engine.scheduler.running]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_short_request_behind_many_streams_has_its_token_in_the_next_step(policy):
    """Before, it waited for three times the length of a stream."""
    engine = overloaded(scheduling_policy=policy)
    for _ in range(5):
        engine.step()
    assert len(running(engine)) == ROWS - 1
    short(engine, "short")
    assert steps_until(engine, "short") == 1
    without = overloaded(kept=0, scheduling_policy=policy)
    without.step()
    short(without, "short")
    assert steps_until(without, "short") > 80
    engine.run()


def test_one_that_comes_before_a_row_is_kept_has_the_next_that_is_free():
    engine = overloaded(num_streams=ROWS)
    engine.step()
    assert len(running(engine)) == ROWS, "all that wait can run, so no row is kept"
    for number in range(ROWS, 12):
        stream(engine, number)
    short(engine, "short")
    assert steps_until(engine, "stream0") < steps_until(engine, "short") + 41
    assert not any(name in engine.ends for name in ("stream4", "stream5"))
    engine.run()


@pytest.mark.parametrize("num_streams", [1, ROWS - 1, ROWS])
def test_nothing_is_kept_while_all_that_wait_can_run(num_streams):
    engine = overloaded(num_streams)
    engine.step()
    assert len(running(engine)) == num_streams
    engine.run()


def test_the_last_streams_have_all_rows():
    engine = overloaded(num_streams=2 * ROWS - 1)
    most = 0
    while engine.scheduler.has_unfinished_requests():
        engine.step()
        most = max(most, len(running(engine)))
    assert most == ROWS


def test_a_flood_of_short_ones_takes_no_more_rows_than_are_kept():
    engine = overloaded(kept=1)
    for number in range(60):
        short(engine, f"short{number}")
    for _ in range(30):
        engine.step()
        assert sum(name.startswith("stream") for name in running(engine)) >= ROWS - 1
    assert 25 <= len(engine.ends) <= 30, "one in every step"
    engine.run()


def test_short_ones_alone_have_all_rows():
    engine = Engine(num_blocks=400, max_num_seqs=ROWS, num_short_request_rows=1, max_num_batched_tokens=32)
    for number in range(12):
        short(engine, f"short{number}")
    engine.step()
    assert len(engine.ends) == ROWS
    engine.run()


@pytest.mark.parametrize(
    ("length", "max_tokens", "is_short"),
    [
        (16, SHORT_ANSWER, True),
        (17, 1, False),
        (5, SHORT_ANSWER + 1, False),
        (1, 1, True),
    ],
)
def test_short_is_a_short_answer_to_a_prompt_that_half_a_step_has_room_for(length, max_tokens, is_short):
    engine = overloaded()
    engine.step()
    short(engine, "asked", length, max_tokens)
    engine.step()
    assert ("asked" in running(engine) or "asked" in engine.ends) == is_short
    engine.run()


def test_its_prompt_goes_first_in_half_of_a_step():
    """Though it is not half as long as that of the oldest, and the youngest."""
    engine = Engine(num_blocks=400, max_num_seqs=8, max_model_len=64, num_short_request_rows=2)
    for number in range(12):
        engine.add(f"stream{number}", prompt_of(10, number + 1), float(number), max_tokens=40, **ENDLESS)
    short(engine, "short", 8)
    engine.step()
    assert "short" in engine.ends
    engine.run()


def test_a_less_important_one_does_not_go_before_a_more_important_one():
    engine = overloaded(scheduling_policy="priority")
    engine.step()
    short(engine, "less", priority=1)
    short(engine, "same")
    assert steps_until(engine, "same") == 1
    assert "less" not in engine.ends
    engine.run()


def test_one_that_is_aborted_or_preempted_leaves_its_row():
    engine = overloaded()
    engine.step()
    short(engine, "a", max_tokens=SHORT_ANSWER)
    engine.step()
    assert "a" in running(engine)
    short(engine, "b")
    engine.step()
    assert "b" not in engine.ends, "the row is taken"
    engine.abort("a")
    assert steps_until(engine, "b") == 1
    short(engine, "c", max_tokens=SHORT_ANSWER)
    engine.step()
    engine.lose_everything()
    assert steps_until(engine, "c") <= SHORT_ANSWER + 1
    engine.run()


@given(st.integers(0, 10**6), st.integers(1, 3), st.sampled_from(["fcfs", "priority"]), st.integers(12, 60))
def test_everybody_is_served_with_the_right_tokens_whoever_goes_first(seed, kept, policy, num_blocks):
    draw = random.Random(seed)
    engine = Engine(
        num_blocks=num_blocks, max_num_seqs=ROWS, num_short_request_rows=kept, scheduling_policy=policy, depth=2
    )
    for number in range(25):
        engine.add(
            f"r{number}",
            prompt_of(draw.randint(1, 20), draw.randint(0, 9)),
            float(number),
            max_tokens=draw.choice([1, 3, 24]),
            priority=draw.randint(0, 1) if policy == "priority" else 0,
        )
        for _ in range(draw.randint(0, 3)):
            engine.step()
        if draw.random() < 0.1:
            engine.abort(f"r{draw.randint(0, number)}")
    engine.run()
    assert len(engine.ends) == 25
    engine.check_answers()


def test_short_requests_that_ended_are_forgotten_though_nobody_ever_waits():
    engine = overloaded(num_streams=0)
    for number in range(20):
        short(engine, f"short{number}")
        steps_until(engine, f"short{number}")
    assert len(engine.scheduler.ranks[0].waiting._left) <= 1
