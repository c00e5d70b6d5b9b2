"""One tensor, as a checkpoint stores it, or a stack of them -> one sharded array, as the model uses it.

Axes are split and cut, key heads and experts repeated, the vocabulary padded with zeros; only what a spec marks is
transposed. Every device gets a copy of its own part only; of a stack it is made tensor by tensor. A quantized parameter
is rounded before it is cut: its scales are those of whole rows. Knows letters, and neither files nor models.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpaged.params.encoded import Decoded, EncodedMatrix, matrices
from jaxpaged.params.quantized import (
    ROWS,
    PackedArray,
    QuantizedArray,
    Stored,
    StoredArray,
    float_blocks,
    groups_spec,
    pack,
    packed_sizes,
    quantize,
    scales_spec,
    values_sizes,
)
from jaxpaged.params.recoding import Losses, rows_of, stored_parts
from jaxpaged.params.rooms import Rooms
from jaxpaged.params.safetensors_reader import TensorEntry
from jaxpaged.params.sharding import KEY_HEADS, sharding_of, sizes_on, split_of
from jaxpaged.params.spec import Spec

Part = np.ndarray | Sequence[np.ndarray]
"""A parameter on the host, in the checkpoint's sizes; or what it has at each place of its first axis."""


def stored_shape(spec: Spec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape that each of its tensors must have in the checkpoint; `sizes` are those of the checkpoint."""
    extents = [extent(letters, sizes) for letters in spec.hf_dims.split(" ")[spec.is_stacked :]]
    if spec.fused:
        together = sum(extent(letters, sizes) for letters in spec.fused)
        extents[spec.fused_axis] = extent(spec.within, sizes) * together
    if spec.transposed:
        extents[-2:] = extents[:-3:-1]
    return tuple(extents)


def extent(letters: str, sizes: Mapping[str, int]) -> int:
    """Size of one axis that several letters share, or that is spelled 1."""
    return math.prod(1 if letter == "1" else sizes[letter] for letter in letters)


def own_part(spec: Spec, stored: Sequence[np.ndarray], sizes: Mapping[str, int]) -> Part:
    """A view of this parameter in its only tensor, with one axis per letter, or the tensors that it is a stack of."""
    if spec.is_stacked:
        return stored
    (tensor,), axis = stored, spec.fused_axis
    tensor = tensor if spec.dims else tensor.reshape(1)
    tensor = tensor.swapaxes(-2, -1) if spec.transposed else tensor
    if spec.within:
        tensor, axis = tensor.reshape(extent(spec.within, sizes), -1, *tensor.shape[1:]), 1
    tensor = tensor[(slice(None),) * axis + (own_places(spec, sizes),)]
    return tensor.reshape([sizes[letter] for letter in spec.stored_dims])


def own_places(spec: Spec, sizes: Mapping[str, int]) -> slice:
    """Where this parameter is on the axis that it shares with others; all of it where it shares none."""
    if spec.alternating:
        return slice(spec.part, None, len(spec.fused))
    start = sum(extent(letters, sizes) for letters in spec.fused[: spec.part])
    return slice(start, start + extent(spec.fused[spec.part], sizes)) if spec.fused else slice(None)


def own_rows(spec: Spec, sizes: Mapping[str, int]) -> np.ndarray:
    """The numbers of the outputs, in a matrix of the checkpoint, that are those of this parameter."""
    rows = np.arange(stored_shape(spec, sizes)[-2])
    rows = rows.reshape(extent(spec.within, sizes), -1) if spec.within else rows
    return rows[..., own_places(spec, sizes)].reshape(-1)


def own_matrices(spec: Spec, entries: Mapping[str, TensorEntry], sizes: Mapping[str, int]) -> list[EncodedMatrix]:
    """The matrices of an encoded parameter, in order, each with the outputs that are this parameter's."""
    return matrices(spec, entries, sizes, stored_shape(spec, sizes), own_rows(spec, sizes))


def place(
    spec: Spec, stored: Sequence[np.ndarray], sizes: Mapping[str, int], mesh: Mesh, dtype: Any, rooms: Rooms
) -> Any:
    """The parameter on its devices, in `dtype`. Tensors have `stored_shape(spec, sizes)` and may be a file's map."""
    return place_part(spec, own_part(spec, stored, sizes), sizes, mesh, dtype, rooms)


def place_encoded(
    spec: Spec,
    matrices: Sequence[EncodedMatrix],
    sizes: Mapping[str, int],
    mesh: Mesh,
    dtype: Any,
    rooms: Rooms,
    losses: Losses,
) -> Any:
    """Like `place`, for matrices that are decoded as they are read."""
    shape, form = tuple(sizes[letter] for letter in spec.stored_dims), spec.quantized
    is_stack = spec.stored_dims.startswith("E")
    name, array = np.dtype(dtype).name, partial(place_array, sizes=sizes, mesh=mesh, rooms=rooms)
    if form in ROWS:
        values = np.empty((len(matrices), *matrices[0].shape), ROWS[form])
        scales = np.empty(values.shape[:2], np.float32)
        for i, matrix in enumerate(matrices):
            rows_of(matrix, form, losses, out=(values[i], scales[i]))
        of_rows = scales_spec(spec)
        return QuantizedArray(
            array(spec, values.reshape(shape), dtype=ROWS[form]),
            array(of_rows, scales.reshape(shape[: len(of_rows.dims)]), dtype=np.float32),
            name,
        )
    if isinstance(form, Stored):
        parts = [stored_parts(matrix, form, losses) for matrix in matrices]
        return place_stored(spec, form, parts, sizes, mesh, name, rooms)
    on_host = np.float32 if form else spec.dtype or dtype
    if is_stack:
        return place_part(spec, Decoded(matrices, shape[1:], on_host), sizes, mesh, dtype, rooms)
    return place_part(spec, matrices[0].dequantized(on_host).reshape(shape), sizes, mesh, dtype, rooms)


def place_stored(
    spec: Spec,
    form: Stored,
    parts: Sequence[tuple[np.ndarray, ...]],
    sizes: Mapping[str, int],
    mesh: Mesh,
    name: str,
    rooms: Rooms,
) -> StoredArray:
    """What `recoding.stored_parts` made of one matrix, or of those of all experts.

    Letters: M matrices, I inputs and O outputs of each, C groups of inputs.
    """
    (of_groups, groups), own = groups_spec(spec, sizes), values_sizes(spec, sizes)
    array = partial(place_array, mesh=mesh, rooms=rooms)
    one_stack = lambda arrays: np.stack(arrays) if len(arrays) > 1 else arrays[0][None]  # not copied
    values_MOI, scales_MOC, zeros_MOC, order_MI = (one_stack(each) for each in zip(*parts, strict=True))

    def of_inputs(of_group_MOC: np.ndarray, dtype: Any) -> jax.Array:
        of_group = of_group_MOC.swapaxes(1, 2).reshape([groups[letter] for letter in of_groups.stored_dims])
        return array(of_groups, of_group, sizes=groups, dtype=dtype)

    everywhere = NamedSharding(mesh, PartitionSpec())
    return StoredArray(
        array(spec, values_MOI.reshape([own[letter] for letter in spec.stored_dims]), sizes=own, dtype=form.values),
        of_inputs(scales_MOC, form.scales),
        of_inputs(zeros_MOC, np.float32) if form.has_zeros else None,
        jax.device_put(order_MI[0], everywhere) if form.has_order else None,
        name,
        form.kernel,
        split_of(spec, mesh),
    )


def place_part(spec: Spec, part: Part, sizes: Mapping[str, int], mesh: Mesh, dtype: Any, rooms: Rooms) -> Any:
    """Like `place`, for an array that has the parameter's axes already, in the checkpoint's sizes."""
    if not spec.quantized:
        return place_array(spec, part, sizes, mesh, spec.dtype or dtype, rooms)
    name = np.dtype(dtype).name
    if spec.quantized == "int4":
        assert isinstance(part, np.ndarray), f"{spec} is a stack, of experts: these have 8 bits"
        parts = zip(pack(part), packed_sizes(spec, sizes), (np.uint8, jnp.bfloat16), strict=True)
        return PackedArray(*(place_array(spec, *one, mesh, kind, rooms) for *one, kind in parts), name)
    tensors = [part] if isinstance(part, np.ndarray) else part
    if isinstance(spec.quantized, Stored):
        num_inputs = extent(spec.hf_dims.split(" ")[-1], sizes)
        return place_stored(
            spec, spec.quantized, [block_parts(x, num_inputs) for x in tensors], sizes, mesh, name, rooms
        )
    scales = scales_spec(spec)
    if isinstance(part, np.ndarray):
        rounded = quantize(part, len(scales.dims), spec.quantized)
    else:
        rounded = quantized_stack(part, spec.quantized)
    return QuantizedArray(
        place_array(spec, rounded[0], sizes, mesh, ROWS[spec.quantized], rooms),
        place_array(scales, rounded[1], sizes, mesh, np.float32, rooms),
        name,
    )


def quantized_stack(tensors: Sequence[np.ndarray], form: str) -> tuple[np.ndarray, np.ndarray]:
    """(values, float32 scales) of a stack, whose tensors are rounded one after the other."""
    for i, tensor in enumerate(tensors):
        if i == 0:
            values = np.empty((len(tensors), *tensor.shape), ROWS[form])
            scales = np.empty(values.shape[:-1], np.float32)
        values[i], scales[i] = quantize(tensor, tensor.ndim - 1, form)
    return values, scales


def block_parts(weight: np.ndarray, num_inputs: int) -> tuple[np.ndarray, ...]:
    """A matrix, whose inputs may be several axes, in blocks of 8-bit floats, as `place_stored` takes it."""
    values, scales = float_blocks(weight.reshape(-1, num_inputs))
    return values, scales, np.zeros_like(scales), np.arange(values.shape[1], dtype=np.int32)


def place_array(spec: Spec, part: Part, sizes: Mapping[str, int], mesh: Mesh, dtype: Any, rooms: Rooms) -> jax.Array:
    """One array on its devices: every device's own part of `part`, cut, repeated or padded."""
    full = sizes_on(mesh, sizes)
    shape = tuple(full[letter] for letter in spec.dims)

    def cut_all(piece: np.ndarray, first: int, index: tuple[slice, ...]) -> np.ndarray:
        """What `index` names of the axes from `first` on, which are all that `piece` has."""
        letters = zip(spec.dims[first:], spec.stored_dims[first:], index[first:], strict=True)
        for axis, (letter, stored, wanted) in enumerate(letters):
            piece = cut(piece, axis, letter, range(*wanted.indices(full[letter])), full[letter], sizes[stored])
        return piece

    def shard(index: tuple[slice, ...]) -> np.ndarray:
        piece = cut_all(part, 0, index)
        np.copyto(room := rooms.room(piece.shape, dtype), piece, casting="unsafe")
        return room

    def shards_of_stack() -> dict[str, np.ndarray]:
        """What each index names, of tensors each of which is looked at once."""
        filled = {}
        indices = {str(index): index for index in sharding.addressable_devices_indices_map(shape).values()}
        for i, tensor in enumerate(part):
            for name, index in indices.items():
                places = range(*index[0].indices(shape[0]))
                for place in places:
                    if place % len(part) == i:
                        piece = cut_all(tensor, 1, index)
                        if name not in filled:
                            filled[name] = rooms.room((len(places), *piece.shape), dtype)
                        np.copyto(filled[name][place - places.start], piece, casting="unsafe")
        return filled

    sharding = sharding_of(spec, mesh)
    if not isinstance(part, np.ndarray):
        filled = shards_of_stack()
        shard = lambda index: filled[str(index)]
    # Waiting keeps the promise of one tensor at a time: transfers would otherwise queue up.
    return jax.make_array_from_callback(shape, sharding, shard).block_until_ready()


def cut(piece: np.ndarray, axis: int, letter: str, wanted: range, full: int, stored: int) -> np.ndarray:
    """Positions `wanted` of an axis of `full`, from one of `stored`: key heads are repeated, each behind itself, and
    experts e as a whole, V is padded, others are alike."""
    if letter in KEY_HEADS and full != stored:
        return np.take(piece, [position * stored // full for position in wanted], axis=axis)
    if letter == "e" and full != stored:
        return np.take(piece, [position % stored for position in wanted], axis=axis)
    before = (slice(None),) * axis
    found = piece[(*before, slice(wanted.start, min(wanted.stop, stored)))]
    missing = len(wanted) - found.shape[axis]
    if missing == 0:
        return found
    zeros = np.zeros((*found.shape[:axis], missing, *found.shape[axis + 1 :]), found.dtype)
    return np.concatenate([found, zeros], axis=axis)
