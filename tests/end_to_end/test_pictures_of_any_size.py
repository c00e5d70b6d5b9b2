"""The same as in `test_pictures.py` of a tower for pictures of any size, and of tokens that have three positions.

That a lone request gets transformers' logits is tested here too: tests/models/test_seeing.py has no engine.
"""

import random

import numpy as np
import pytest

from jaxpaged.messages import MultiModalFeature
from tests.end_to_end.test_pictures import NGRAM, Engine, Prompt, check_beginning, check_mixes, serve, text
from tests.models.paged import golden_of
from tests.models.seeing import features_in
from tests.models.seeing_checkpoints import (
    IMAGE_TOKEN,
    pictures_of,
    pictures_of_prompts,
    prompts_of,
    write_seeing_checkpoint,
)

NAME = "qwen3_vl"
OPTIONS = {"encoder_cache_size": 4 * 64, "max_num_encoder_input_tokens": 128, "num_gpu_blocks_override": 40}
GRIDS = ((3, 5), (1, 2), (4, 3), (1, 1), (2, 6))
"""Rows and columns of embeddings; a picture has that of its number."""


class AnyPrompt(Prompt):
    """Tokens and features of parts: lists of tokens, and numbers of pictures."""

    def __init__(self, *parts):
        self.tokens, self.features = [], []
        for part in parts:
            if isinstance(part, list):
                self.tokens += part
                continue
            rows, columns = GRIDS[part % len(GRIDS)]
            offset, length = len(self.tokens), rows * columns
            self.tokens += [IMAGE_TOKEN] * length
            pixels = np.random.default_rng(part).integers(0, 256, (4 * length, 48)).astype(np.uint8)
            runs, grid = [(offset, length)], (1, rows, columns)
            self.features.append(MultiModalFeature(bytes([part] * 32), "image", offset, length, runs, grid, pixels))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_seeing_checkpoint(NAME, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(folder):
    engine = Engine(folder, **OPTIONS)
    yield engine
    engine.executor.shutdown()


def test_a_lone_request_gets_what_transformers_computes(engine):
    pictures = pictures_of(NAME)
    for number, (tokens, golden) in enumerate(zip(prompts_of(NAME), golden_of(NAME)["prompts"], strict=True)):
        own = [pictures[i] for i in pictures_of_prompts()[number]]
        prompt = AnyPrompt(tokens)
        for feature, (pixels, grid) in zip(features_in(tokens, [grid for _, grid in own]), own, strict=True):
            (run,) = feature.runs
            key = bytes([100 + number, feature.offset] * 16)
            prompt.features.append(MultiModalFeature(key, "image", *run, feature.runs, grid, pixels))
        _, lines = engine.alone(prompt.request("a", prompt_logprobs=1, max_tokens=1))
        of_prompt = [line for line in lines if line[0]][: len(tokens) - 1]
        for (ids, logprobs), top, logits in zip(of_prompt, golden["ids"], golden["logits"], strict=False):
            known = dict(zip(top, logits, strict=True))
            found = dict(zip(ids, logprobs, strict=True))
            both = sorted(known.keys() & found.keys())
            for one in both[1:]:
                np.testing.assert_allclose(found[one] - found[both[0]], known[one] - known[both[0]], atol=5e-4)


LONG = AnyPrompt(text(1, 3), 0, text(2, 6), 1, text(3, 1), 2, text(4, 5))


@pytest.mark.parametrize("chunks", [[1], [5], [17], [23, 1, 40], [96]])
def test_every_chunk_gives_the_same(engine, chunks):
    request = LONG.request("a", prompt_logprobs=2)
    engine.check(serve(engine.core(), [request], chunks=chunks), [request])


@pytest.mark.parametrize(
    ("parts", "num_cached"),
    [
        ([5, text(2, 6), 1], 0),  # another picture of the same size where there was one
        ([10, text(2, 6), 1], 0),
        ([0, text(9, 9)], 16),  # 3 tokens, and 13 of the picture's 15
        ([0, text(2, 6), 6, text(3, 1)], 24),  # up to the second picture
        ([0, text(2, 6), 1, text(3, 1), 2, text(9, 3)], 36),  # 9 of the third picture's 12
        ([0, text(2, 6), 1, text(3, 1), 2, text(4, 5), text(9, 3)], 44),  # behind all of them
    ],
)
def test_cached_beginnings_before_in_and_behind_pictures(engine, parts, num_cached):
    check_beginning(engine, LONG, AnyPrompt(text(1, 3), *parts), AnyPrompt(*range(20, 26)), num_cached)


def random_request(index):
    """Text and pictures of which others have some too."""
    draw = random.Random(index)
    parts = [text(draw.choice([1, 2]), 6)] if draw.random() < 0.5 else []
    for _ in range(draw.choice([0, 1, 1, 2, 3])):
        parts += [draw.randrange(9), text(draw.randrange(3), draw.choice([1, 2, 7]))]
    if draw.random() < 0.2:
        parts.append(draw.randrange(9))  # the prompt ends in it
    prompt = AnyPrompt(*(parts or [text(index, 9)]))
    params = {"prompt_logprobs": 2} if draw.random() < 0.2 else {}
    return prompt.request(f"r{index}", **{"max_tokens": draw.choice([3, 4, 14, 30]), "seed": index, **params})


REQUESTS = [request for request in map(random_request, range(60)) if len(request.prompt_token_ids) < 90][:40]


def test_mixes(engine):
    check_mixes(engine, range(4), REQUESTS)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"deterministic": True}, marks=pytest.mark.exhaustive),
        pytest.param({"tensor_parallel_size": 2, "speculative_config": NGRAM}, marks=pytest.mark.exhaustive),
        pytest.param({"tensor_parallel_size": 4, "mm_encoder_tp_mode": "data"}, marks=pytest.mark.exhaustive),
    ],
)
def test_mixes_bit_by_bit_with_drafts_and_over_devices(folder, options):
    engine = Engine(folder, **OPTIONS, **options)
    try:
        check_mixes(engine, range(6, 8), REQUESTS)
    finally:
        engine.executor.shutdown()
