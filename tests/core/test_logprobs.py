"""Log probabilities: cut to what was asked for, collected over chunks, sent once."""

import numpy as np
import pytest

from jaxpaged.errors import EngineError
from jaxpaged.messages import PromptLogprobs, SampledLogprobs, TokenLogprobs
from tests.core.simulation import Engine, prompt_of

ENDLESS = {"ignore_eos": True, "stop_token_ids": []}


def lines_of(first: int, num_lines: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids, log probabilities and ranks that tell their line and column."""
    token_ids = 100 * np.arange(first, first + num_lines)[:, None] + np.arange(width)
    return token_ids.astype(np.int32), (-token_ids / 8).astype(np.float32), np.arange(first, first + num_lines)


def expected_line(line: int, width: int) -> TokenLogprobs:
    ids = [100 * line + column for column in range(width)]
    return TokenLogprobs(ids, [-i / 8 for i in ids], line)


def dispatch_with_logprobs(engine: Engine, width: int) -> None:
    """A step of a runner that reports `width - 1` candidates for samples and prompts."""
    scheduled = engine.dispatch()
    _, output = engine.in_flight[-1]
    if output.request_ids:
        output.logprobs = SampledLogprobs(*lines_of(0, len(output.request_ids), width))
    for request_id, computed, n in zip(
        scheduled.request_ids, scheduled.num_computed_tokens, scheduled.num_scheduled_tokens
    ):
        end = min(computed + n, len(engine.requests[request_id].prompt_token_ids) - 1)
        if engine.requests[request_id].sampling_params.prompt_logprobs is not None and computed < end:
            chunk = PromptLogprobs(computed + 1, *lines_of(computed + 1, end - computed, width))
            output.prompt_logprobs = {**output.prompt_logprobs, request_id: chunk}


def run(engine: Engine, width: int = 6) -> dict[str, list]:
    """All outputs with tokens, by request."""
    outputs: dict[str, list] = {}
    while engine.scheduler.has_unfinished_requests():
        while len(engine.in_flight) < engine.depth:
            dispatch_with_logprobs(engine, width)
        for output in engine.receive():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def test_every_request_gets_as_many_candidates_as_it_asked_for():
    engine = Engine()
    for i, k in enumerate((None, 0, 2, 5, -1)[:4]):
        engine.add(f"r{i}", prompt_of(3, i), max_tokens=1, logprobs=k)
    outputs = run(engine)
    assert outputs["r0"][0].new_logprobs is None
    for i, width in ((1, 1), (2, 3), (3, 6)):
        assert outputs[f"r{i}"][0].new_logprobs == [expected_line(i, width)]


def test_minus_one_means_all_candidates():
    engine = Engine()
    engine.add("a", prompt_of(3), max_tokens=1, logprobs=-1)
    assert run(engine, width=9)["a"][0].new_logprobs == [expected_line(0, 9)]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [3, 4, 24])
def test_prompt_logprobs_come_once_and_whole_with_the_first_token(budget, depth):
    engine = Engine(max_num_batched_tokens=max(budget, 4), long_prefill_token_threshold=0, depth=depth)
    engine.add("a", prompt_of(10), max_tokens=3, prompt_logprobs=2, **ENDLESS)
    first, *others = run(engine)["a"]
    assert first.prompt_logprobs == [expected_line(i, 3) for i in range(1, 10)]
    assert all(output.prompt_logprobs is None for output in others)
    assert first.new_logprobs is None


def test_a_prompt_of_one_token_has_an_empty_list():
    engine = Engine()
    engine.add("a", prompt_of(1), max_tokens=1, prompt_logprobs=2)
    assert run(engine)["a"][0].prompt_logprobs == []


def test_a_request_preempted_in_its_prompt_has_every_line_once():
    engine = Engine(num_blocks=8, max_num_batched_tokens=5, depth=2)
    engine.add("a", prompt_of(7), max_tokens=18, **ENDLESS)
    for _ in range(3):
        dispatch_with_logprobs(engine, 4)
        engine.receive()
    engine.add("b", prompt_of(12, 1), max_tokens=2, prompt_logprobs=1)
    while not engine.scheduler.requests["b"].num_computed_tokens:
        dispatch_with_logprobs(engine, 4)
        engine.receive()
    engine.scheduler.ranks[0]._preempt(engine.scheduler.requests["b"])
    outputs = run(engine, width=4)["b"]
    assert outputs[0].prompt_logprobs == [expected_line(i, 2) for i in range(1, 12)]
    assert outputs[-1].num_preemptions >= 1


def test_missing_logprobs_break_an_invariant():
    engine = Engine()
    engine.add("a", prompt_of(3), logprobs=1)
    engine.dispatch()
    with pytest.raises(EngineError, match="'a' asks for 1 logprobs, but the output of step 1 has none"):
        engine.receive()


def test_a_gap_in_prompt_logprobs_breaks_an_invariant():
    engine = Engine()
    engine.add("a", prompt_of(8), prompt_logprobs=1)
    engine.dispatch()
    engine.in_flight[0][1].prompt_logprobs = {"a": PromptLogprobs(3, *lines_of(3, 5, 2))}
    with pytest.raises(EngineError, match="go on at token 3, but only 0 lines came before"):
        engine.receive()
