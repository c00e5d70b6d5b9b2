"""Answers have the shape that was asked for, whatever else is going on in the engine."""

import dataclasses
import json
import math
import re
from types import MappingProxyType

import pytest

from jaxpaged import LLM, SamplingParams
from jaxpaged.core.grammar.matcher import Grammars
from jaxpaged.engine.core import EngineCore
from jaxpaged.errors import RequestError
from tests.end_to_end.conftest import OPTIONS
from tests.end_to_end.test_answers import CLOSE, draws_by_seed

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
CHOICES = ["yes", "no", "perhaps not"]


def is_person(text):
    value = json.loads(text)
    return list(value) == ["name", "age", "tags"] and len(value["name"]) <= 6 and set(value["tags"]) <= {"a", "bc"}


SHAPES = [
    ({"json": SCHEMA}, is_person),
    ({"json": json.dumps(SCHEMA), "disable_any_whitespace": True}, is_person),
    ({"regex": "[ab]{3,6}-[0-9]{2}"}, re.compile("[ab]{3,6}-[0-9]{2}").fullmatch),
    ({"choice": CHOICES}, CHOICES.__contains__),
    ({"grammar": 'start: "(" start ")" | "x"{1,3}'}, re.compile(r"(\()*x{1,3}(\))*").fullmatch),
]


def params_for(shape, seed, **options):
    return SamplingParams(**{"max_tokens": 150, "seed": seed, "structured_outputs": shape, **options})


def test_every_answer_has_its_shape_and_plain_requests_beside_it_are_not_changed(llm):
    recompiles = llm.llm_engine.executor_stats()["recompiles"]  # the session's engine counts what other files compile
    plain = SamplingParams(max_tokens=12, seed=5, temperature=1.0, top_k=5, logprobs=5)
    shapes = [shape for shape in SHAPES for _ in range(3)]
    variants = [{}, {"temperature": 0.0}, {"logprobs": 2, "repetition_penalty": 1.3, "top_k": 20}]
    params = [params_for(shape, seed, **variants[seed % 3]) for seed, (shape, _) in enumerate(shapes)]
    answers = llm.generate(["Once upon a time"] * 16, [*params, plain])
    for (shape, fits), answer in zip(shapes, answers):
        (sequence,) = answer.outputs
        assert answer.error is None and sequence.finish_reason == "stop", (shape, answer)
        assert fits(sequence.text), (shape, sequence.text)
    assert llm.llm_engine.executor_stats()["recompiles"] == recompiles
    assert draws_by_seed(answers[-1], 5)


def test_sequences_of_one_prompt_and_stop_strings_keep_to_the_grammar(llm):
    (answer,) = llm.generate(["Well:"], params_for({"choice": CHOICES}, 3, n=4))
    assert len(answer.outputs) == 4 and all(sequence.text in CHOICES for sequence in answer.outputs)
    (answer,) = llm.generate(["Well:"], params_for({"regex": "abc+d"}, 3, stop=["c"]))
    assert (answer.outputs[0].text, answer.outputs[0].stop_reason) == ("ab", "c")


def test_log_probabilities_are_those_of_the_masked_distribution(llm):
    (answer,) = llm.generate(["Well:"], params_for({"regex": "a"}, 3, logprobs=1))
    (sequence,) = answer.outputs
    assert sequence.text == "a"
    assert math.exp(sequence.logprobs[0][sequence.token_ids[0]].logprob) == pytest.approx(1.0)


def test_a_grammar_that_is_none_is_refused_before_it_reaches_the_engine(llm):
    with pytest.raises(RequestError, match="structured_outputs cannot be used: .*unclosed group") as caught:
        llm.generate(["Well:"], params_for({"regex": "(a"}, 0))
    assert caught.value.parameter == "structured_outputs"


def test_a_request_that_its_grammar_leaves_without_a_token_fails_alone(llm):
    """`min_tokens` forbids the end, and the grammar everything else; one grammar fails to compile in the engine."""
    checker = llm.llm_engine.input_processor.grammar_checker
    params = [
        params_for({"choice": ["yes"]}, 1),
        params_for({"regex": "aa?"}, 1, allowed_token_ids=[5]),
        params_for({"regex": "(a"}, 1),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checker, "check", lambda params: None)
        good, stuck, broken = llm.generate(["Well:"] * 3, params)
    assert good.outputs[0].text == "yes"
    assert "no token can be drawn" in stuck.error
    assert "unclosed group" in broken.error


