"""Writes safetensors files: what `safetensors_reader` reads."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpaged.params.safetensors_reader import ALL_DTYPES

NAMES = {dtype: name for name, dtype in ALL_DTYPES.items()}
ALIGNMENT = 8
"""The header, with the number that is its length, fills a multiple of so many bytes."""


def header_of_file(described: Mapping[str, tuple[np.dtype, Sequence[int]]]) -> bytes:
    """The beginning of a file with tensors of these types and shapes: the length of a header, and the header."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in described.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def safetensors_of(tensors: Mapping[str, np.ndarray]) -> Iterator[bytes | np.ndarray]:
    """A file, in pieces: its beginning, and the tensors one behind the other."""
    yield header_of_file({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()})
    for tensor in tensors.values():
        yield np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
