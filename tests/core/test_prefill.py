"""How prompts share a step: the short ones soon, the long ones in at most twice the steps, and a lone one all of it."""

from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.core.prefill import Prefill, divide_budget
from jaxpaged.core.request import Request
from jaxpaged.messages import EngineCoreRequest
from jaxpaged.sampling_params import SamplingParams
from tests.core.simulation import Engine, prompt_of

ENDLESS = {"ignore_eos": True, "stop_token_ids": []}
LONG = 64
"""Tokens of a prompt, of which a step computes 16."""


def prefills_of(lengths, priorities=None) -> list[Prefill]:
    def request(number):
        priority = priorities[number] if priorities else 0
        message = EngineCoreRequest(str(number), [1], SamplingParams(seed=0, max_tokens=1), 0.0, priority=priority)
        return Request(message, 10, number, 1)

    return [Prefill(request(i), num_tokens, num_tokens) for i, num_tokens in enumerate(lengths)]


def crowd(num_long: int, **options) -> Engine:
    """Prompts of `LONG` tokens that have nothing in common."""
    engine = Engine(num_blocks=400, max_num_seqs=8, max_model_len=2 * LONG, **options)
    for i in range(num_long):
        engine.add(f"long{i}", prompt_of(LONG, i + 1), float(i), max_tokens=1)
    return engine


def steps_until(engine: Engine, *request_ids: str, each_step=lambda: None) -> int:
    for num_steps in range(1, 200):
        each_step()
        engine.step()
        if all(request_id in engine.ends for request_id in request_ids):
            return num_steps
    raise AssertionError("they do not end")


@given(st.lists(st.integers(1, 40), max_size=8), st.integers(1, 60))
def test_nothing_is_wasted_the_oldest_has_half_and_nobody_more_than_it_lacks(lengths, budget):
    claims = prefills_of(lengths)
    grants = divide_budget(claims, budget)
    assert sum(grants) == min(budget, sum(lengths))
    assert all(0 <= grant <= length for grant, length in zip(grants, lengths))
    if claims:
        assert grants[0] >= min(lengths[0], budget - budget // 2)


def test_the_order_is_that_of_age_among_those_of_about_the_same_length():
    assert divide_budget(prefills_of([30, 30, 16]), 20) == [20, 0, 0]
    assert divide_budget(prefills_of([12, 30, 7]), 20) == [12, 8, 0]


def test_the_shortest_go_first_in_half_of_the_step():
    assert divide_budget(prefills_of([30, 15, 4, 3]), 20) == [10, 3, 4, 3]


def test_nobody_goes_before_a_more_important_request():
    assert divide_budget(prefills_of([30, 4, 4], priorities=[0, 1, 0]), 20) == [16, 0, 4]


def test_a_short_prompt_behind_long_ones_has_its_first_token_after_a_step():
    engine = crowd(6)
    engine.step()
    engine.add("short", prompt_of(5), max_tokens=1)
    assert steps_until(engine, "short") == 1
    engine.run()


def test_a_prompt_alone_has_the_whole_step_and_equal_ones_come_one_after_the_other():
    engine = crowd(2)
    assert steps_until(engine, "long0") == 4
    assert steps_until(engine, "long1") == 4


def test_long_prompts_end_in_twice_the_steps_however_many_short_ones_come():
    engine, names = crowd(2), iter(range(1000))

    def another():
        for _ in range(2):
            engine.add(f"short{(i := next(names))}", prompt_of(7, i % 40), max_tokens=1, skip_reading_prefix_cache=True)

    assert steps_until(engine, "long0", "long1", each_step=another) <= 2 * 8
    engine.run()


@given(st.lists(st.tuples(st.integers(1, LONG), st.integers(0, 2)), min_size=1, max_size=12))
def test_nobody_waits_longer_than_for_twice_what_came_before(arrivals):
    engine = Engine(num_blocks=400, max_num_seqs=12, max_model_len=2 * LONG)
    latest, num_before, num_steps = {}, 0, 0
    for i, (length, pause) in enumerate(arrivals):
        engine.add(f"r{i}", prompt_of(length, i), float(i), max_tokens=1, skip_reading_prefix_cache=True)
        num_before += length
        latest[f"r{i}"] = num_steps + -(-num_before // 8)
        for _ in range(pause):
            engine.step()
            num_steps += 1
            assert not {name for name, end in latest.items() if end <= num_steps} - engine.ends.keys()
    while engine.scheduler.has_unfinished_requests():
        engine.step()
        num_steps += 1
        assert not {name for name, end in latest.items() if end <= num_steps} - engine.ends.keys()


def test_those_who_went_before_others_are_younger_than_they_ever_after():
    engine = crowd(2)
    engine.step()
    for name, length in (("a", 20), ("b", 8), ("c", 8), ("d", 8)):
        engine.add(name, prompt_of(length, length + ord(name)), 9.0, max_tokens=1)
        engine.step()
    assert {"a", "long0"} <= {request.request_id for request in engine.scheduler.running}, "both lack tokens"
    assert steps_until(engine, "long0") == 1
    scheduled = engine.dispatch()
    assert dict(zip(scheduled.request_ids, scheduled.num_scheduled_tokens)) == {"long1": 8, "a": 8}


def test_who_decodes_has_a_token_in_every_step_whoever_is_older():
    engine = crowd(3)
    engine.step()
    engine.add("short", prompt_of(5), max_tokens=20, **ENDLESS)
    assert steps_until(engine, "short") == 20
    engine.run()


def test_who_shares_a_prompt_with_an_older_one_waits_for_it_and_lets_others_pass():
    engine = crowd(1)
    engine.add("same", [*prompt_of(LONG - 34, 1), 5], 1.0, max_tokens=1)  # short enough to go first
    engine.add("other", prompt_of(LONG, 9), 2.0, max_tokens=1)
    engine.add("short", prompt_of(5), 3.0, max_tokens=1)
    assert engine.dispatch().request_ids == ["long0", "short"]
    engine.run()
    assert engine.ends["same"].num_cached_tokens >= 28


def test_who_goes_before_others_takes_no_block_that_they_need():
    engine = Engine(num_blocks=25, max_num_seqs=8, max_model_len=2 * LONG)
    for i in range(2):  # 16 of 24 blocks each
        engine.add(f"long{i}", prompt_of(LONG, i + 1), float(i), max_tokens=1)
    engine.add("short", prompt_of(5), 2.0, max_tokens=1)
    for _ in range(4):
        assert engine.dispatch().request_ids == ["long0"]
    engine.run()
