"""transformers' processor of Pillow is the oracle: same pixels bit by bit, same size; and its words of placeholders."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)

from jaxpaged.errors import CheckpointError, RequestError
from jaxpaged.multimodal.processors import processor_of
from tests.multimodal.drawn import drawn

FIELD = "image"
CONFIG = {"model_type": "gemma4", "vision_config": {"patch_size": 16, "pooling_kernel_size": 3}}
PUBLISHED = {"do_normalize": False, "image_mean": [0.0] * 3, "image_std": [1.0] * 3, "max_soft_tokens": 280}


def processor(values, **config):
    return processor_of({**CONFIG, **config}, values)


@pytest.mark.parametrize("size", [(300, 200), (1, 1), (1900, 700), (48, 47), (3000, 4), (4, 3000), (768, 768)])
@pytest.mark.parametrize("max_tokens", [70, 280])
def test_pixels_have_the_bits_of_transformers(max_tokens, size):
    values = {**PUBLISHED, "max_soft_tokens": max_tokens}
    ours, image = processor(values), drawn(*size, seed=sum(size))
    processed = ours.process(np.asarray(image), FIELD)
    theirs = Gemma4ImageProcessorPil(**values)(images=[image], return_tensors="np")
    rows, columns = processed.layout.rows, processed.layout.columns
    count = processed.layout.num_tokens * 9
    assert processed.layout.num_tokens == theirs["num_soft_tokens_per_image"][0]
    assert processed.pixels.dtype == np.uint8 and processed.pixels.shape == processed.layout.pixels_shape
    cells = processed.pixels.reshape(rows, columns, 3, 3, 3, 16, 16).transpose(0, 2, 1, 3, 5, 6, 4)
    floats = np.stack([ours.table_CV[c][cells[..., c]] for c in range(3)], axis=-1).reshape(count, -1)
    expected = 2 * (theirs["pixel_values"][0, :count].astype(np.float32) - np.float32(0.5))
    assert np.array_equal(floats, expected)
    x, y = theirs["image_position_ids"][0, count - 1]
    assert (x + 1, y + 1) == (columns * 3, rows * 3)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 20000), st.integers(1, 20000), st.sampled_from([70, 140, 280, 560, 1120]))
def test_the_size_is_that_of_transformers(width, height, max_tokens):
    layout = processor({"max_soft_tokens": max_tokens}).layout(width, height, FIELD)
    expected = get_aspect_ratio_preserving_size(height, width, 16, max_tokens * 9, 3)
    assert (layout.rows * 48, layout.columns * 48) == expected
    assert layout.num_tokens <= max_tokens


def test_a_picture_stands_between_its_marks():
    assert processor(PUBLISHED).layout_of(2, 1).placeholder == "<|image><|image|><|image|><image|>"


def test_a_request_may_ask_for_more_tokens():
    ours = processor(PUBLISHED)
    finer = ours.with_options({"max_soft_tokens": 1120}, "mm_processor_kwargs")
    assert ours.layout(900, 900, FIELD).num_tokens == 256 and finer.layout(900, 900, FIELD).num_tokens == 1089
    assert finer.options != ours.options


@pytest.mark.parametrize("options", [{"max_soft_tokens": 100}, {"max_soft_tokens": "70"}, {"size": 3}])
def test_bad_options_of_a_request_are_refused(options):
    with pytest.raises(RequestError) as caught:
        processor(PUBLISHED).with_options(options, "mm_processor_kwargs")
    assert caught.value.parameter == "mm_processor_kwargs"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"patch_size": 14}, "patch_size is 14, but 16 in vision_config"),
        ({"pooling_kernel_size": 2}, "pooling_kernel_size is 2, but 3 in vision_config"),
        ({"max_soft_tokens": 281}, "max_soft_tokens is 281, none of 70, 140, 280, 560, 1120"),
        ({"do_resize": False}, "do_resize is false"),
    ],
)
def test_a_broken_checkpoint_is_refused(values, words):
    with pytest.raises(CheckpointError, match=words):
        processor(values)


def test_a_table_of_places_that_a_long_picture_would_leave_is_refused():
    with pytest.raises(CheckpointError, match="280, too many for 839 places"):
        processor(PUBLISHED, vision_config={"position_embedding_size": 839})
