"""Requests with pictures through scheduler and runner: what each gets is what it gets alone, without any cache.

That a lone one gets transformers' logits is tested in tests/worker/test_encoder.py. Log probabilities are compared and
not tokens alone: a picture that was cut in two leaves most of those as they were.
"""

import dataclasses
import itertools
import json
import random
from functools import partial

import numpy as np
import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.engine.build import resolve_model
from jaxpaged.engine.core import EngineCore
from jaxpaged.executor.uniproc import UniProcExecutor
from jaxpaged.messages import EngineCoreRequest, MultiModalFeature
from jaxpaged.sampling_params import SamplingParams
from tests.models.paged import golden_of
from tests.models.seeing_checkpoints import (
    IMAGE_TOKEN,
    pictures_of,
    pictures_of_prompts,
    preprocessor_config_of,
    prompts_of,
    write_seeing_checkpoint,
)

NAME = "gemma3_seeing"
NUM_EMBEDS = 16
OPTIONS = {
    "max_num_seqs": 6,
    "max_num_batched_tokens": 96,
    "token_buckets": (8, 32, 96),
    "max_model_len": 128,
    "block_size": 4,
    "dtype": "float32",
    "max_logprobs": 4,
    "num_scheduler_steps": 4,
    "num_gpu_blocks_override": 100,  # so few that some are preempted
    "encoder_cache_size": 6 * NUM_EMBEDS,
}


def text(seed, count):
    return random.Random(seed).choices(range(3, 200), k=count)


class Prompt:
    """Tokens and features of parts: lists of tokens, and (number of a picture, its items)."""

    def __init__(self, *parts):
        self.tokens, self.features = [], []
        for part in parts:
            if isinstance(part, list):
                self.tokens += part
                continue
            number, items = part
            offset, runs = len(self.tokens), []
            for _ in range(items):
                runs.append((len(self.tokens), NUM_EMBEDS))
                self.tokens += [IMAGE_TOKEN] * NUM_EMBEDS + [7]
            self.tokens.pop()
            pixels = np.random.default_rng(number).integers(0, 256, (items, 32, 32, 3)).astype(np.uint8)
            key, length = bytes([number, items] * 16), len(self.tokens) - offset
            self.features.append(MultiModalFeature(key, "image", offset, length, runs, (items, 4, 4), pixels))

    def request(self, name, **params):
        params = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, "seed": 1, "logprobs": 2, **params}
        given = SamplingParams(**params)
        return EngineCoreRequest(name, list(self.tokens), given, arrival_time=0.0, mm_features=self.features)


class Engine:
    """An executor all of whose programs are compiled, and what every request got when nobody else was there."""

    def __init__(self, folder, **options):
        given = EngineConfig.from_options(model=str(folder), **OPTIONS | options)
        folder, model, decoder, self.config = resolve_model(given)
        self.executor = UniProcExecutor(self.config, model, decoder, folder)
        self.executor.worker.programs.wait_all(on_demand=True)
        self.tolerance = 0.0 if self.config.compile.deterministic else 2e-4
        self.known = {}

    def core(self, **scheduler):
        self.executor.recover()
        config = dataclasses.replace(self.config, scheduler=dataclasses.replace(self.config.scheduler, **scheduler))
        return EngineCore(config, self.executor)

    def alone(self, request):
        """What a request gets in an engine that has computed nothing, in one step and then single ones."""
        known = repr((request.prompt_token_ids, request.sampling_params, [f.key for f in request.mm_features]))
        if known not in self.known:
            core = self.core(num_scheduler_steps=1)
            self.known[known] = serve(core, [request])[request.request_id]
        return self.known[known]

    def check(self, served, requests):
        for request in requests:
            same(served[request.request_id], self.alone(request), self.tolerance)
        assert self.executor.worker.counter.count == 0, "nothing is compiled outside of the table"


def same(ours, theirs, tolerance):
    (tokens, lines), (their_tokens, their_lines) = ours, theirs
    assert tokens == their_tokens
    assert [ids for ids, _ in lines] == [ids for ids, _ in their_lines]
    ours, theirs = (np.concatenate([logprobs for _, logprobs in each] or [[]]) for each in (lines, their_lines))
    if tolerance:
        np.testing.assert_allclose(ours, theirs, atol=tolerance)
    else:
        assert ours.tolist() == theirs.tolist()


