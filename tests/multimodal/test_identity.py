import hashlib
import subprocess
import sys

import cbor2
import numpy as np

from jaxpaged.multimodal.identity import picture_key, source_digest
from jaxpaged.multimodal.processors import processor_of
from tests.multimodal.drawn import drawn

GEMMA = {"size": {"height": 56, "width": 56}, "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 16}
PROGRAM = """
import sys
import numpy as np
from tests.multimodal.test_identity import key
print(key().hex(), key(width=40).hex())
"""


def processor():
    return processor_of({"model_type": "gemma3", "mm_tokens_per_image": 16}, GEMMA)


def key(model="google/gemma-3-4b-it", modality="image", options=None, source=b"file", width=90) -> bytes:
    ours = processor()
    layout = ours.layout(width, 40, "image")
    return picture_key(model, modality, ours.options if options is None else options, layout, source_digest(source))


def test_a_key_is_sha_256_of_what_another_library_writes_as_canonical_cbor():
    ours, source = processor(), b"bytes of a file"
    parts = {
        "version": 2,
        "model": "m",
        "modality": "image",
        "options": {"size": [56, 56], "resample": 2, "pan_and_scan": [16, 4, 1.2]},
        "layout": [3, 4, 4],
        "shape": [3, 56, 56, 3],
        "source": canonical({"file": hashlib.sha256(source).digest()}),
    }
    assert picture_key("m", "image", ours.options, ours.layout(90, 40, "image"), source_digest(source)) == canonical(
        parts
    )


def canonical(value) -> bytes:
    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()


def test_keys_are_equal_in_two_processes():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [key().hex(), key(width=40).hex()]


def test_a_key_depends_on_everything_that_decides_what_the_encoder_gives():
    others = [
        key(model="google/gemma-3-12b-it"),
        key(modality="video"),
        key(options={}),
        key(options={**processor().options, "resample": 3}),
        key(source=b"filf"),
        key(width=40),
    ]
    assert len({key(), *others}) == 7


def test_of_arrays_values_and_shape_count_and_their_order_in_memory_does_not():
    array = np.asarray(drawn(90, 40))
    first = source_digest(array)
    assert source_digest(np.asfortranarray(array)) == first
    other = array.copy()
    other[-1, -1, -1] ^= 1
    assert source_digest(other) != first
    assert source_digest(array.reshape(90, 40, 3)) != first
    assert source_digest(array.tobytes()) != first, "a file is no array"
