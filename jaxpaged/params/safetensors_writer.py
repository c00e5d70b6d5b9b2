"""Writes safetensors files: what `safetensors_reader` reads."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxpaged.params.safetensors_reader import ALL_DTYPES

NAMES = {dtype: name for name, dtype in ALL_DTYPES.items()}
ALIGNMENT = 8
"""The header, with the number that is its length, fills a multiple of so many bytes."""


def safetensors_of(tensors: Mapping[str, np.ndarray]) -> Iterator[bytes | np.ndarray]:
    """A file, in pieces: the length of a header, the header, and the tensors one behind the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        yield np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
