"""Drafts change no bit of an answer: on random traffic, wherever a draft is wrong, and beside grammars."""

import dataclasses
import random
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np
import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.engine.build import resolve_model
from jaxpaged.engine.core import EngineCore
from jaxpaged.engine.input.tokenizer import load_tokenizer
from jaxpaged.executor.uniproc import UniProcExecutor
from jaxpaged.messages import EngineCoreRequest
from jaxpaged.params.hub import EMBEDDED_FOLDER
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.worker import engine_spec
from tests.core.simulation import ForcedLengths, any_length
from tests.end_to_end.test_multi_step import VOCAB, answers_of, joined, serve
from tests.models.checkpoints import write_checkpoint

pytestmark = pytest.mark.slow
MOST = 4
# A window and full attention; so few blocks that requests are preempted.
OPTIONS = {
    "max_num_seqs": 6,
    "max_num_batched_tokens": 24,
    "token_buckets": (24,),
    "max_model_len": 64,
    "block_size": 4,
    "dtype": "float32",
    "max_logprobs": 3,
    "deterministic": True,
}


def started(folder, num_blocks=50, num_devices=1, sample_buckets=(8,), **speculation):
    """(Options, an executor), whose programs are compiled when they are first needed.

    For every bucket there are seven programs that draft, verify and sample: most engines do with one.
    """
    options = {**OPTIONS, "num_gpu_blocks_override": num_blocks, "tensor_parallel_size": num_devices}
    options["deterministic"] = num_devices == 1
    given = {"num_speculative_tokens": MOST, **speculation}
    options = EngineConfig.from_options(model=str(folder), speculative_config=given, **options)
    path, functions, decoder, config = resolve_model(options)
    with mock.patch.object(engine_spec, "doubling_buckets", return_value=sample_buckets):
        return config, UniProcExecutor(config, functions, decoder, path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint("gemma2", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(folder):
    """With all programs compiled."""
    config, executor = started(folder, sample_buckets=(2, 8), method="suffix")
    executor.worker.programs.wait_all(on_demand=True)
    yield config, executor
    executor.shutdown()


@pytest.fixture(scope="module")
def own_drafts(folder):
    """A model that drafts for itself: where its keys and values are right, every draft is."""
    config, executor = started(folder, method="draft_model", model=str(folder))
    yield config, executor
    executor.shutdown()


def core_of(engine, lengths=None, num_steps=1, **changes):
    """An engine that drafts as many tokens as `lengths` says; None: none."""
    config, executor = engine
    scheduler = dataclasses.replace(config.scheduler, num_scheduler_steps=num_steps, **changes)
    executor.recover()
    core = EngineCore(dataclasses.replace(config, scheduler=scheduler), executor)
    core._scheduler.draft_lengths = lengths or ForcedLengths(lambda: 0)
    return core


@pytest.mark.parametrize(
    ("method", "seed", "asynchronous", "num_steps"),
    [
        pytest.param("engine", 1, True, 5, marks=pytest.mark.exhaustive),
        ("engine", 3, False, 1),
        pytest.param("own_drafts", 1, True, 5, marks=pytest.mark.exhaustive),
    ],
)
def test_random_traffic_gets_the_bits_of_single_steps(request, method, seed, asynchronous, num_steps):
    check_random_traffic(request.getfixturevalue(method), seed, asynchronous, num_steps)


def check_random_traffic(engine, seed, asynchronous, num_steps):
    """That any requests, with any numbers of drafts, get what they get without, bit for bit."""
    lengths = any_length(MOST)
    core = core_of(engine, lengths, num_steps, async_scheduling=asynchronous)
    requests, answers, aborted = serve(core, random.Random(seed), 40)
    assert lengths.num_drafts > 50 and lengths.num_accepted > 0, "the test drafts nothing"
    assert core._scheduler.make_stats().num_preemptions, "the test preempts nobody"
    expected = answers_of(core_of(engine), requests.values())
    for name in requests:
        got, alone = joined(answers[name]), joined(expected[name])
        if name in aborted:
            assert got[0] == alone[0][: len(got[0])], name
        else:
            assert got == alone, name
    assert engine[1].worker.stats()["recompiles"] == 0


class Prophet:
    """Drafts the true tokens up to `wrong_at`, and others from there on. Steps must be awaited before the next."""

    def __init__(self, core, answers, wrong_at):
        self.core, self.answers, self.wrong_at = core, answers, wrong_at
        self.name_of_row, self.layouts = {}, {}

    def admit(self, device, rank, row, request):
        self.name_of_row[row] = request.request_id

    def release(self, device, row, num_prompt_tokens):
        del self.name_of_row[row]

    def propose(self, device, key, draft, packed):
        drafts_RK = np.full(device.state.rows.drafts_RK.shape, -1, np.int32)
        for row in draft.newest.rows:
            request = self.core._scheduler.requests[self.name_of_row[int(row)]]
            done = request.num_tokens - request.num_prompt_tokens
            true = self.answers[request.request_id][done : done + MOST]
            drafts_RK[row, : len(true)] = [token ^ (i == self.wrong_at) for i, token in enumerate(true)]
        drafts_SK = jax.device_put(drafts_RK[draft.newest.rows])
        drafts_RK = jax.device_put(drafts_RK, device.state.rows.drafts_RK.sharding)
        device.state.rows = device.state.rows._replace(drafts_RK=drafts_RK)
        return drafts_SK


def requests_of(num_tokens):
    """Greedy and drawn, plain and with everything that looks at earlier tokens."""
    asked = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.8, "min_tokens": 21, "stop_token_ids": list(range(40))},
        {
            "temperature": 1.0,
            "presence_penalty": 1.5,
            "repetition_penalty": 1.3,
            "logprobs": 2,
            "prompt_logprobs": 1,
            "bad_words_token_ids": [[30], [31, 32], [5, 5]],
            "logit_bias": {5: 4.0},
        },
    ]
    return [
        EngineCoreRequest(
            f"r{i}",
            list(range(3, 12 + i)),
            SamplingParams(seed=i, max_tokens=num_tokens, ignore_eos=True, **params),
            0.0,
        )
        for i, params in enumerate(asked)
    ]


