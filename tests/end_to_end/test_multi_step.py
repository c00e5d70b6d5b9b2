"""Runs of decode steps give what single steps give, on random traffic with every kind of request."""

import dataclasses
import random

import numpy as np
import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.engine.build import resolve_model
from jaxpaged.engine.core import EngineCore
from jaxpaged.executor.uniproc import UniProcExecutor
from jaxpaged.messages import EngineCoreRequest
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.worker.programs import choose
from tests.models.checkpoints import write_checkpoint

VOCAB = 211
# A window and full attention; so few blocks that requests are preempted.
OPTIONS = {
    "max_num_seqs": 6,
    "max_num_batched_tokens": 8,
    "token_buckets": (8,),
    "max_model_len": 64,
    "block_size": 4,
    "num_gpu_blocks_override": 50,
    "dtype": "float32",
    "max_logprobs": 3,
}
LONGEST = 7
CHOICES = {
    "top_p": 0.8,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.3,
    "logprobs": 3,
    "prompt_logprobs": 2,
    "logit_bias": {5: 4.0},
    "min_tokens": 6,
    "allowed_token_ids": list(range(20, 60)),
    "bad_words_token_ids": [[30], [31, 32], [5, 5]],
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """(Options, an executor all of whose programs are compiled)."""
    model = str(write_checkpoint("gemma2", tmp_path_factory.mktemp("model")))
    options = EngineConfig.from_options(model=model, num_scheduler_steps=LONGEST, **OPTIONS)
    folder, functions, decoder, config = resolve_model(options)
    executor = UniProcExecutor(config, functions, decoder, folder)
    executor.worker.programs.wait_all(on_demand=True)
    yield config, executor
    executor.shutdown()


@pytest.fixture(autouse=True)
def two_programs_a_step(monkeypatch):
    """Single steps are a forward pass and a sampler, however many come in which all decode."""
    monkeypatch.setattr(choose, "DECODES_THAT_PAY", 10**9)


def core_of(engine, num_steps, **changes):
    config, executor = engine
    scheduler = dataclasses.replace(config.scheduler, num_scheduler_steps=num_steps, **changes)
    executor.recover()
    return EngineCore(dataclasses.replace(config, scheduler=scheduler), executor)


def random_request(draw: random.Random, name: str) -> EngineCoreRequest:
    prompt = [draw.randrange(3, VOCAB) for _ in range(draw.choice([1, 2, 9, 17, 30]))]
    options = {"temperature": draw.choice([0.0, 0.7, 1.3]), "max_tokens": draw.randint(6, 60)}
    stop_ids = draw.sample(range(VOCAB), draw.choice([0, 0, 1, 12]))  # more than a row has room for
    for option in draw.sample(sorted(CHOICES), draw.choice([0, 0, 0, 0, 0, 1, 3])):
        options[option] = CHOICES[option]
    params = SamplingParams(seed=draw.randrange(2**40), stop_token_ids=stop_ids, **options)
    return EngineCoreRequest(name, prompt, params, arrival_time=0.0)


def serve(core, draw: random.Random, num_requests: int):
    """Random arrivals and aborts -> (requests by name, their outputs joined, who was aborted)."""
    requests = {f"r{i}": random_request(draw, f"r{i}") for i in range(num_requests)}
    coming, answers, aborted, ended = list(requests), {name: [] for name in requests}, set(), set()
    while len(ended | aborted) < num_requests:
        burst = draw.randint(1, 6) if draw.random() < 0.04 else 0
        for _ in range(min(burst, len(coming))):
            core.add_request(requests[coming.pop(0)])
        begun = [name for name in requests if name not in coming and name not in ended | aborted]
        if begun and draw.random() < 0.03:
            aborted.add(draw.choice(begun))
            core.abort_requests(aborted)
        for output in core.step().outputs:
            answers[output.request_id].append(output)
            if output.finish_reason is not None:
                ended.add(output.request_id)
    while core.step().outputs or core._in_flight:
        pass
    core._scheduler.check_integrity()
    return requests, answers, aborted


def joined(outputs):
    """(tokens, finish and stop reason, lines of log probabilities) of one request."""
    tokens = [token for output in outputs for token in output.new_token_ids]
    lines = [line for output in outputs for line in (*(output.prompt_logprobs or ()), *(output.new_logprobs or ()))]
    last = outputs[-1] if outputs else None
    return tokens, (last and last.finish_reason, last and last.stop_reason), lines


def answers_of(core, requests):
    """What requests that come at once give, by name, in parts."""
    answers = {request.request_id: [] for request in requests}
    for request in requests:
        core.add_request(request)
    while any(not outputs or outputs[-1].finish_reason is None for outputs in answers.values()):
        for output in core.step().outputs:
            answers[output.request_id].append(output)
    return answers


def alone(core, request):
    """What a request gives when nobody else is there."""
    return joined(answers_of(core, [request])[request.request_id])


@pytest.mark.parametrize(
    ("seed", "asynchronous"), [(1, True), pytest.param(2, True, marks=pytest.mark.exhaustive), (3, False)]
)
def test_random_traffic_gets_the_tokens_and_log_probabilities_of_single_steps(engine, seed, asynchronous):
    core = core_of(engine, LONGEST, async_scheduling=asynchronous)
    requests, answers, aborted = serve(core, random.Random(seed), 40)
    records, _ = core.step_log.read()
    assert sum(record.num_steps > 1 for record in records) >= 5, "the test has no runs"
    assert any(record.num_steps > 1 and record.full_sampler for record in records)
    assert any(record.num_steps > 1 and not record.full_sampler for record in records)
    check_against_single_steps(engine, core, requests, answers, aborted)


@pytest.mark.parametrize("mixed", [False, True])
def test_random_traffic_gets_the_same_where_a_step_in_which_all_decode_is_one_program(engine, mixed, monkeypatch):
    core, choice = core_of(engine, 1), engine[1].choice
    if mixed:
        core._pacer = MixedPacer(5)
    with monkeypatch.context() as patch:
        patch.setattr(choose, "DECODES_THAT_PAY", 0)
        before = choice._num_decodes.total()
        served = serve(core, random.Random(4), 40)
        assert choice._num_decodes.total() - before > 15, "hardly any steps in which all decode"
    assert any(record.num_steps > 1 for record in core.step_log.read()[0]) == mixed
    check_against_single_steps(engine, core, *served)


def check_against_single_steps(engine, core, requests, answers, aborted):
    """Compare with what the requests get in steps of two programs, when they come at once."""
    assert core._scheduler.make_stats().num_preemptions, "the test preempts nobody"
    expected = answers_of(core_of(engine, 1), requests.values())
    for name in requests:
        tokens, end, lines = joined(answers[name])
        expected_tokens, expected_end, expected_lines = joined(expected[name])
        if name in aborted:
            assert tokens == expected_tokens[: len(tokens)], name
            continue
        assert (tokens, end) == (expected_tokens, expected_end), name
        assert [line.token_ids for line in lines] == [line.token_ids for line in expected_lines], name
        for line, expected_line in zip(lines, expected_lines, strict=True):
            np.testing.assert_allclose(line.logprobs, expected_line.logprobs, atol=1e-4)
    assert engine[1].worker.stats()["recompiles"] == 0


def request_of(name, max_tokens, **params):
    params = SamplingParams(**{"temperature": 0.0, "seed": 1, "max_tokens": max_tokens, **params})
    return EngineCoreRequest(name, [5, 9, 7], params, arrival_time=0.0)


def test_a_run_ends_early_when_every_row_has_ended(engine):
    core = core_of(engine, 1)
    tokens, _, _ = alone(core, request_of("all", 12, temperature=1.0))
    core = core_of(engine, LONGEST)
    place = next(i for i in range(3, 12) if tokens[i] not in tokens[:i])
    assert alone(core, request_of("cut", 40, temperature=1.0, stop_token_ids=[tokens[place]]))[0] == tokens[: place + 1]
    core.step()  # what was dispatched before the end was known
    records, _ = core.step_log.read()
    assert sum(record.num_tokens for record in records) == 3 + place
    assert records[-1].num_steps == 0, "the run after the end computed something"


def test_the_counters_and_the_step_log_agree(engine):
    core, before = core_of(engine, LONGEST), engine[1].worker.stats()
    for i, max_tokens in enumerate((5, 20, 31)):
        core.add_request(request_of(f"r{i}", max_tokens))
    while core.step().outputs or core._in_flight:
        pass
    after, (records, _) = engine[1].worker.stats(), core.step_log.read()
    grown = {name: after[name] - before[name] for name in ("steps", "scheduled_tokens", "padded_tokens")}
    assert sum(record.num_steps for record in records) == grown["steps"] > len(records)
    assert sum(record.num_tokens for record in records) == grown["scheduled_tokens"] == 3 * 3 + 4 + 19 + 30
    padding = sum(record.token_bucket * record.num_steps - record.num_tokens for record in records)
    assert padding == grown["padded_tokens"]


def test_a_request_whose_logits_turn_bad_within_a_run_keeps_its_tokens_and_fails_alone(engine):
    core = core_of(engine, LONGEST)
    # One token is allowed, and not four times in a row: then nothing can be drawn.
    bad = request_of("bad", 20, allowed_token_ids=[40], bad_words_token_ids=[[40, 40, 40, 40]])
    answers = answers_of(core, [bad, request_of("good", 20)])
    tokens, end, _ = joined(answers["bad"])
    assert (tokens, end[0]) == ([40, 40, 40], "error")
    assert "allowed_token_ids and bad_words contradict each other" in answers["bad"][-1].error
    assert joined(answers["good"])[:2] == alone(core_of(engine, 1), request_of("good", 20))[:2]


class MixedPacer:
    """A pacer that asks for any mix of single steps and runs."""

    def __init__(self, seed: int):
        self.draw = random.Random(seed)

    @property
    def num_steps(self) -> int:
        return self.draw.choice([1, 1, 2, 3, LONGEST])

    def observe(self, record) -> None:
        """Whatever was measured."""


def chats(core, draw: random.Random, turn: int):
    """(prompt of the second turn, whether the stop token of the first answer completes a block) of some chats.

    The allowed tokens include as many stop tokens as a row has room for, so answers are short.
    """
    stops = {"allowed_token_ids": list(range(20, 44)), "stop_token_ids": list(range(20, 28))}
    requests = []
    for i in range(3):
        prompt = [draw.randrange(3, VOCAB) for _ in range(draw.randint(3, 12))]
        params = SamplingParams(temperature=1.0, seed=draw.randrange(2**40), max_tokens=20, **stops)
        requests.append(EngineCoreRequest(f"{turn}.{i}", prompt, params, arrival_time=0.0))
    for request, outputs in zip(requests, answers_of(core, requests).values()):
        tokens, end, _ = joined(outputs)
        said = [*request.prompt_token_ids, *tokens]
        yield [*said, 3, 5, 9], end[0] == "stop" and len(said) % OPTIONS["block_size"] == 0


def test_second_turns_after_any_mix_of_steps_and_runs_have_the_log_probabilities_of_an_engine_without_cache(
    engine, monkeypatch
):
    """What they find in the cache ends with a stop token, which a run does not compute."""
    core, draw, num_whole = core_of(engine, 1), random.Random(1), 0
    core._pacer = MixedPacer(2)
    monkeypatch.setattr(choose, "DECODES_THAT_PAY", engine[1].choice._num_decodes.total() + 100)
    for turn in range(25):
        prompts = list(chats(core, draw, turn))
        num_whole += sum(whole for _, whole in prompts)
        lines = []
        for skips in (False, True):
            params = SamplingParams(temperature=0.0, seed=1, max_tokens=2, logprobs=3, skip_reading_prefix_cache=skips)
            requests = [
                EngineCoreRequest(f"{turn}.{i} {skips}", prompt, params, arrival_time=0.0)
                for i, (prompt, _) in enumerate(prompts)
            ]
            answers = answers_of(core, requests).values()
            lines.append([line for outputs in answers for line in joined(outputs)[2]])
        for cached, fresh in zip(*lines, strict=True):
            assert cached.token_ids == fresh.token_ids
            np.testing.assert_allclose(cached.logprobs, fresh.logprobs, atol=1e-4)
    assert num_whole > 5, "hardly any stop token completes a block"
    assert core._scheduler.make_stats().prefix_cache_hits > 100
    assert sum(record.num_steps > 1 for record in core.step_log.read()[0]) > 10, "hardly any runs"
