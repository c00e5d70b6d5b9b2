"""One tensor, as a checkpoint stores it -> one sharded array, as the model uses it.

Axes are split and cut, key heads repeated, the vocabulary padded with zeros; nothing is transposed. Every device
gets a copy of its own part only. A quantized parameter is rounded before it is cut: its scales are those of whole rows.
Knows letters, and neither files nor models.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpaged.params.quantized import QuantizedArray, quantize, scales_spec
from jaxpaged.params.sharding import device_sizes, num_model_shards, sharding_of
from jaxpaged.params.spec import Spec


def stored_shape(spec: Spec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape that the tensor must have in the checkpoint; `sizes` are those of the checkpoint."""
    first, *others = spec.hf_dims.split(" ")
    extents = [sum(extent(letters, sizes) for letters in spec.fused or (first,))]
    return (*extents, *(extent(letters, sizes) for letters in others))


def extent(letters: str, sizes: Mapping[str, int]) -> int:
    """Size of one axis that several letters share."""
    return math.prod(sizes[letter] for letter in letters)


def own_part(spec: Spec, stored: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
    """A view of this parameter in the tensor, with one axis per letter."""
    start = sum(extent(letters, sizes) for letters in spec.fused[: spec.part])
    stop = start + extent(spec.hf_dims.split(" ")[0], sizes)
    return stored[start:stop].reshape([sizes[letter] for letter in spec.dims])


def place(spec: Spec, stored: np.ndarray, sizes: Mapping[str, int], mesh: Mesh, dtype: Any) -> Any:
    """The parameter on its devices, in `dtype`. `stored` has `stored_shape(spec, sizes)` and may be a file's map."""
    return place_part(spec, own_part(spec, stored, sizes), sizes, mesh, dtype)


def place_part(spec: Spec, part: np.ndarray, sizes: Mapping[str, int], mesh: Mesh, dtype: Any) -> Any:
    """Like `place`, for an array that has the parameter's axes already, in the checkpoint's sizes."""
    if not spec.quantized:
        return place_array(spec, part, sizes, mesh, spec.dtype or dtype)
    scales = scales_spec(spec)
    rounded = quantize(part, len(scales.dims))
    return QuantizedArray(
        place_array(spec, rounded[0], sizes, mesh, np.int8),
        place_array(scales, rounded[1], sizes, mesh, np.float32),
        np.dtype(dtype).name,
    )


def place_array(spec: Spec, part: np.ndarray, sizes: Mapping[str, int], mesh: Mesh, dtype: Any) -> jax.Array:
    """One array on its devices: every device's own part of `part`, cut, repeated or padded."""
    full = device_sizes(sizes, num_model_shards(mesh))
    shape = tuple(full[letter] for letter in spec.dims)

    def shard(index: tuple[slice, ...]) -> np.ndarray:
        piece = part
        for axis, (letter, wanted) in enumerate(zip(spec.dims, index, strict=True)):
            piece = cut(piece, axis, letter, range(*wanted.indices(full[letter])), full[letter], sizes[letter])
        return np.array(piece, dtype=dtype, order="C")

    # Waiting keeps the promise of one tensor at a time: transfers would otherwise queue up.
    return jax.make_array_from_callback(shape, sharding_of(spec, mesh), shard).block_until_ready()


def cut(piece: np.ndarray, axis: int, letter: str, wanted: range, full: int, stored: int) -> np.ndarray:
    """Positions `wanted` of an axis of `full`, from one of `stored`: K is repeated, V padded, others are alike."""
    if letter == "K" and full != stored:
        return np.take(piece, [position * stored // full for position in wanted], axis=axis)
    before = (slice(None),) * axis
    found = piece[(*before, slice(wanted.start, min(wanted.stop, stored)))]
    missing = len(wanted) - found.shape[axis]
    if missing == 0:
        return found
    zeros = np.zeros((*found.shape[:axis], missing, *found.shape[axis + 1 :]), found.dtype)
    return np.concatenate([found, zeros], axis=axis)