def serve(core, requests, arrivals=None, chunks=None, hits=None, most_steps=2000):
    """What all requests get: tokens, and lines of log probabilities, of prompts too. They come at once, or when chance
    wants it. `chunks`: most tokens of a step, one after the other, again and again. `hits`: cached tokens of each."""
    coming, outputs, num_left, num_steps = list(requests), {each.request_id: [] for each in requests}, len(requests), 0
    own, sizes = core.executor.max_step_tokens, itertools.cycle(chunks or [None])
    while num_left:
        if chunks:
            core.executor.max_step_tokens = partial(next, sizes)
        while coming and (arrivals is None or arrivals.random() < 0.4):
            core.add_request(coming.pop(0))
        for output in core.step().outputs:
            assert output.error is None, output.error
            outputs[output.request_id].append(output)
            (hits if hits is not None else {}).setdefault(output.request_id, output.num_cached_tokens)
            num_left -= output.finish_reason is not None
        num_steps += 1
        assert num_steps < most_steps, "no progress"
    core.executor.max_step_tokens = own
    core._scheduler.check_integrity()
    return {name: joined(each) for name, each in outputs.items()}


def joined(outputs):
    tokens = [token for output in outputs for token in output.new_token_ids]
    lines = [line for output in outputs for line in (*(output.prompt_logprobs or ()), *(output.new_logprobs or ()))]
    return tokens, [(line.token_ids, line.logprobs) for line in lines]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_seeing_checkpoint(NAME, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(folder):
    engine = Engine(folder)
    yield engine
    engine.executor.shutdown()


LONG = Prompt(text(1, 3), (1, 1), text(2, 9), (2, 2), text(3, 2), (3, 1), text(4, 5))


@pytest.mark.parametrize("chunks", [[1], [5], [17], [23, 1, 40], [96]])
def test_every_chunk_gives_the_same(engine, chunks):
    request = LONG.request("a", prompt_logprobs=2)
    engine.check(serve(engine.core(), [request], chunks=chunks), [request])


@pytest.mark.parametrize(
    ("parts", "num_cached"),
    [
        ([(9, 1), text(2, 9), (2, 2), text(3, 2)], 0),  # another picture where there was one
        ([(1, 1), text(9, 9)], 16),  # 3 tokens, and 13 of the picture's 16
        ([(1, 1), text(2, 9), (9, 2), text(3, 2)], 28),  # up to the second picture
        ([(1, 1), text(2, 9), (2, 2), text(9, 2)], 60),  # 15 of the tokens of its second item
        ([(1, 1), text(2, 9), (2, 2), text(3, 2), (3, 1), text(4, 5), text(9, 3)], 84),  # behind all of them
    ],
)
def test_cached_beginnings_before_in_and_behind_pictures(engine, parts, num_cached):
    others = Prompt(*[(number, 1) for number in range(20, 26)])
    check_beginning(engine, LONG, Prompt(text(1, 3), *parts), others, num_cached)


def check_beginning(engine, whole, other, others, num_cached):
    """Of a prompt so many tokens are those of the whole one, with pictures; `others` fill the encoder cache."""
    core, first, second = engine.core(), whole.request("a"), other.request("b")
    served, hits = serve(core, [first]), {}
    served |= serve(core, [second], hits=hits)
    assert hits["b"] == num_cached
    engine.check(served, [first, second])
    # Embeddings that are gone are made again where the beginning ends in a picture.
    core = engine.core()
    serve(core, [first])
    serve(core, [others.request("c", max_tokens=1)])
    served |= serve(core, [second], hits=hits)
    engine.check(served, [second])


def test_two_requests_with_one_picture_in_one_step(engine):
    core = engine.core()
    requests = [Prompt(text(number, 5), (4, 2), text(number, 3)).request(f"r{number}") for number in range(2)]
    engine.check(serve(core, requests), requests)
    encoded = [record.num_encoded for record in core.step_records()[0]]
    assert sum(encoded) == 2 * NUM_EMBEDS and max(encoded) == sum(encoded)


def test_the_same_text_with_many_pictures(engine):
    core, arrivals = engine.core(), random.Random(3)
    requests = [Prompt(text(1, 6), (number, 1), text(2, 4)).request(f"r{number}", max_tokens=3) for number in range(30)]
    engine.check(serve(core, requests, arrivals), requests)


CHOICES = {
    "temperature": 1.0,
    "top_p": 0.8,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.3,
    "prompt_logprobs": 2,
    "logit_bias": {5: 4.0},
    "min_tokens": 3,
    "stop_token_ids": [*range(40, 60)],
}


def random_request(index):
    """Text and pictures of which others have some too, and whatever requests may ask for."""
    draw = random.Random(index)
    parts = [text(draw.choice([1, 2]), 6)] if draw.random() < 0.5 else []
    for _ in range(draw.choice([0, 1, 1, 2, 3])):
        parts += [(draw.randrange(9), draw.choice([1, 1, 2])), text(draw.randrange(3), draw.choice([1, 2, 7]))]
    if draw.random() < 0.2:
        parts.append((draw.randrange(9), 1))  # the prompt ends in it
    params = {option: CHOICES[option] for option in draw.sample(sorted(CHOICES), draw.choice([0, 0, 1, 3]))}
    prompt = Prompt(*(parts or [text(index, 9)]))
    return prompt.request(f"r{index}", **{"max_tokens": draw.choice([3, 4, 14, 30]), "seed": index, **params})


REQUESTS = [request for request in map(random_request, range(60)) if len(request.prompt_token_ids) < 90][:40]


def check_mixes(engine, seeds, all_requests=REQUESTS):
    """Whatever happens around it, a request gets the same."""
    num_preemptions = num_hits = 0
    for seed in seeds:
        chance = random.Random(seed)
        requests = chance.sample(all_requests, 20)
        core = engine.core(num_scheduler_steps=chance.choice([None, 1, 4]), async_scheduling=chance.random() < 0.7)
        served = serve(core, requests, chance, chance.choice([None, [7, 30], [96, 3, 18]]))
        engine.check(served, requests)
        stats = core.stats()
        num_preemptions, num_hits = num_preemptions + stats.num_preemptions, num_hits + stats.mm_cache_hits
    assert num_preemptions and num_hits


def test_mixes(engine):
    check_mixes(engine, range(6))


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"deterministic": True}, marks=pytest.mark.exhaustive),
        pytest.param({"tensor_parallel_size": 2, "speculative_config": NGRAM}, marks=pytest.mark.exhaustive),
        pytest.param({"tensor_parallel_size": 4, "mm_encoder_tp_mode": "data"}, marks=pytest.mark.exhaustive),
    ],
)
def test_mixes_bit_by_bit_with_drafts_and_over_devices(folder, options):
    engine = Engine(folder, token_buckets=(96,), **options)
    try:
        check_mixes(engine, range(6, 9))
    finally:
        engine.executor.shutdown()