@pytest.mark.parametrize("wrong_at", range(MOST + 1))
def test_the_draft_at_any_place_may_be_wrong(engine, wrong_at):
    requests, num_tokens = requests_of(21), 21
    expected = {name: joined(answer) for name, answer in answers_of(core_of(engine), requests).items()}
    lengths = ForcedLengths(lambda: MOST)
    core = core_of(engine, lengths, async_scheduling=False)
    runner = core.executor.worker.runner
    true = {name: tokens for name, (tokens, *_) in expected.items()}
    prophet = Prophet(core, true, wrong_at)
    runner.drafter, runner.admitting = prophet, (prophet, runner.output_stage)
    answers = answers_of(core, requests)
    for name, answer in answers.items():
        assert joined(answer) == expected[name]
        lengths_of_steps = [len(output.new_token_ids) for output in answer if output.new_token_ids]
        given = min(wrong_at, MOST) + 1
        assert lengths_of_steps[:-1] == [1] + [given] * (len(lengths_of_steps) - 2)
        assert sum(lengths_of_steps) == num_tokens


def test_a_stop_token_among_accepted_drafts_ends_the_text_there(engine):
    (request, *_) = requests_of(30)
    tokens, _, _ = joined(answers_of(core_of(engine), [request])["r0"])
    core = core_of(engine, ForcedLengths(lambda: MOST), async_scheduling=False)
    runner = core.executor.worker.runner
    prophet = Prophet(core, {"r0": tokens}, MOST)
    runner.drafter, runner.admitting = prophet, (prophet, runner.output_stage)
    place = next(i for i in range(2, 30) if tokens[i] not in tokens[:i] and (i - 1) % (MOST + 1) not in (0, MOST))
    request.sampling_params.stop_token_ids = [tokens[place]]
    got, (reason, stop), _ = joined(answers_of(core, [request])["r0"])
    assert (got, reason, stop) == (tokens[: place + 1], "stop", tokens[place])


FOLLOWING = ("r1", "r3")


class EvenTokens:
    """What a grammar shows the engine: it allows tokens of even numbers, and needs a mask for each."""

    error, is_complete = None, False

    def num_free(self, num_unknown):
        return 0

    def accept(self, token_ids):
        return all(token_id % 2 == 0 for token_id in token_ids)

    def fill(self, bits_IW, token_ids=()):
        bits_IW[0] = 0x55555555
        for bits_W, token_id in zip(bits_IW[1:], token_ids):
            if token_id % 2:
                return
            bits_W[:] = 0x55555555


