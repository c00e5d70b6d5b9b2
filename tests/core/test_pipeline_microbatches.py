"""Steps that are computed at the same time have different requests, and nobody waits longer than others."""

import pytest

from tests.core.simulation import Engine, prompt_of

ENDLESS = {"ignore_eos": True, "stop_token_ids": []}


@pytest.mark.parametrize(("num_stages", "num_requests"), [(2, 4), (2, 5), (3, 3), (3, 8), (4, 2)])
def test_steps_in_a_row_share_nobody_and_take_turns(num_stages, num_requests):
    engine = Engine(num_stages=num_stages, depth=num_stages + 1, max_num_seqs=8, num_blocks=(99,))
    for i in range(num_requests):
        engine.add(f"r{i}", prompt_of(3, i), max_tokens=30, **ENDLESS)
    steps = []
    while len(steps) < 7 * num_stages:
        while len(engine.in_flight) <= num_stages:
            steps.append(frozenset(engine.dispatch().request_ids))
        engine.receive()
    settled = steps[2 * num_stages :]
    assert max(map(len, settled)) == -(-num_requests // num_stages)
    for i in range(len(settled) - num_stages + 1):
        together = settled[i : i + num_stages]
        assert frozenset().union(*together) == frozenset(engine.scheduler.requests)
        if num_requests >= num_stages:
            assert sum(map(len, together)) == num_requests, "somebody waits for a token on the device"
    engine.run()


def test_pieces_of_a_prompt_do_not_wait_for_the_token_of_a_lone_request_beside_them():
    engine = Engine(num_stages=2, depth=3, max_num_batched_tokens=4)
    engine.add("a", prompt_of(3), max_tokens=9, **ENDLESS)
    engine.dispatch()
    engine.add("b", prompt_of(17, 1), max_tokens=2, **ENDLESS)
    assert [engine.dispatch().request_ids for _ in range(4)] == [["a", "b"], ["b"], ["a", "b"], ["b"]]
    engine.run()


def test_prompts_need_no_turn_and_a_lone_request_is_in_every_step():
    engine = Engine(num_stages=2, depth=3, max_num_batched_tokens=4)
    engine.add("a", prompt_of(10), max_tokens=4, **ENDLESS)
    assert [engine.dispatch().num_scheduled_tokens for _ in range(3)] == [[4], [4], [2]]
    engine.run()
