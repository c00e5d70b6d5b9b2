"""transformers' processor of Pillow is the oracle: same patches bit by bit, same grid."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from jaxpaged.errors import CheckpointError, RequestError
from jaxpaged.multimodal.processors import processor_of
from tests.multimodal.drawn import drawn

FIELD = "image"
QWEN2_5 = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
QWEN3 = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
SMALL = {**QWEN2_5, "min_pixels": 50000, "max_pixels": 60000}
SIZES = [(300, 200), (200, 301), (1, 1), (1, 200), (14, 13), (900, 700), (42, 70), (1000, 5)]


def processor(values, model_type="qwen2_5_vl", config=None):
    return processor_of({"model_type": model_type, **(config or {})}, values)


def check_equal(ours, theirs, image):
    processed = ours.process(np.asarray(image.convert("RGB")), FIELD)
    expected = theirs(images=[image], return_tensors="np")
    (frames, grid_rows, grid_columns) = expected["image_grid_thw"][0]
    layout = processed.layout
    assert (1, layout.rows * ours.merge, layout.columns * ours.merge) == (frames, grid_rows, grid_columns)
    assert layout.num_tokens == grid_rows * grid_columns // 4
    pixels = processed.pixels
    assert pixels.dtype == np.uint8 and pixels.shape == layout.pixels_shape
    cells = pixels.reshape(len(pixels), 3, -1)
    floats = np.stack([ours.table_CV[channel][cells[:, channel]] for channel in range(3)], axis=1)
    both = expected["pixel_values"].reshape(len(pixels), 3, 2, -1)
    for frame in range(2):
        assert np.array_equal(floats, both[:, :, frame])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("model_type", "values"), [("qwen2_5_vl", QWEN2_5), ("qwen2_5_vl", SMALL), ("qwen3_vl", QWEN3)]
)
def test_patches_have_the_bits_of_transformers(model_type, values, size):
    check_equal(processor(values, model_type), Qwen2VLImageProcessorPil(**values), drawn(*size, seed=sum(size)))


@pytest.mark.parametrize("mode", ["L", "P", "1", "CMYK"])
def test_every_mode_has_the_bits_of_transformers(mode):
    check_equal(processor(QWEN2_5), Qwen2VLImageProcessorPil(**QWEN2_5), drawn(90, 50, mode=mode))


@settings(max_examples=300, deadline=None)
@given(
    width=st.integers(1, 20000),
    height=st.integers(1, 20000),
    fewest=st.integers(1, 200_000),
    more=st.integers(0, 1_000_000),
    patch=st.sampled_from([14, 16]),
)
def test_the_size_is_that_of_transformers(width, height, fewest, more, patch):
    most = max(fewest + more, (2 * patch) ** 2)
    ours = processor({"patch_size": patch, "min_pixels": fewest, "max_pixels": most})
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(RequestError, match=f"{width}x{height}"):
            ours.layout(width, height, FIELD)
        return
    expected = smart_resize(height, width, 2 * patch, fewest, most)
    if 0 in expected:
        return  # theirs fails on it
    layout = ours.layout(width, height, FIELD)
    assert (layout.rows * ours.factor, layout.columns * ours.factor) == expected
    assert layout.pixels_shape == (layout.num_tokens * 4, 3 * patch**2)
    assert layout.placeholder == "<|image_pad|>" * layout.num_tokens


def test_a_picture_smaller_than_a_token_gives_a_token():
    ours = processor({"patch_size": 14, "min_pixels": 1, "max_pixels": 10000})
    for width, height in [(1, 1), (3, 100), (100, 3), (13, 13)]:
        assert ours.layout(width, height, FIELD).num_tokens >= 1


def test_published_settings_allow_16384_tokens_a_picture():
    assert processor(QWEN2_5).layout(20000, 20000, FIELD).num_tokens <= 16384
    assert processor(QWEN3, "qwen3_vl").layout(20000, 20000, FIELD).num_tokens == 16384


def test_options_of_a_request_change_the_limits():
    ours = processor(QWEN2_5)
    fewer = ours.with_options({"max_pixels": 3200}, "mm_processor_kwargs")
    assert fewer.layout(600, 600, FIELD).num_tokens == 4 < ours.layout(600, 600, FIELD).num_tokens
    edges = ours.with_options({"size": {"shortest_edge": 784, "longest_edge": 3200}}, "mm_processor_kwargs")
    assert edges.layout(600, 600, FIELD).num_tokens == 4
    assert fewer.options != ours.options


@pytest.mark.parametrize(
    "options", [{"max_pixels": 1}, {"min_pixels": 0}, {"max_pixel": 9999}, {"size": {"height": 3}}, {"size": 7}]
)
def test_bad_options_of_a_request_are_refused(options):
    with pytest.raises(RequestError) as caught:
        processor(QWEN2_5).with_options(options, "mm_processor_kwargs")
    assert caught.value.parameter == "mm_processor_kwargs"
    assert str(caught.value).startswith("mm_processor_kwargs")


@pytest.mark.parametrize(
    ("config", "values", "words"),
    [
        ({}, {"patch_size": 0}, "patch_size is 0"),
        ({}, {"merge_size": "2"}, "merge_size is '2'"),
        ({}, {"min_pixels": 9999, "max_pixels": 5000}, "max_pixels is 5000"),
        ({"vision_config": {"patch_size": 16}}, {}, "patch_size of vision_config"),
        ({"vision_config": {"spatial_merge_size": 1}}, {}, "spatial_merge_size"),
    ],
)
def test_a_broken_checkpoint_is_refused(config, values, words):
    with pytest.raises(CheckpointError, match=words):
        processor({**QWEN2_5, **values}, config=config)


@pytest.mark.parametrize("limits", [(4, 64), (64, 64), (1, 1), (300, 301), (1, 500)])
def test_no_picture_has_more_tokens_than_the_largest_grid(limits):
    small = processor({**SMALL, "min_pixels": 784 * limits[0], "max_pixels": 784 * limits[1]})
    sizes = [(width, height) for width in (1, 20, 61, 200, 3000) for height in (1, 15, 199, 230, 2000)]
    sizes = [size for size in sizes if max(size) <= 200 * min(size)] + [(200, 1), (1, 200), (5600, 28), (28, 5600)]
    most = max(small.layout(*size, FIELD).num_tokens for size in sizes)
    assert most <= math.prod(small.largest_grid)
