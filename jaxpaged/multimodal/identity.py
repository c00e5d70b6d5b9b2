"""One name for a picture, by which all caches know it: in this process, in another one, on another machine.

It is made of the picture as it was given (a file's bytes, or an array's) and of all that decides what the encoder makes
of it, never of what a client calls it. Nothing is decoded for it, so a router that sees only bytes can tell it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxpaged.encoding.cbor import encode_cbor
from jaxpaged.multimodal.processors.base import PictureLayout

Colour = tuple[int, int, int]
WHITE: Colour = (255, 255, 255)
"""What transparent pixels are laid on where nobody says otherwise; then a key does not name it."""
VERSION = 2
"""Another one for every change of what a key is made of: keys are kept on disks."""


Source = bytes | memoryview | np.ndarray
"""The bytes of a file, or an array of uint8."""


def source_digest(source: Source | tuple[Source, ...]) -> bytes:
    """Of the bytes of a file, of an array with its shape, or of several, the frames of a moment: 32 bytes."""
    parts: dict[str, Any]
    if isinstance(source, tuple):
        parts = {"frames": [source_digest(each) for each in source]}
    elif isinstance(source, np.ndarray):
        parts = {"shape": list(source.shape), "array": hashlib.sha256(np.ascontiguousarray(source)).digest()}
    else:
        parts = {"file": hashlib.sha256(source).digest()}
    return hashlib.sha256(encode_cbor(parts)).digest()


def options_on(options: Mapping[str, Any], background: Sequence[int]) -> dict[str, Any]:
    """A processor's options with the colour behind transparent pixels, unless that is white."""
    return dict(options) if tuple(background) == WHITE else {**options, "background": list(background)}


def adapted_key(key: bytes, digest: str) -> bytes:
    """The key of a picture whose embeddings an adapter makes its own, of the picture's and the adapter's digest."""
    return hashlib.sha256(encode_cbor([key, ["lora", digest]])).digest()


def picture_key(model: str, modality: str, options: Mapping[str, Any], layout: PictureLayout, source: bytes) -> bytes:
    """SHA-256 over canonical CBOR: 32 bytes.

    `model` names the checkpoint with its revision, `modality` is `image` or `video`, `options` are the processor's,
    and `source` is the picture's `source_digest`.
    """
    parts = {
        "version": VERSION,
        "model": model,
        "modality": modality,
        "options": options,
        "layout": [layout.num_items, layout.rows, layout.columns],
        "shape": list(layout.pixels_shape),
        "source": source,
    }
    return hashlib.sha256(encode_cbor(parts)).digest()
