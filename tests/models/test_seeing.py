"""Models that see against what transformers computed of prompts with pictures: logits, as greedy text hides errors."""

import numpy as np
import pytest

from jaxpaged.multimodal.processors import processor_of
from tests.models.gemma4_checkpoints import GEMMA4_SEEING
from tests.models.paged import golden_of
from tests.models.pixtral_checkpoints import PIXTRAL
from tests.models.qwen_vl_checkpoints import QWEN_VL, TIMES, VIDEO_GRID, VIDEO_TOKEN
from tests.models.seeing import Feature, SeeingModel, features_in, runs_of
from tests.models.seeing_checkpoints import (
    SEEING,
    pictures_of,
    pictures_of_prompts,
    preprocessor_config_of,
    prompts_of,
    video_of,
    video_prompt_of,
    write_seeing_checkpoint,
)


def load(name, folder, num_shards=1):
    table_CV = processor_of(SEEING[name], preprocessor_config_of(name)).table_CV
    return SeeingModel(write_seeing_checkpoint(name, folder), table_CV, num_shards)


def size_of(name):
    """A bucket that all pictures of a prompt fit into."""
    if name in GEMMA4_SEEING:
        return 126
    return 128 if name in QWEN_VL or name in PIXTRAL else 4


def logits_of(model, name, number, chunks=None):
    pictures = [pictures_of(name)[i] for i in pictures_of_prompts()[number]]
    return model.prompt_logits(prompts_of(name)[number], pictures, size_of(name), chunks)


def check(logits, golden):
    np.testing.assert_allclose(np.take_along_axis(logits, np.array(golden["ids"]), 1), golden["logits"], 1e-4, 1e-4)
    np.testing.assert_allclose(logits.sum(axis=1), golden["sums"], rtol=1e-4, atol=3e-3)


@pytest.mark.parametrize("name", SEEING)
def test_logits_are_those_of_transformers(name, tmp_path):
    model = load(name, tmp_path)
    for number, golden in enumerate(golden_of(name)["prompts"]):
        check(logits_of(model, name, number), golden)


@pytest.mark.parametrize("name", ["gemma3_seeing"])
def test_chunks_end_anywhere_but_inside_of_pictures_that_see_both_ways(name, tmp_path):
    model, golden = load(name, tmp_path), golden_of(name)["prompts"][0]
    prompt = prompts_of(name)[0]
    ends = [0, *(end for start, length in runs_of(prompt) for end in (start, start + length)), len(prompt)]
    check(logits_of(model, name, 0, [length for length in np.diff(ends) if length]), golden)
    cut_within = logits_of(model, name, 0, [8, len(prompt) - 8])
    assert np.abs(cut_within.sum(axis=1) - golden["sums"])[-5:].max() > 0.01


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "mistral3"])
def test_chunks_end_anywhere_where_tokens_see_backwards(name, tmp_path):
    model, golden, prompt = load(name, tmp_path), golden_of(name)["prompts"][0], prompts_of(name)[0]
    for length in (1, 4, 11, len(prompt) - 1):
        check(logits_of(model, name, 0, [min(length, len(prompt) - i) for i in range(0, len(prompt), length)]), golden)


def moments_in(name, prompt):
    """The features of a video, of which each moment is one run or a part of the only one."""
    _, rows, columns = VIDEO_GRID
    starts = [at for at, token in enumerate(prompt) if token == VIDEO_TOKEN][:: rows * columns]
    is_apart = name == "qwen3_vl"
    return [
        Feature(start, [(start, rows * columns)], (1, rows, columns), 0 if is_apart else i, time)
        for i, (start, time) in enumerate(zip(starts, TIMES[name], strict=True))
    ]


@pytest.mark.parametrize("name", TIMES)
def test_logits_of_a_video_and_a_picture_are_those_of_transformers(name, tmp_path):
    model, prompt, picture = load(name, tmp_path), video_prompt_of(name), pictures_of(name)[1]
    moments = [(pixels, (1, *VIDEO_GRID[1:])) for pixels in video_of(name)]
    rows_EX = np.concatenate([model.embeds(moments, 96), model.embeds([picture], 8)])
    features = [*moments_in(name, prompt), *features_in([0 if i == VIDEO_TOKEN else i for i in prompt], [picture[1]])]
    golden = golden_of(name)["video"]
    check(model.logits_with(prompt, features, rows_EX), golden)
    check(model.logits_with(prompt, features, rows_EX, [7, 10, 11, len(prompt) - 28]), golden)
    alone = np.concatenate([model.embeds([moment], 96)[:8] for moment in moments])
    np.testing.assert_allclose(alone, rows_EX[:24], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "num_shards"),
    [
        ("gemma3_seeing", 2),
        pytest.param("gemma3_seeing", 8, marks=pytest.mark.exhaustive),
        pytest.param("qwen2_5_vl", 2, marks=pytest.mark.exhaustive),
        ("qwen3_vl_moe", 4),
        ("qwen3_vl", 8),
        pytest.param("mistral3", 4, marks=pytest.mark.exhaustive),
    ],
)
def test_devices_give_the_logits_of_one(name, num_shards, tmp_path):
    check(logits_of(load(name, tmp_path, num_shards), name, 0), golden_of(name)["prompts"][0])
