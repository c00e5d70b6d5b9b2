"""Small pictures of what an encoder sees, from each family's pixels."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from jaxpaged.multimodal.processors import processor_of
from jaxpaged.multimodal.processors.base import PictureLayout, merged_patches
from jaxpaged.multimodal.thumbnails import SIDE, data_url, seen_pixels, thumbnail
from tests.multimodal.drawn import drawn


@pytest.mark.parametrize(("side", "merge"), [(4, 1), (4, 2), (2, 3)])
def test_patches_are_put_together_again(side, merge):
    rows, columns = 3, 5
    pixels = np.asarray(drawn(columns * side * merge, rows * side * merge))
    patches = merged_patches(pixels, side, merge)
    assert np.array_equal(seen_pixels(patches, PictureLayout(1, rows, columns, patches.shape, "")), pixels)


def test_of_a_moment_of_a_video_the_first_frame_is_shown():
    frames = [np.asarray(drawn(24, 16, seed)) for seed in (0, 1)]
    videos = processor_of({"model_type": "qwen3_vl"}, {"patch_size": 4}).videos
    moment = videos.process(frames, videos.moment_layout(2, 3))
    assert np.array_equal(seen_pixels(moment.pixels, moment.layout), frames[0])


def test_of_a_picture_with_crops_the_whole_is_shown_and_small():
    pixels = np.stack([np.asarray(drawn(200, 100, seed)) for seed in (0, 1)])
    layout = PictureLayout(2, 4, 4, pixels.shape, "")
    assert np.array_equal(seen_pixels(pixels, layout), pixels[0])
    small = thumbnail(pixels, layout)
    assert small.shape == (SIDE // 2, SIDE, 3) and small.dtype == np.uint8
    kind, _, content = data_url(small).partition(";base64,")
    assert kind == "data:image/png"
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(base64.b64decode(content)))), small)
