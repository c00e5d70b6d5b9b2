import hashlib
import subprocess
import sys

import cbor2
import numpy as np
import pytest

from jaxpaged.multimodal.identity import picture_key
from jaxpaged.multimodal.processors import processor_of
from jaxpaged.multimodal.processors.base import ProcessedPicture
from tests.multimodal.drawn import drawn

GEMMA = {"size": {"height": 56, "width": 56}, "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 16}
PROGRAM = """
import sys
import numpy as np
from tests.multimodal.test_identity import key
print(key().hex(), key(width=91).hex())
"""


def processor():
    return processor_of({"model_type": "gemma3", "mm_tokens_per_image": 16}, GEMMA)


def key(model="google/gemma-3-4b-it", modality="image", options=None, width=90) -> bytes:
    ours = processor()
    picture = ours.process(np.asarray(drawn(width, 40)), "image")
    return picture_key(model, modality, ours.options if options is None else options, picture)


def test_a_key_is_sha_256_of_what_another_library_writes_as_canonical_cbor():
    ours = processor()
    picture = ours.process(np.asarray(drawn(90, 40)), "image")
    parts = {
        "version": 1,
        "model": "m",
        "modality": "image",
        "options": {"size": [56, 56], "resample": 2, "pan_and_scan": [16, 4, 1.2]},
        "layout": [3, 4, 4],
        "shape": [3, 56, 56, 3],
        "pixels": hashlib.sha256(picture.pixels.tobytes()).digest(),
    }
    expected = hashlib.sha256(cbor2.dumps(parts, canonical=True)).digest()
    assert picture_key("m", "image", ours.options, picture) == expected


def test_keys_are_equal_in_two_processes():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [key().hex(), key(width=91).hex()]


def test_a_key_depends_on_everything_that_decides_what_the_encoder_gives():
    others = [
        key(model="google/gemma-3-12b-it"),
        key(modality="video"),
        key(options={}),
        key(options={**processor().options, "resample": 3}),
        key(width=91),
    ]
    assert len({key(), *others}) == 6


def test_one_value_of_one_pixel_makes_another_key_and_the_order_in_memory_does_not():
    picture = processor().process(np.asarray(drawn(90, 40)), "image")
    first = picture_key("m", "image", {}, picture)
    turned = ProcessedPicture(np.asfortranarray(picture.pixels), picture.layout)
    assert picture_key("m", "image", {}, turned) == first
    other = picture.pixels.copy()
    other[-1, -1, -1, -1] ^= 1
    assert picture_key("m", "image", {}, ProcessedPicture(other, picture.layout)) != first


def test_the_same_bytes_in_another_shape_are_another_picture():
    ours = processor_of({"model_type": "qwen2_5_vl"}, {"min_pixels": 1, "max_pixels": 100000})
    flat, tall = (ours.process(np.zeros((h, w, 3), np.uint8), "image") for w, h in ((56, 28), (28, 56)))
    assert flat.pixels.tobytes() == tall.pixels.tobytes() and flat.pixels.shape == tall.pixels.shape
    assert picture_key("m", "image", {}, flat) != picture_key("m", "image", {}, tall)


def test_pixels_that_are_not_those_of_the_layout_are_a_mistake_of_ours():
    picture = processor().process(np.asarray(drawn(90, 40)), "image")
    with pytest.raises(AssertionError):
        picture_key("m", "image", {}, ProcessedPicture(picture.pixels[:1], picture.layout))
