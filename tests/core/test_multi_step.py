"""Runs of decode steps in the scheduler: when there is one, what it takes, and what becomes of its tokens."""

import random
from types import SimpleNamespace

import pytest

from jaxpaged.messages import ModelRunnerOutput
from tests.core.simulation import BLOCK_SIZE, STOP, Engine, next_token, prompt_of


def engine_of(*prompts, max_tokens=20, depth=1, **options):
    """An engine whose requests have been admitted, with their first tokens sampled and nothing in flight."""
    engine = Engine(**options)
    for i, prompt in enumerate(prompts):
        engine.add(f"r{i}", prompt, max_tokens=max_tokens, ignore_eos=True, stop_token_ids=[])
    engine.step()
    engine.max_steps, engine.depth = 6, depth
    return engine


def answer(scheduled, *runs, **fields):
    return ModelRunnerOutput(scheduled.step_id, list(scheduled.request_ids), list(runs), **fields)


def test_a_run_has_slots_and_placeholders_for_all_its_tokens():
    engine = engine_of(prompt_of(3), prompt_of(5))
    scheduled = engine.scheduler.schedule(6)
    assert (scheduled.num_steps, scheduled.num_scheduled_tokens) == (6, [6, 6])
    assert scheduled.total_num_scheduled_tokens == 12
    assert scheduled.num_computed_tokens == [3, 5]
    for request, tokens in zip(engine.scheduler.running, (3, 5)):
        assert request.num_output_placeholders == 6
        assert len(request.blocks[0]) == -(-(tokens + 6) // BLOCK_SIZE)


def test_a_request_computes_no_more_than_it_may():
    engine = engine_of(prompt_of(3), prompt_of(5), max_tokens=20)
    engine.scheduler.running[0].max_total_tokens = 3 + 4
    scheduled = engine.scheduler.schedule(6)
    assert (scheduled.num_steps, scheduled.num_scheduled_tokens) == (6, [3, 6])
    engine.scheduler.running[1].max_total_tokens = 5 + 7
    assert engine.scheduler.schedule(6).request_ids == [], "all that they may have is being sampled"


def test_the_last_token_of_all_is_a_single_step():
    engine = engine_of(prompt_of(3), max_tokens=2)
    scheduled = engine.scheduler.schedule(6)
    assert (scheduled.num_steps, scheduled.num_scheduled_tokens) == (1, [1])


def test_there_is_no_run_while_somebody_waits_or_computes_a_prompt():
    engine = engine_of(prompt_of(3))
    engine.add("late", prompt_of(30))
    assert engine.dispatch().num_steps == 1, "it was waiting"
    assert engine.dispatch().num_steps == 1, "its prompt was being computed"
    engine.receive(), engine.receive(), engine.step()
    assert engine.dispatch().num_steps == 6


def test_a_run_that_lacks_blocks_is_a_single_step_and_preempts_nobody():
    engine = engine_of(prompt_of(7, 1), prompt_of(7, 2), num_blocks=1 + 4, max_tokens=8)
    scheduled = engine.dispatch()
    assert (scheduled.num_steps, scheduled.num_scheduled_tokens) == (1, [1, 1])
    assert engine.scheduler.make_stats().num_preemptions == 0
    engine.run()


@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_behind_a_stop_token_are_dropped(depth):
    engine = engine_of(prompt_of(3), depth=depth)
    scheduled = [engine.scheduler.schedule(6) for _ in range(depth)]
    request = engine.scheduler.running[0]
    request.stop_ids = frozenset([STOP])
    (output,) = engine.scheduler.update_from_output(scheduled[0], answer(scheduled[0], [5, 6, STOP, 8, 9]))
    assert (output.new_token_ids, output.finish_reason, output.stop_reason) == ([5, 6, STOP], "stop", STOP)
    assert not engine.scheduler.has_unfinished_requests()
    for later in scheduled[1:]:
        assert engine.scheduler.update_from_output(later, answer(later, [])) == []
    engine.check_idle()


def test_a_stop_token_that_was_not_computed_is_not_found_in_the_prefix_cache():
    prompt = prompt_of(5)
    engine = engine_of(prompt)
    first = engine.tokens["r0"]
    scheduled = engine.scheduler.schedule(6)
    engine.scheduler.running[0].stop_ids = frozenset([STOP])
    tokens = [5, STOP]  # with the first one they fill the second block
    engine.scheduler.update_from_output(scheduled, answer(scheduled, tokens))
    engine.add("again", [*prompt, *first, *tokens, 7])
    assert engine.scheduler.schedule().new_requests[0].num_computed_tokens == BLOCK_SIZE


def test_a_run_that_fails_half_way_hands_out_what_came_before():
    engine = engine_of(prompt_of(3), prompt_of(5))
    scheduled = engine.scheduler.schedule(6)
    outputs = engine.scheduler.update_from_output(
        scheduled, answer(scheduled, [5, 6], [7] * 6, failed={"r0": "logits are not numbers"})
    )
    assert [(o.request_id, o.new_token_ids, o.finish_reason) for o in outputs] == [
        ("r0", [5, 6], "error"),
        ("r1", [7] * 6, None),
    ]
    assert outputs[0].error == "logits are not numbers"
    engine.scheduler.check_integrity()


def test_runs_are_given_up_while_a_failed_step_is_revoked():
    engine = engine_of(prompt_of(3))
    scheduled = engine.scheduler.schedule(6)
    (output,) = engine.scheduler.fail_requests(scheduled, "on fire")
    assert output.finish_reason == "error"
    engine.check_idle()


def test_a_client_that_leaves_during_a_run_gets_nothing_more():
    engine = engine_of(prompt_of(3), prompt_of(5), depth=2)
    engine.dispatch()
    engine.abort("r0")
    engine.run()
    assert engine.ends["r0"].finish_reason == "abort"
    assert engine.tokens["r0"] == [next_token(prompt_of(3))]


def test_a_request_that_follows_a_grammar_makes_every_step_a_single_one():
    """Its masks come from the host, one step at a time."""
    engine = engine_of(prompt_of(5), prompt_of(6, 1))
    assert engine.dispatch().num_steps == 6
    engine.receive()
    engine.scheduler.requests["r1"].matcher = SimpleNamespace(num_free=lambda num_unknown: 0)
    assert engine.dispatch().num_steps == 1


def test_what_a_run_could_have_given_and_did_not_is_taken_back():
    engine = engine_of(prompt_of(3), prompt_of(5))
    first, second = engine.scheduler.schedule(6), engine.scheduler.schedule(6)
    assert second.num_computed_tokens == [9, 11]
    assert engine.scheduler.update_from_output(first, answer(first, [7, 8], [7] * 6))[0].new_token_ids == [7, 8]
    one, other = engine.scheduler.running
    assert (one.num_computed_tokens, one.num_output_placeholders, one.num_tokens) == (3 + 2 + 6, 6, 3 + 1 + 2)
    assert (other.num_computed_tokens, other.num_output_placeholders) == (5 + 12, 6)
    engine.scheduler.update_from_output(second, answer(second, [9], [9] * 6))
    assert (one.num_computed_tokens, one.num_output_placeholders, one.num_tokens) == (3 + 3, 0, 3 + 1 + 3)
    assert engine.scheduler.schedule(6).num_computed_tokens == [6, 17]
    engine.scheduler.check_integrity()


def test_a_preempted_request_waits_for_no_token_that_did_not_come():
    engine = engine_of(prompt_of(3))
    scheduled = engine.scheduler.schedule(6)
    engine.scheduler.preempt_all()
    engine.scheduler.update_from_output(scheduled, answer(scheduled, [7, 8]))
    (request,) = engine.scheduler.waiting
    assert (request.num_computed_tokens, request.num_output_placeholders) == (0, 0)
    assert engine.scheduler.schedule().new_requests[0].token_ids == [*request.all_token_ids]


def test_a_block_leaves_a_window_when_no_count_that_may_come_back_can_need_it():
    """The window of 4 tokens slides over a block in a run; what if that gives one token, and not six?"""
    engine = engine_of(prompt_of(8), windows=(4,))
    engine.scheduler.schedule(6), engine.scheduler.schedule(6)
    (request,), null = engine.scheduler.running, engine.scheduler.kv_cache_manager.pools[0].null_block
    assert request.num_computed_tokens == 8 + 12 and request.num_confirmed_tokens == 8
    assert [block is null for block in request.blocks[0][:4]] == [True, False, False, False], "it may be at position 8"


@pytest.mark.parametrize("windows", [(None,), (5,), (None, 6)], ids=str)
@pytest.mark.parametrize("depth", [1, 3])
def test_answers_are_right_whatever_part_of_its_tokens_a_run_gives(windows, depth):
    engine = Engine(windows=windows, depth=depth, max_steps=7, stingy=random.Random(1), num_blocks=100)
    for i in range(4):
        engine.add(f"r{i}", prompt_of(3 + i, i % 2), max_tokens=30, ignore_eos=True, stop_token_ids=[])
    engine.run()
    assert engine.num_runs > 30 // 7 + 1, "every run gave all that it could"
    assert {len(tokens) for tokens in engine.tokens.values()} == {30}
