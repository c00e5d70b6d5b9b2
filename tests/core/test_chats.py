"""Chats of several turns: a prompt is all that was said before, stop tokens included, and most of it is cached."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.simulation import BLOCK_SIZE, EOS, STOP, Engine, prompt_of
from tests.core.test_scheduler_machine import WINDOWS

STOPS = [[STOP, 8, 14, 20, 26], [STOP, EOS, 5], [], [STOP, EOS, 9, 19, 29]]
"""What the device is told to stop at. The scheduler ends a request at EOS too, which the device then goes past."""


class Chat:
    """What was said so far. The next request asks for an answer to all of it."""

    def __init__(self, name: str, stop_token_ids: list[int]):
        self.name, self.stop_token_ids = name, stop_token_ids
        self.said: list[int] = []
        self.num_turns = 0
        self.request_id = ""

    def ask(self, engine: Engine, message: list[int], max_tokens: int) -> None:
        self.said += engine.tokens.get(self.request_id, [])
        self.said += message
        self.request_id = f"{self.name}.{self.num_turns}"
        self.num_turns += 1
        engine.add(self.request_id, list(self.said), max_tokens=max_tokens, stop_token_ids=self.stop_token_ids)


def talk(engine: Engine, chats: list[Chat], draw: random.Random, num_turns: int, lengths: list[int]) -> None:
    """Every chat goes on some time after it was answered; dispatches are as long as `lengths` say."""
    rounds = itertools.cycle(lengths)
    while any(chat.num_turns < num_turns or chat.request_id in engine.scheduler.requests for chat in chats):
        for chat in chats:
            if draw.random() < 0.02:
                engine.abort(chat.request_id)
            if chat.num_turns < num_turns and chat.request_id not in engine.scheduler.requests and draw.random() < 0.3:
                message = draw.choices([STOP, EOS, 3, 4, 5], k=draw.randint(1, 5))
                chat.ask(engine, message, draw.randint(2, 24))
        while len(engine.in_flight) < engine.depth:
            engine.max_steps = next(rounds)
            engine.dispatch()
        engine.receive()
    engine.run()


def engine_for_chats(windows: tuple[int | None, ...], depth: int, num_blocks: int = 200, **options) -> Engine:
    options = {"max_num_batched_tokens": 64, "max_model_len": 240, **options}
    return Engine(windows=windows, num_blocks=num_blocks, depth=depth, **options)


@given(
    windows=st.sampled_from(WINDOWS),
    depth=st.integers(1, 3),
    lengths=st.lists(st.sampled_from([1, 2, 3, 9]), min_size=1, max_size=8),
    num_chats=st.integers(1, 4),
    stingy=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_an_answer_is_right_after_any_mix_of_single_steps_and_runs(windows, depth, lengths, num_chats, stingy, seed):
    draw = random.Random(seed)
    engine = engine_for_chats(windows, depth, stingy=random.Random(seed) if stingy else None)
    chats = [Chat(f"c{i}", draw.choice(STOPS)) for i in range(num_chats)]
    talk(engine, chats, draw, 5, lengths)
    assert all(chat.num_turns == 5 for chat in chats) and len(engine.ends) == 5 * num_chats
    engine.check_answers()


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_chats_go_on_from_what_is_cached_of_them(windows, depth):
    draw = random.Random(f"{windows} {depth}")
    engine = engine_for_chats(windows, depth)
    chats = [Chat(f"c{i}", STOPS[i]) for i in range(4)]
    talk(engine, chats, draw, 12, draw.choices([1, 1, 1, 2, 8], k=97))
    ends = [
        len(engine.requests[request_id].prompt_token_ids) + len(engine.tokens[request_id])
        for request_id, end in engine.ends.items()
        if end.finish_reason == "stop"
    ]
    assert sum(num_tokens % BLOCK_SIZE == 0 for num_tokens in ends) > 1, "no stop token completes a block"
    stats = engine.scheduler.make_stats()
    assert stats.prefix_cache_hits > stats.prefix_cache_queries / 3, "hardly anything is found in the cache"
    assert engine.num_runs > 10, "hardly any runs"


@pytest.mark.parametrize("length", [1, 6])
def test_a_stop_token_that_completes_a_block_is_computed_again(length):
    """A single step draws it. What is in flight then is another single step, which computes it, or a run, which does
    not: it is not found in the cache either way."""
    engine = Engine(max_num_batched_tokens=24, depth=2)
    prompt = prompt_of(6)
    engine.add("first", prompt, ignore_eos=True, stop_token_ids=[])
    engine.run()
    first, second, *_ = engine.tokens["first"]
    assert first != second
    engine.scheduler.reset_prefix_cache()
    engine.add("again", prompt, ignore_eos=True, stop_token_ids=[second])
    for max_steps in (1, 1, length):
        engine.max_steps = max_steps
        engine.dispatch()
        if len(engine.in_flight) == 2:
            engine.receive()
    engine.run()
    assert engine.tokens["again"] == [first, second]
    engine.add("next", [*prompt, first, second, 7])
    assert engine.dispatch().new_requests[0].num_computed_tokens == BLOCK_SIZE
    engine.run()
