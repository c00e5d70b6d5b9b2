"""Embeddings that callers give in place of pictures: read from what holds them, checked, and brought into the type of
the engine.

Files are those of numpy (.npy) and safetensors, whose headers are checked before anything else is believed; pickles, as
`torch.save` writes them, are never read. This module knows no model. Letters: E embeddings, X numbers of one, all
levels one behind the other.
"""

import hashlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxpaged.encoding.cbor import encode_cbor
from jaxpaged.errors import RequestError, shown

EMBEDS, GRID = "image_embeds", "image_grid_thw"
"""vLLM's names: of keys of a dict, and of tensors of a file."""
FLOATS = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
WHOLE = {"I32": np.dtype(np.int32), "I64": np.dtype(np.int64)}
"""Types of tensors, as safetensors call them."""
NPY = b"\x93NUMPY"
PICKLES = (b"PK", b"\x80")
"""How files of `torch.save` begin."""
MAX_HEADER_BYTES = 1 << 16
LENGTH_BYTES = 8
FILES = "the base64 of a .npy file, or of safetensors with one tensor, or with image_embeds and image_grid_thw"

Grid = tuple[int, int, int]
"""Frames, rows and columns of patches."""


class Form(NamedTuple):
    """What embeddings of an engine are: so many numbers each, of this type."""

    numbers: int
    dtype: np.dtype


def form_of(numbers: int, dtype: str) -> Form:
    """`dtype` by its name."""
    return Form(numbers, np.dtype(dtype))


class Embeddings(NamedTuple):
    """[E, X] in place of a picture: what an encoder would give for it. `grid`: vLLM's image_grid_thw, of models whose
    pictures have any size."""

    values: Any
    grid: Any = None


def as_array(value: Any) -> np.ndarray | None:
    """An array of numpy, of torch or of JAX, as one of numpy; None for anything else."""
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "detach") and hasattr(value, "cpu"):  # a tensor of torch
        value = value.detach().cpu()
        return (value.float() if "bfloat16" in str(value.dtype) else value).numpy()
    if hasattr(value, "__array__") and hasattr(value, "dtype") and hasattr(value, "ndim"):
        return np.asarray(value)
    return None


def is_float(array: np.ndarray) -> bool:
    return array.dtype in FLOATS.values()


def split(given: Embeddings, field: str) -> list[Embeddings]:
    """One for each picture: of a list, of an array of three axes, or of one of two whose rows `grid` divides. Raises
    RequestError that names `field` where the two do not agree."""
    grids = grids_of(given.grid)
    parts = parts_of(given.values, grids)
    if parts is None:
        return [given]
    if grids is None and given.grid is None:
        return [Embeddings(each) for each in parts]
    if grids is None or len(grids) != len(parts):
        raise RequestError(
            f"{field} has embeddings of {len(parts)} pictures, and a {GRID} {shown(given.grid)}; it must have three "
            "numbers for each of them.",
            field,
        )
    return [Embeddings(*each) for each in zip(parts, grids, strict=True)]


def grids_of(grid: Any) -> list[Any] | None:
    """The grid of each picture, where there are several in one; None: there is one at most."""
    array = as_array(grid)
    grids = grid if array is None else array.tolist()
    several = isinstance(grids, list | tuple) and grids and all(isinstance(each, list | tuple) for each in grids)
    return list(grids) if several else None