def answers_beside_a_grammar(engine, lengths, true=None, wrong_at=None):
    """(Answers, in whole and in parts) of requests of which two follow a grammar. `true`: what a prophet drafts."""
    core = core_of(engine, lengths, async_scheduling=true is None)
    if true is not None:
        runner, prophet = core.executor.worker.runner, Prophet(core, true, wrong_at)
        runner.drafter, runner.admitting = prophet, (prophet, runner.output_stage)
    manager, requests = core._scheduler.structured_output_manager, requests_of(21)
    manager._known_grammars = SimpleNamespace(num_words=VOCAB // 32 + 1)
    for request in requests:
        core.add_request(request)
    for name in FOLLOWING:
        request = core._scheduler.requests[name]
        request.matcher = EvenTokens()
        manager.bound.add(request)
    answers = {request.request_id: [] for request in requests}
    while core.has_work():
        for output in core.step().outputs:
            answers[output.request_id].append(output)
    return {name: joined(outputs) for name, outputs in answers.items()}, answers


@pytest.mark.parametrize("wrong_at", [None, 0, 1, MOST])
def test_a_grammar_holds_for_drafts_beside_those_of_others(engine, wrong_at):
    """A draft that is wrong here is one that the grammar forbids."""
    lengths = ForcedLengths(lambda: MOST)
    expected, _ = answers_beside_a_grammar(engine, None)
    true = None if wrong_at is None else {name: tokens for name, (tokens, *_) in expected.items()}
    got, outputs = answers_beside_a_grammar(engine, lengths, true, wrong_at)
    assert got == expected and lengths.num_drafts > 0
    for name in FOLLOWING:
        assert all(token % 2 == 0 for token in got[name][0])
        if true is not None:
            given = [len(output.new_token_ids) for output in outputs[name] if output.new_token_ids]
            assert given[1:-1] == [wrong_at + 1] * (len(given) - 2)


def test_a_prompt_that_repeats_itself_is_drafted_from(engine):
    """What a model repeats is found on the device, with two steps in flight."""
    prompt = [9, 8, 7, 6, 5] * 4
    request = EngineCoreRequest("r", prompt, SamplingParams(temperature=0.0, seed=1, max_tokens=40), 0.0)
    request.sampling_params.logit_bias = {7: 100.0}
    expected = joined(answers_of(core_of(engine), [request])["r"])
    lengths = ForcedLengths(lambda: MOST)
    got = answers_of(core_of(engine, lengths), [request])["r"]
    assert joined(got) == expected == ([7] * 40, ("length", None), [])
    assert lengths.num_accepted > 25
    assert sum(len(output.new_token_ids) > MOST for output in got) >= 5


def plain_requests(num_requests, num_tokens):
    """Greedy and drawn, with beginnings in common."""
    asked = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 9}, {"temperature": 1.2}]
    return [
        EngineCoreRequest(
            f"r{i}",
            [*range(3, 12 + i % 3), *range(40 + i, 44 + i)],
            SamplingParams(seed=i, max_tokens=num_tokens, ignore_eos=True, **asked[i % len(asked)]),
            0.0,
        )
        for i in range(num_requests)
    ]


@pytest.mark.parametrize(
    ("asynchronous", "num_steps"), [pytest.param(True, 5, marks=pytest.mark.exhaustive), (False, 1)]
)
def test_a_model_that_drafts_for_itself_is_always_right(own_drafts, engine, asynchronous, num_steps):
    """After preemptions, cached beginnings, sleep, runs and steps without drafts: its cache is what it must be."""
    requests = plain_requests(12, 40)
    expected = {name: joined(answer) for name, answer in answers_of(core_of(engine), requests).items()}
    lengths = any_length(MOST)
    core = core_of(own_drafts, lengths, num_steps, async_scheduling=asynchronous)
    for _ in range(2):
        got = answers_of(core, requests)
        assert {name: joined(answer) for name, answer in got.items()} == expected
        core.sleep(2, mode="wait")
        core.wake_up()
    stats = core._scheduler.make_stats()
    assert stats.num_preemptions, "the test preempts nobody"
    assert lengths.num_drafts > 100 and lengths.num_accepted == lengths.num_drafts
    assert own_drafts[1].worker.stats()["recompiles"] == 0


@pytest.mark.exhaustive
def test_a_model_that_drafts_for_itself_on_four_devices_is_right(folder):
    """But for rounding, which is another in steps of other sizes."""
    engine = _, executor = started(folder, num_devices=4, method="draft_model", model=str(folder))
    try:
        lengths = any_length(MOST)
        answers_of(core_of(engine, lengths), plain_requests(12, 40))
        assert lengths.num_drafts > 100 and lengths.num_accepted >= 0.98 * lengths.num_drafts
    finally:
        executor.shutdown()


@pytest.mark.exhaustive
def test_the_model_that_drafts_for_the_embedded_one_mostly_knows_what_that_says():
    engine = _, executor = started("demo", method="draft_model")
    prompt = load_tokenizer(EMBEDDED_FOLDER).encode("Once upon a time")
    asked = [{"temperature": 0.0}, {"temperature": 1.0}]
    requests = [
        EngineCoreRequest(f"r{i}", prompt, SamplingParams(seed=i, max_tokens=40, **params), 0.0)
        for i, params in enumerate(asked)
    ]
    try:
        expected = {name: joined(answer) for name, answer in answers_of(core_of(engine), requests).items()}
        lengths = ForcedLengths(lambda: MOST)
        got = answers_of(core_of(engine, lengths), requests)
        assert {name: joined(answer) for name, answer in got.items()} == expected
        assert lengths.num_accepted > lengths.num_drafts / 2 > 20
    finally:
        executor.shutdown()