@pytest.mark.exhaustive
def test_three_positions_for_every_chunk(tmp_path):
    """Transformers' logits of pictures of any size, which may be cut between steps, and the tokens behind them."""
    name = "qwen2_5_vl"
    write_seeing_checkpoint(name, tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(preprocessor_config_of(name)))
    engine = Engine(tmp_path, token_buckets=(96,), max_model_len=96, max_logprobs=8)
    requests = [
        EngineCoreRequest(
            f"r{number}",
            tokens,
            SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, seed=1, logprobs=2, prompt_logprobs=8),
            arrival_time=0.0,
            mm_features=features_in(name, tokens, own),
        )
        for number, (tokens, own) in enumerate(zip(prompts_of(name), pictures_of_prompts()))
    ]
    try:
        for number, request in enumerate(requests):
            check_golden(golden_of(name)["prompts"][number], engine.alone(request)[1])
        for chunks in ([1], [7], [3, 96]):
            engine.check(serve(engine.core(), requests, chunks=chunks), requests)
        core = engine.core()  # the second time pictures and beginnings are cached
        for _ in range(2):
            engine.check(serve(core, requests, chunks=[5]), requests)
    finally:
        engine.executor.shutdown()


def features_in(name, tokens, numbers):
    features, place = [], 0
    for number in numbers:
        pixels, grid = pictures_of(name)[number]
        place = tokens.index(IMAGE_TOKEN, place)
        runs = [(place, int(np.prod(grid)))]
        features.append(MultiModalFeature(bytes([number] * 32), "image", place, runs[0][1], runs, grid, pixels))
        place += runs[0][1]
    return features


def check_golden(golden, lines):
    """Scores of a prompt are transformers' logits, up to the shift of a softmax."""
    for (ids, logprobs), their_ids, logits in zip(lines, golden["ids"][:-1], golden["logits"]):
        found, theirs = dict(zip(ids, logprobs)), dict(zip(their_ids, logits))
        shifts = [found[each] - theirs[each] for each in found.keys() & theirs.keys()]
        assert len(shifts) >= 7 and max(shifts) - min(shifts) < 5e-4
