"""The same as in `test_pictures.py` of a tower for pictures of any size, and of tokens that have three positions.

That a lone request gets transformers' logits is tested here too: tests/models/test_seeing.py has no engine.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest

from jaxpaged.messages import MultiModalFeature
from tests.end_to_end.test_pictures import NGRAM, Engine, Prompt, check_beginning, check_mixes, serve, text
from tests.models.paged import golden_of
from tests.models.qwen_vl_checkpoints import VIDEO_TOKEN
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
    """Tokens and features of parts: lists of tokens, numbers of pictures, and videos."""

    def __init__(self, *parts):
        self.tokens, self.features = [], []
        for part in parts:
            if isinstance(part, list):
                self.tokens += part
                continue
            if isinstance(part, Video):
                self.add_video(part)
                continue
            rows, columns = GRIDS[part % len(GRIDS)]
            offset, length = len(self.tokens), rows * columns
            self.tokens += [IMAGE_TOKEN] * length
            pixels = np.random.default_rng(part).integers(0, 256, (4 * length, 48)).astype(np.uint8)
            runs, grid = [(offset, length)], (1, rows, columns)
            self.features.append(MultiModalFeature(bytes([part] * 32), "image", offset, length, runs, grid, pixels))

    def add_video(self, video):
        rows, columns = 1, 3
        for i, (number, time) in enumerate(zip(video.numbers, video.times, strict=True)):
            offset = len(self.tokens)
            self.tokens += [VIDEO_TOKEN] * 3
            pixels = np.random.default_rng(number).integers(0, 256, (12, 96)).astype(np.uint8)
            key, run = bytes([200 + number] * 32), (offset, 3)
            feature = MultiModalFeature(key, "video", *run, [run], (1, rows, columns), pixels, moment=i, time=time)
            self.features.append(feature)


class Video(NamedTuple):
    """A video of these moments, at these positions in time."""

    numbers: Sequence[int]
    times: Sequence[int]


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


SEEN = AnyPrompt(text(1, 3), Video((0, 1, 2, 3, 1), (0, 2, 3, 5, 9)), text(2, 6), 1, text(3, 5))


@pytest.mark.parametrize("chunks", [[5], [4, 1, 9, 40]])
def test_every_chunk_of_a_video_gives_the_same(engine, chunks):
    request = SEEN.request("a", prompt_logprobs=2)
    engine.check(serve(engine.core(), [request], chunks=chunks), [request])


@pytest.mark.parametrize(
    ("parts", "num_cached"),
    [
        ([Video((0, 1, 5, 3, 1), (0, 2, 3, 5, 9)), text(2, 6)], 8),  # up to another moment
        ([Video((0, 1, 2), (0, 2, 3)), text(2, 6), 1], 12),  # it ends before
        ([Video((0, 1, 2, 3, 1), (0, 2, 4, 5, 9)), text(2, 6)], 8),  # the same moments at other times
        ([Video((0, 1, 2, 3, 1), (0, 2, 3, 5, 9)), text(2, 6), 6, text(3, 5)], 24),  # up to another picture
    ],
)
def test_cached_beginnings_within_and_behind_a_video(engine, parts, num_cached):
    check_beginning(engine, SEEN, AnyPrompt(text(1, 3), *parts), AnyPrompt(*range(20, 26)), num_cached)


def test_mixes_with_videos(engine):
    """Preempted, in batches with pictures and texts, and with moments that several have."""
    draw = random.Random(3)
    videos = [Video(tuple(draw.randrange(6) for _ in range(size)), tuple(range(size))) for size in (1, 2, 5, 7, 4, 9)]
    prompts = [AnyPrompt(text(i % 2, 3), video, text(4, 2), *([i] if i % 2 else [])) for i, video in enumerate(videos)]
    requests = [each.request(f"v{i}", max_tokens=14, seed=i) for i, each in enumerate(prompts)]
    check_mixes(engine, range(2), [*requests, *REQUESTS[:14]])


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
