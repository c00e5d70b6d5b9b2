"""The same as in `test_pictures.py` of Gemma 4, whose pictures have any size. Their tokens see each other both ways in
layers with a window, which may be shorter than a picture; or nowhere."""

import numpy as np
import pytest

from jaxpaged.errors import RequestError
from jaxpaged.messages import MultiModalFeature
from tests.end_to_end.test_pictures import Engine, Prompt, check_beginning, serve, text
from tests.models.gemma4_checkpoints import MERGE, PATCH
from tests.models.paged import golden_of
from tests.models.seeing import features_in
from tests.models.seeing_checkpoints import (
    IMAGE_TOKEN,
    pictures_of,
    pictures_of_prompts,
    prompts_of,
    write_seeing_checkpoint,
)

OPTIONS = {
    "max_num_batched_tokens": 64,
    "token_buckets": (64,),
    "num_scheduler_steps": 1,
    "max_model_len": 64,
    "max_logprobs": 8,
    "encoder_cache_size": 64,
    "max_num_encoder_input_tokens": 16,
}
GRIDS = ((3, 4), (1, 2), (4, 3), (1, 1), (2, 5))
"""Rows and columns of embeddings; a picture has that of its number."""


class Gemma4Prompt(Prompt):
    """Tokens and features of parts: lists of tokens, and numbers of pictures."""

    def __init__(self, *parts):
        self.tokens, self.features = [], []
        for part in parts:
            if isinstance(part, list):
                self.tokens += part
                continue
            rows, columns = GRIDS[part % len(GRIDS)]
            run = len(self.tokens), rows * columns
            shape = (rows * columns * MERGE**2, 3 * PATCH**2)
            pixels = np.random.default_rng(part).integers(0, 256, shape).astype(np.uint8)
            self.tokens += [IMAGE_TOKEN] * run[1]
            self.features.append(
                MultiModalFeature(bytes([part] * 32), "image", *run, [run], (1, rows, columns), pixels)
            )


@pytest.fixture(
    scope="module", params=["gemma4_seeing_both_ways", pytest.param("gemma4_seeing", marks=pytest.mark.exhaustive)]
)
def engine(request, tmp_path_factory):
    engine = Engine(write_seeing_checkpoint(request.param, tmp_path_factory.mktemp("model")), **OPTIONS)
    engine.name = request.param
    yield engine
    engine.executor.shutdown()


def test_a_lone_request_gets_what_transformers_computes(engine):
    pictures = pictures_of(engine.name)
    for number, (tokens, golden) in enumerate(zip(prompts_of(engine.name), golden_of(engine.name)["prompts"])):
        own = [pictures[i] for i in pictures_of_prompts()[number]]
        prompt = Gemma4Prompt(tokens)
        for feature, (pixels, grid) in zip(features_in(tokens, [grid for _, grid in own]), own, strict=True):
            (run,) = feature.runs
            key = bytes([100 + number, feature.offset] * 16)
            prompt.features.append(MultiModalFeature(key, "image", *run, feature.runs, grid, pixels))
        _, lines = engine.alone(prompt.request("a", prompt_logprobs=8, max_tokens=1))
        of_prompt = [line for line in lines if line[0]][: len(tokens) - 1]
        for (ids, logprobs), top, logits in zip(of_prompt, golden["ids"], golden["logits"], strict=False):
            known, found = dict(zip(top, logits)), dict(zip(ids, logprobs))
            both = sorted(known.keys() & found.keys())
            assert len(both) > 5
            differences = [found[one] - found[both[0]] - known[one] + known[both[0]] for one in both]
            np.testing.assert_allclose(differences, 0, atol=5e-4)


LONG = Gemma4Prompt(text(1, 3), 0, text(2, 6), 1, text(3, 1), 2, text(4, 5))


@pytest.mark.parametrize("chunks", [[1], [5], [17, 1, 40]])
def test_every_chunk_gives_the_same(engine, chunks):
    request = LONG.request("a", prompt_logprobs=2)
    engine.check(serve(engine.core(), [request], chunks=chunks), [request])


@pytest.mark.parametrize(
    ("parts", "num_cached"),
    [
        ([5, text(2, 6), 1], 0),  # another picture of the same size where there was one
        ([0, text(9, 9)], 12),  # 3 tokens, and 9 of the picture's 12
        ([0, text(2, 6), 1, text(3, 1), 2, text(4, 5), text(9, 3)], 40),  # behind all of them
    ],
)
def test_cached_beginnings_before_in_and_behind_pictures(engine, parts, num_cached):
    check_beginning(engine, LONG, Gemma4Prompt(text(1, 3), *parts), Gemma4Prompt(*range(20, 25)), num_cached)


def test_a_picture_larger_than_any_that_programs_take_is_refused(engine):
    prompt, core = Gemma4Prompt(text(1, 3), 0), engine.core()
    prompt.features[0].grid, prompt.features[0].runs = (1, 17, 1), [(3, 17)]
    prompt.tokens += [IMAGE_TOKEN] * 5
    prompt.features[0].length = 17
    with pytest.raises(RequestError, match="17 embeddings"):
        core.add_request(prompt.request("a"))
    assert not core.has_work()


def test_texts_and_pictures_together(engine):
    parts = [[text(1, 9), 0], [2, text(2, 4), 1], [text(3, 20)], [text(1, 9), 0, text(5, 2), 4], [3, 7]]
    prompts = [Gemma4Prompt(*each) for each in parts]
    requests = [prompt.request(f"r{i}", max_tokens=9, prompt_logprobs=2) for i, prompt in enumerate(prompts)]
    engine.check(serve(engine.core(), requests, chunks=[64, 7]), requests)
