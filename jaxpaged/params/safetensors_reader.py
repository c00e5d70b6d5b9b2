"""Reads safetensors files: a header that says where every tensor lies, and one tensor at a time by memory map.

The format: 8 bytes (little endian) with the length of the header, the header as JSON, then the data. Everything
the header claims is checked against the file before any data is used. Knows neither models nor devices.
"""

import json
import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.params.formats.gguf.blocks import DECODERS

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""The types that weights may have. Others appear in quantised checkpoints only."""
WHOLE_DTYPES = {"I32": np.dtype(np.int32), "I64": np.dtype(np.int64)}
"""The types of tables of token ids."""
BYTE_DTYPES = {"U8": np.dtype(np.uint8)}
"""Those of weights that are packed (`formats/float4.py`)."""
BOOL_DTYPES = {"BOOL": np.dtype(np.bool_)}
"""That of tables which say yes or no of every token."""
EIGHT_BITS = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I8": np.dtype(np.int8),
}
"""The types of weights that are numbers only together with their scales, and of such scales."""
ALL_DTYPES = {**DTYPES, **WHOLE_DTYPES, **BYTE_DTYPES, **EIGHT_BITS, **BOOL_DTYPES}
"""Those of the format whose tensors are read or written."""
BLOCKS = dict.fromkeys(DECODERS, np.dtype(np.uint8))
"""Those of weights in a GGUF file, in bytes: such a file is read by the same road (`gguf_folder`)."""
STORED_DTYPES = {**DTYPES, **WHOLE_DTYPES, **BYTE_DTYPES, **EIGHT_BITS, **BLOCKS}
"""Those of the tensors that a quantised checkpoint has in place of a weight (`schemes`)."""

MAX_HEADER_BYTES = 100_000_000
"""The limit of the format's own implementation; a larger number means a damaged file."""

AGAIN = "The file is damaged or was not downloaded completely. Download it again."


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies in a file. `begin` counts from the start of the file."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


@dataclass(frozen=True)
class HeldTensor(TensorEntry):
    """A tensor that lies in no file, but in memory; `path` says in errors where it came from."""

    array: np.ndarray


@dataclass(frozen=True)
class ReorderedTensor(TensorEntry):
    """A tensor whose rows lie in another order: `rows` says of each where it is in the file."""

    rows: np.ndarray


def read_header(path: Path) -> list[TensorEntry]:
    """All tensors of a file. CheckpointError naming file and tensor when anything does not add up."""
    try:
        with path.open("rb") as file:
            return header_of(file, path, path.stat().st_size)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist, but the checkpoint needs it. Download it.") from None
    except OSError as error:
        raise unreadable_header(path, error) from error


def header_of(file: BinaryIO, path: Path, file_bytes: int) -> list[TensorEntry]:
    """The same of a file that is open at its start, or of what was read of it."""
    first = file.read(8)
    header_bytes = int.from_bytes(first, "little")
    if len(first) < 8 or header_bytes > min(file_bytes - 8, MAX_HEADER_BYTES):
        raise CheckpointError(f"{path} is too short for a safetensors file ({file_bytes} bytes). {AGAIN}")
    try:
        header = json.loads(file.read(header_bytes), object_pairs_hook=once_each)
    except (ValueError, RecursionError) as error:
        raise unreadable_header(path, error) from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a safetensors header that is no JSON object. {AGAIN}")
    header.pop("__metadata__", None)
    return [parse_entry(path, name, entry, 8 + header_bytes, file_bytes) for name, entry in header.items()]


def unreadable_header(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path} has no readable safetensors header: {error}. {AGAIN}")


def once_each(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object each of whose names is there once. Raises ValueError."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
        raise ValueError(f"{twice!r} is there twice")
    return found


def parse_entry(path: Path, name: str, entry: Any, data_start: int, file_bytes: int) -> TensorEntry:
    """One line of the header. CheckpointError when the tensor is malformed or lies beyond the file's end."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        well_formed = all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end)) and begin <= end
    except (KeyError, TypeError, ValueError):
        well_formed = False
    if not well_formed:
        raise CheckpointError(f"{path}: the header entry of tensor {name} is malformed. {AGAIN}")
    if data_start + end > file_bytes:
        raise CheckpointError(
            f"{path} is truncated: tensor {name} ends at byte {data_start + end} of {file_bytes}. {AGAIN}"
        )
    if dtype in ALL_DTYPES and math.prod(shape) * ALL_DTYPES[dtype].itemsize != end - begin:
        raise CheckpointError(f"{path}: tensor {name} has shape {shape} but {end - begin} bytes of {dtype}. {AGAIN}")
    return TensorEntry(path, name, dtype, shape, data_start + begin, end - begin)


@contextmanager
def mapped(entry: TensorEntry, dtypes: Mapping[str, np.dtype] = DTYPES) -> Iterator[np.ndarray]:
    """The tensor as a read-only view of the file, or a copy where its rows lie in another order; what is kept of it
    must be copied before the block ends.

    `dtypes`: those that it may have. Only this tensor is mapped, and it is unmapped afterwards: the pages that were
    read do not add up.
    """
    if entry.dtype not in dtypes:
        raise CheckpointError(
            f"{entry.path}: tensor {entry.name} has type {entry.dtype}; supported: {', '.join(dtypes)}. "
            "Use the model's bfloat16, float16 or float32 version."
        )
    if isinstance(entry, HeldTensor):
        yield entry.array
        return
    if entry.num_bytes == 0:
        yield np.empty(entry.shape, dtypes[entry.dtype])
        return
    start = entry.begin - entry.begin % mmap.ALLOCATIONGRANULARITY
    with entry.path.open("rb") as file:
        length = entry.begin - start + entry.num_bytes
        memory = mmap.mmap(file.fileno(), length, offset=start, access=mmap.ACCESS_READ)
    buffer = np.frombuffer(memory, np.uint8)[entry.begin - start :]
    # The map is released with the last view of it: closing it here would fail while a caller's frame holds one.
    stored = buffer.view(dtypes[entry.dtype]).reshape(entry.shape)
    yield stored[entry.rows] if isinstance(entry, ReorderedTensor) else stored
