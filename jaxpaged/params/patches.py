"""Parts of parameters that are replaced: single experts, and single numbers of a tensor.

The numbers of a tensor come as two tensors beside its name: which they are, counted along the tensor as it lies in the
checkpoint, and what they are. They are written into a copy of the parameter on the host, shard by shard, so that
nothing is compiled for them. Knows letters and headers of files.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.params.expected import Expected
from jaxpaged.params.safetensors_reader import DTYPES, WHOLE_DTYPES, TensorEntry, mapped
from jaxpaged.params.spec import Spec

INDICES, VALUES = ".sparse_indices", ".sparse_values"

Bounds = Sequence[tuple[int, int]]
"""Begin and end of a shard along each axis."""


def split_name(name: str) -> tuple[str, str]:
    """A tensor's name, and the end that says which half of a patch it is, or ""."""
    end = next((each for each in (INDICES, VALUES) if name.endswith(each)), "")
    return name.removesuffix(end), end


def check_length(entry: TensorEntry, expected: Expected) -> None:
    """CheckpointError for a half that is longer than what it is a part of, before it is here."""
    if math.prod(entry.shape) > (size := math.prod(expected.shapes[0])):
        raise CheckpointError(f"{entry.path}: {entry.name} has shape {entry.shape}, but is for {size} numbers.")


def check_half(entry: TensorEntry, end: str, expected: Expected) -> None:
    """CheckpointError for a half of a patch that is of another type or shape, or not finite."""
    types = WHOLE_DTYPES if end == INDICES else DTYPES
    if expected.spec.dtype in WHOLE_DTYPES.values():
        raise CheckpointError(f"{entry.path}: {entry.name} is for a table of ids, of which no part can be replaced.")
    if entry.dtype not in types or len(entry.shape) != 1:
        raise CheckpointError(
            f"{entry.path}: {entry.name} has type {entry.dtype} and shape {entry.shape}; it must have one axis, and be "
            f"of type {' or '.join(types)}."
        )
    with mapped(entry, types) as line:
        if end == VALUES and not np.isfinite(line).all():
            raise CheckpointError(f"{entry.path}: {entry.name} is not finite. The weights that the engine has stay.")


def check_pair(name: str, halves: Mapping[str, TensorEntry], expected: Expected) -> None:
    """CheckpointError unless both halves fit each other and the tensor."""
    (indices, values), [shape] = (halves[INDICES], halves[VALUES]), expected.shapes
    size = int(np.prod(shape))
    if indices.shape != values.shape:
        raise CheckpointError(
            f"{indices.path}: {name} has {indices.shape[0]} indices and {values.shape[0]} values. Give as many of both."
        )
    with mapped(indices, WHOLE_DTYPES) as line:
        if line.size and (line.min() < 0 or line.max() >= size):
            raise CheckpointError(
                f"{indices.path}: {indices.name} goes from {line.min()} to {line.max()}, but {name} has {size} numbers."
            )
        if len(np.unique(line)) < len(line):
            raise CheckpointError(f"{indices.path}: {indices.name} names one number twice.")


@dataclass(frozen=True)
class WholeRow:
    """Another value of one number on the first axis, such as an expert's."""

    number: int
    value: np.ndarray

    def write(self, data: np.ndarray, bounds: Bounds) -> None:
        """Into the shard `data`."""
        (begin, end), *others = bounds
        if begin <= self.number < end:
            data[self.number - begin] = self.value[tuple(slice(*each) for each in others)]


@dataclass(frozen=True)
class Single:
    """Other values of single numbers, by their places along all axes."""

    places: Sequence[np.ndarray]
    values: np.ndarray

    def write(self, data: np.ndarray, bounds: Bounds) -> None:
        """Into the shard `data`."""
        here = np.ones(len(self.values), bool)
        for place, (begin, end) in zip(self.places, bounds):
            here &= (place >= begin) & (place < end)
        inside = tuple(place[here] - begin for place, (begin, _) in zip(self.places, bounds))
        data[inside] = self.values[here].astype(data.dtype)


def singles(shape: Sequence[int], first: int | None, indices: np.ndarray, values: np.ndarray) -> Single:
    """Of a tensor whose parameter has this shape in the checkpoint; `first`: its number on the parameter's first
    axis, if it is one of several."""
    own = shape if first is None else shape[1:]
    places = np.unravel_index(indices.astype(np.int64), own)
    return Single(places if first is None else (np.full(len(indices), first), *places), values)


def changed(before: jax.Array, changes: Sequence[WholeRow | Single]) -> jax.Array:
    """A copy of a parameter with changes in it, in the same places."""
    shards = {bounds_of(shard.index, before.shape): shard.data for shard in before.addressable_shards}

    def piece(index: tuple[slice, ...]) -> np.ndarray:
        bounds = bounds_of(index, before.shape)
        data = np.array(shards[bounds])
        for change in changes:
            change.write(data, bounds)
        return data

    return jax.make_array_from_callback(before.shape, before.sharding, piece)


def bounds_of(index: Sequence[slice], shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple(each.indices(size)[:2] for each, size in zip(index, shape))


def why_not(spec: Spec, shape: Any, sizes: Mapping[str, int]) -> str | None:
    """Why a part of a parameter cannot be replaced, in the second half of a sentence. `shape`: the engine's own."""
    if spec.scheme is not None:
        return f"the checkpoint has it in several tensors ({spec.scheme.title})"
    if spec.quantized:
        return f"its numbers are rounded together ({spec.quantized})"
    if spec.fused or spec.transposed:
        return "it lies otherwise in the checkpoint than in the engine"
    if any(own != sizes[each] for own, each in zip(shape.shape, spec.stored_dims) if each != "V"):
        return "it is repeated for several devices"
    return None
