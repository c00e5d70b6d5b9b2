"""One name for a processed picture, by which all caches know it: in this process, in another one, on another machine.

It is made of the content and of all that decides what the encoder makes of it, never of what a client calls it.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpaged.encoding.cbor import encode_cbor
from jaxpaged.multimodal.processors.base import ProcessedPicture

VERSION = 1
"""Another one for every change of what a key is made of: keys are kept on disks."""


def picture_key(model: str, modality: str, options: Mapping[str, Any], picture: ProcessedPicture) -> bytes:
    """SHA-256 over canonical CBOR: 32 bytes.

    `model` names the checkpoint with its revision, `modality` is `image` or `video`, and `options` are the processor's.
    """
    layout, pixels = picture.layout, picture.pixels
    assert pixels.dtype == np.uint8 and pixels.shape == layout.pixels_shape, (pixels.dtype, pixels.shape, layout)
    parts = {
        "version": VERSION,
        "model": model,
        "modality": modality,
        "options": options,
        "layout": [layout.num_items, layout.rows, layout.columns],
        "shape": list(pixels.shape),
        "pixels": hashlib.sha256(np.ascontiguousarray(pixels)).digest(),
    }
    return hashlib.sha256(encode_cbor(parts)).digest()