BUDGET = 3
THINKING = (16, 53)
"""What stands in for the tokens around thinking: a comma, with which a prompt ends, and a Q."""


def keeps_budget(tokens):
    return tokens.index(THINKING[1]) == BUDGET


class FewBlocks:
    """The executor, with so few KV blocks that requests are preempted."""

    def __init__(self, executor, num_blocks):
        self._executor = executor
        self.kv_cache_config = dataclasses.replace(executor.kv_cache_config, num_blocks=(num_blocks,))

    def __getattr__(self, name):
        return getattr(self._executor, name)


def serve(llm, num_blocks, params=MappingProxyType({}), **scheduler_options):
    """((token id, its candidates' log probabilities) by request, how many were preempted) of a mixed load, on a core of
    its own. `params`: of all requests."""
    engine = llm.llm_engine
    config = engine.config
    scheduler = dataclasses.replace(config.scheduler, **scheduler_options)
    executor = engine._core.executor
    executor.recover()
    tokenizer = engine.input_processor.tokenizer
    grammars = Grammars(tokenizer.backend.to_str(), engine.input_processor.vocab_size, [tokenizer.eos_token_id])
    core = EngineCore(dataclasses.replace(config, scheduler=scheduler), FewBlocks(executor, num_blocks), grammars)
    for i in range(8):
        shape = SHAPES[i % len(SHAPES)][0] if i % 3 else None
        prompt, budget = "Once upon a time " * (i + 1), BUDGET if i in (3, 6) else None
        if budget is not None:
            prompt = prompt.strip() + ","
        own = params_for(shape, i, **{"max_tokens": 60, "thinking_token_budget": budget, "logprobs": 2, **params})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.input_processor, "thinking_token_ids", THINKING)
            core.add_request(engine.input_processor.process(f"r{i}", prompt, own)[0])
    answers, num_preemptions = {}, 0
    while core._scheduler.has_unfinished_requests() or core._in_flight:
        for output in core.step().outputs:
            assert output.error is None, output.error
            lines = [dict(zip(line.token_ids, line.logprobs)) for line in output.new_logprobs or ()]
            answers.setdefault(output.request_id, []).extend(zip(output.new_token_ids, lines, strict=True))
            num_preemptions = max(num_preemptions, output.num_preemptions)
        core._scheduler.check_integrity()
    executor.recover()  # the rows of those that ended last are taken back in a next step, and there is none
    return answers, num_preemptions


GREEDY, DRAWN = {"temperature": 0.0}, {"temperature": 1.0}


def first_difference(expected, found):
    """The candidates in two answers where they part; None: they do not."""
    assert len(expected) == len(found) or expected[-1][0] != found[-1][0], "one ended early, after the same tokens"
    return next(((one, other) for one, other in zip(expected, found) if one[0] != other[0]), None)


def tell_the_same(expected, found):
    """Whether answers are equal up to where two tokens were as likely as each other, as far as bfloat16 can tell."""
    assert expected.keys() == found.keys()
    for request_id in expected:
        parting = first_difference(expected[request_id], found[request_id])
        if parting is not None:
            (token, candidates), (other, _) = parting
            assert other in candidates and abs(candidates[token] - candidates[other]) < CLOSE, (request_id, parting)
    return True


def test_neither_steps_in_flight_nor_preemption_nor_runs_of_steps_change_the_answers(llm):
    """But where rounding decides; nothing of what a grammar or a budget asks for is a matter of rounding."""
    expected, preempted = serve(llm, 400, GREEDY, async_scheduling=False)
    assert not preempted
    for scheduling, num_blocks in (({}, 400), ({"num_scheduler_steps": None}, 24)):
        answers, preempted = serve(llm, num_blocks, GREEDY, async_scheduling=True, **scheduling)
        assert tell_the_same(expected, answers) and bool(preempted) == (num_blocks < 400)
        assert all(keeps_budget([token for token, _ in answers[f"r{i}"]]) for i in (3, 6))


@pytest.mark.exhaustive
def test_with_deterministic_they_change_no_bit_of_them():
    with LLM("demo", **{**OPTIONS, "deterministic": True}) as llm:
        expected, _ = serve(llm, 400, DRAWN, async_scheduling=False)
        assert serve(llm, 400, DRAWN, async_scheduling=True) == (expected, 0)
        answers, preempted = serve(llm, 24, DRAWN, async_scheduling=True, num_scheduler_steps=None)
    assert answers == expected and preempted