def parts_of(values: Any, grids: Sequence[Any] | None) -> Sequence[Any] | None:
    """The embeddings of each picture; None where nothing says that they are of several."""
    if isinstance(values, list | tuple):
        return values
    array = as_array(values)
    if array is None or array.ndim == 3 or grids is None:
        return None if array is None or array.ndim != 3 else list(array)
    patches = [math.prod(each) if all(type(n) is int for n in each) else 0 for each in grids]
    ends = [len(array) * sum(patches[:end]) // max(sum(patches), 1) for end in range(1, len(patches))]
    return np.split(array, ends) if array.ndim else None


# ---- from what holds them ------------------------------------------------------------------------


def read(given: Embeddings, field: str, form: Form) -> Embeddings:
    """An array of [E, X] as it was given, or of the file whose bytes were, and the grid if there is one. Nothing is
    copied. Raises RequestError that names `field`."""
    values, grid = given
    if isinstance(values, bytes):
        values, grid = of_file(values, grid, field)
    array = as_array(values)
    if array is None:
        raise RequestError(
            f"{field} is of type {type(values).__name__}. Give an array of floating point numbers, or {FILES}.", field
        )
    if not is_float(array):
        raise RequestError(
            f"{field} has embeddings of type {array.dtype}. Give float32, float16 or bfloat16 (as safetensors).", field
        )
    if array.ndim == 3 and len(array) == 1:
        array = array[0]
    if array.ndim != 2 or array.shape[1] != form.numbers or not len(array):
        raise RequestError(
            f"{field} has embeddings of the shape {list(array.shape)}; this model takes [embeddings, {form.numbers}] "
            "for a picture.",
            field,
        )
    return Embeddings(array, None if grid is None else grid_of(grid, field))


def of_file(data: bytes, grid: Any, field: str) -> tuple[np.ndarray, Any]:
    """Embeddings and grid of a file; a grid that was given beside it counts."""
    tensors = tensors_of(data, field)
    values = tensors.get(EMBEDS) if len(tensors) > 1 else next(iter(tensors.values()), None)
    if values is None:
        names = ", ".join(map(shown, list(tensors)[:4])) or "no tensors"
        raise RequestError(f"{field} is a file with {names}. Give it one tensor, or {EMBEDS} and {GRID}.", field)
    return values, tensors.get(GRID) if grid is None and len(tensors) > 1 else grid


def grid_of(grid: Any, field: str) -> Grid:
    """Three whole numbers from 1. Raises RequestError that names `field`."""
    if isinstance(grid, bytes):
        grid = next(iter(tensors_of(grid, field).values()), None)
    array = as_array(grid)
    numbers = grid if array is None else array.tolist()
    if isinstance(numbers, list | tuple) and len(numbers) == 1:
        numbers = numbers[0]
    is_whole = isinstance(numbers, list | tuple) and all(type(each) is int and each > 0 for each in numbers)
    if not is_whole or len(numbers) != 3:
        raise RequestError(
            f"{field} has the {GRID} {shown(numbers)}; it must be three numbers for one picture: frames, rows and "
            "columns of patches.",
            field,
        )
    frames, rows, columns = numbers
    return frames, rows, columns


def tensors_of(data: bytes, field: str) -> Mapping[str, np.ndarray]:
    """The arrays of a file, views of its bytes. Raises RequestError that names `field`."""
    try:
        if data.startswith(NPY):
            return {"": npy_array(data)}
        if not data.startswith(PICKLES):
            return safetensors_arrays(data)
        what = "is a pickle, as torch.save writes them, which is never read"
    except Exception:  # of parsers of headers, which may hold anything
        what = "is neither a whole .npy file nor whole safetensors"
    raise RequestError(f"{field} {what}. Give {FILES}.", field)


def npy_array(data: bytes) -> np.ndarray:
    """Of a .npy file of numbers. ValueError and others for anything else."""
    file, formats = io.BytesIO(data), np.lib.format
    readers = {(1, 0): formats.read_array_header_1_0, (2, 0): formats.read_array_header_2_0}
    shape, is_fortran, dtype = readers[formats.read_magic(file)](file)
    return array_of(memoryview(data)[file.tell() :], shape, dtype, "F" if is_fortran else "C")


def safetensors_arrays(data: bytes) -> Mapping[str, np.ndarray]:
    """By name. ValueError and others for what is none."""
    start = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
    if not LENGTH_BYTES < start <= min(len(data), MAX_HEADER_BYTES):
        raise ValueError
    header = json.loads(data[LENGTH_BYTES:start])
    arrays = {}
    for name, entry in dict(header).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            if not 0 <= begin <= end <= len(data) - start:
                raise ValueError
            dtype = (FLOATS | WHOLE)[entry["dtype"]]
            arrays[name] = array_of(memoryview(data)[start + begin : start + end], entry["shape"], dtype)
    return arrays


def array_of(data: memoryview, shape: Sequence[int], dtype: np.dtype, order: Any = "C") -> np.ndarray:
    """Of all these bytes; ValueError where they are more or fewer, or no numbers."""
    if dtype.kind not in "fiu" and dtype not in FLOATS.values():
        raise ValueError
    if any(type(each) is not int or each < 0 for each in shape) or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError
    return np.frombuffer(data, dtype).reshape(shape, order=order)


# ---- as the engine takes them --------------------------------------------------------------------


def in_form(values: np.ndarray, form: Form, field: str) -> np.ndarray:
    """A copy in the type of the engine, as bytes: uint8 [E, bytes of one]. Raises RequestError that names `field` for
    what is no finite number in it."""
    data = np.empty((len(values), form.numbers * form.dtype.itemsize), np.uint8)
    embeds_EX = data.view(form.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        embeds_EX[...] = values
    if not np.isfinite(embeds_EX).all():
        raise RequestError(f"{field} has embeddings that are no finite numbers in {form.dtype.name}.", field)
    return data


def embeds_digest(data: np.ndarray, grid: Grid | None, form: Form) -> bytes:
    """Of embeddings in the engine's type, as bytes: 32 bytes."""
    parts = {
        "embeds": form.dtype.name,
        "shape": list(data.shape),
        "grid": None if grid is None else list(grid),
        "array": hashlib.sha256(data).digest(),
    }
    return hashlib.sha256(encode_cbor(parts)).digest()
