"""transformers' processor of Pillow is the oracle: same pixels bit by bit, same size; and its words of placeholders."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.pixtral.image_processing_pil_pixtral import (
    PixtralImageProcessorPil,
    get_resize_output_image_size,
)

from jaxpaged.errors import CheckpointError, RequestError
from jaxpaged.multimodal.processors import processor_of
from tests.multimodal.drawn import drawn

FIELD = "image"
CONFIG = {"model_type": "mistral3", "spatial_merge_size": 2, "vision_config": {"patch_size": 14}}
PUBLISHED = {"patch_size": {"height": 14, "width": 14}, "size": {"longest_edge": 1540}}
SMALL = {"patch_size": 14, "size": {"longest_edge": 140}}
SIZES = [(300, 200), (200, 301), (1, 1), (28, 27), (1900, 700), (42, 70), (1000, 5)]


def processor(values, **config):
    return processor_of({**CONFIG, **config}, values)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("values", [PUBLISHED, SMALL])
def test_pixels_have_the_bits_of_transformers(values, size):
    ours, image = processor(values), drawn(*size, seed=sum(size))
    if size == (1000, 5) and values is SMALL:
        return  # theirs has no row left
    processed = ours.process(np.asarray(image), FIELD)
    theirs = PixtralImageProcessorPil(size=values["size"], patch_size={"height": 28, "width": 28})
    expected = theirs(images=[image], return_tensors="np")["pixel_values"][0]
    layout = processed.layout
    assert expected.shape == (3, layout.rows * 28, layout.columns * 28)
    assert processed.pixels.dtype == np.uint8 and processed.pixels.shape == layout.pixels_shape
    cells = processed.pixels.reshape(layout.rows, layout.columns, 2, 2, 3, 14, 14)
    whole = cells.transpose(4, 0, 2, 5, 1, 3, 6).reshape(expected.shape)
    floats = np.stack([ours.table_CV[channel][whole[channel]] for channel in range(3)])
    assert np.array_equal(floats, expected)


@settings(max_examples=300, deadline=None)
@given(width=st.integers(1, 20000), height=st.integers(1, 20000), longest=st.integers(28, 2000))
def test_the_size_is_that_of_transformers(width, height, longest):
    layout = processor({"size": {"longest_edge": longest}}).layout(width, height, FIELD)
    expected = get_resize_output_image_size(np.empty((3, height, width)), longest, 28, "channels_first")
    assert (layout.rows * 28, layout.columns * 28) == tuple(max(28, side) for side in expected)
    assert layout.num_tokens <= math.prod(processor({"size": {"longest_edge": longest}}).largest_grid)


def test_each_row_ends_with_a_break_and_the_last_with_the_end():
    layout = processor(PUBLISHED).layout(56, 84, FIELD)
    assert layout.placeholder == "[IMG][IMG][IMG_BREAK]" * 2 + "[IMG][IMG][IMG_END]"
    assert (layout.num_tokens, processor(PUBLISHED).layout(1, 1, FIELD).placeholder) == (6, "[IMG][IMG_END]")


def test_patches_of_pixtral_12b_are_not_merged():
    config = {"model_type": "llava", "vision_config": {"model_type": "pixtral", "patch_size": 16}}
    ours = processor_of(config, {"patch_size": {"height": 16, "width": 16}, "size": {"longest_edge": 1024}})
    for width, height in SIZES:
        layout = ours.layout(width, height, FIELD)
        expected = get_resize_output_image_size(np.empty((3, height, width)), 1024, 16, "channels_first")
        assert (layout.rows * 16, layout.columns * 16) == tuple(expected)
        assert layout.pixels_shape == (layout.num_tokens, 3 * 16 * 16)
    assert ours.layout(32, 16, FIELD).placeholder == "[IMG][IMG][IMG_END]"


def test_published_settings_allow_3025_tokens_a_picture():
    ours = processor(PUBLISHED)
    assert ours.layout(20000, 20000, FIELD).num_tokens == 3025 == math.prod(ours.largest_grid)


def test_options_of_a_request_change_the_size():
    ours = processor(PUBLISHED)
    for size in ({"longest_edge": 56}, {"height": 56, "width": 60}):
        smaller = ours.with_options({"size": size}, "mm_processor_kwargs")
        assert smaller.layout(600, 600, FIELD).num_tokens == 4
        assert smaller.options != ours.options


@pytest.mark.parametrize("options", [{"size": {"longest_edge": 0}}, {"size": {"height": 3}}, {"size": 9e9}, {"x": 1}])
def test_bad_options_of_a_request_are_refused(options):
    with pytest.raises(RequestError) as caught:
        processor(PUBLISHED).with_options(options, "mm_processor_kwargs")
    assert caught.value.parameter == "mm_processor_kwargs"


@pytest.mark.parametrize(
    ("config", "values", "words"),
    [
        ({}, {"patch_size": 16}, "height of patch_size is 16, but patches of vision_config are 14"),
        ({}, {"patch_size": "14"}, "patch_size has not just height and width"),
        ({"spatial_merge_size": 0}, {}, "spatial_merge_size is 0"),
        ({}, {"do_resize": False}, "do_resize is false"),
        ({}, {"size": {"longest_edge": 1024, "width": 3}}, "size has not just"),
    ],
)
def test_a_broken_checkpoint_is_refused(config, values, words):
    with pytest.raises(CheckpointError, match=words):
        processor(values, **config)
