"""Writes GGUF files for tests, whole ones and damaged ones."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxpaged.params.formats.gguf.types import TYPES

NUMBERS = {kind.name: number for number, kind in TYPES.items()}
PLAIN = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(ml_dtypes.bfloat16): "BF16"}
STRING, ARRAY = 8, 9


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def fact(value: Any) -> bytes:
    """A value with its kind in front. Whole numbers have 32 bits."""
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", STRING) + text(value)
        case bytes():
            return value
        case [str(), *_]:
            return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(text, value))
    array = np.asarray(value)
    kind = {"f": 6, "i": 5}[array.dtype.kind]
    return struct.pack("<IIQ", ARRAY, kind, len(array)) + array.astype({6: "<f4", 5: "<i4"}[kind]).tobytes()


def write_gguf(
    path: Path,
    facts: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray | tuple[str, np.ndarray]],
    offsets: Mapping[str, int] | None = None,
    version: int = 3,
) -> Path:
    """Tensors are arrays of plain types, or (type, bytes of rows). `offsets`: what the header says instead."""
    header, data = b"", b""
    for name, tensor in tensors.items():
        kind, array = tensor if isinstance(tensor, tuple) else (PLAIN[tensor.dtype], tensor)
        shape = array.shape
        if isinstance(tensor, tuple):
            found = TYPES[NUMBERS[kind]]
            shape = (*shape[:-1], shape[-1] // found.num_bytes * found.block)
        data += bytes(-len(data) % 32)
        offset = (offsets or {}).get(name, len(data))
        header += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], NUMBERS[kind], offset)
        data += array.tobytes()
    start = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(facts))
    start += b"".join(text(name) + fact(value) for name, value in facts.items()) + header
    path.write_bytes(start + bytes(-len(start) % 32) + data)
    return path
