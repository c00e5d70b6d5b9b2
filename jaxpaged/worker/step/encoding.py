"""The function of encode programs, and how pictures become their one array: a program computes a batch of pictures
and writes their embeddings into the encoder cache.

What goes to the device for a batch is one upload: the slots of its embeddings, the pixels as they are, and what the
tower's family computes for patches. Nothing here knows requests, nor who may use which slot.

Letters: E embeddings of a batch, X numbers of one, C channels, V values of a pixel; in `encoded_SX` S are slots of the
encoder cache.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.messages import EncoderInput
from jaxpaged.models.vision.interface import Shape, batch_of
from jaxpaged.worker.encoder_spec import EncoderSpec
from jaxpaged.worker.lora_stacks import LoraSpec
from jaxpaged.worker.step.adapters import bound_tower
from jaxpaged.worker.step.packed import slices_of

LORA_SLOT = "lora_slot"
"""The name of the slot of a batch's adapter among its arrays."""
WORD = 4
"""Bytes of what a batch is packed into, int32."""
MODALITIES = ("image", "video")


class PicturePart(NamedTuple):
    """Items or patches `start` to `stop` of the picture with this index."""

    index: int
    start: int
    stop: int


Batches = Sequence[tuple[int, Sequence[PicturePart]]]
"""The bucket of each batch, and what is in it."""


@dataclass(frozen=True)
class EncodeLayout:
    """Where the parts of a batch lie, of so many items or patches: slots of `num_embeds`, then arrays of the tower's
    family, by name."""

    size: int
    num_embeds: int
    shapes: tuple[tuple[str, Shape], ...]

    @property
    def has_lora(self) -> bool:
        """Whether a batch has the slot of an adapter, which all of it has."""
        return any(name == LORA_SLOT for name, _ in self.shapes)

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        num_bytes = (np.dtype(dtype).itemsize * int(np.prod(shape)) for _, (shape, dtype) in self.shapes)
        return slices_of([self.num_embeds, *(-(-count // WORD) for count in num_bytes)])

    @property
    def num_words(self) -> int:
        return self.slices[-1].stop

    def pack(self, slots: np.ndarray, arrays: Mapping[str, np.ndarray], no_slot: int) -> np.ndarray:
        """The upload of a batch. Embeddings behind the last one of `slots` go nowhere, to `no_slot`."""
        packed = np.zeros(self.num_words, np.int32)
        packed[: len(slots)], packed[len(slots) : self.num_embeds] = slots, no_slot
        for (name, (shape, dtype)), words in zip(self.shapes, self.slices[1:], strict=True):
            array = arrays[name]
            assert array.shape == shape and array.dtype == dtype, f"{name} is {array.dtype} {array.shape}"
            packed[words].view(np.uint8)[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return packed

    def split(self, packed: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(Slots, arrays), in a program."""
        parts = zip(self.shapes, self.slices[1:], strict=True)
        return packed[self.slices[0]], {name: unpacked(packed[words], *shape) for (name, shape), words in parts}


def unpacked(words: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """An array of this shape and type, of words in which its bytes lie one behind the other."""
    kind = np.dtype(np.uint8) if dtype == "bool" else np.dtype(dtype)
    assert kind.itemsize in (1, WORD), f"nothing of type {dtype} is sent to towers"
    return jax.lax.bitcast_convert_type(words, kind).reshape(-1)[: int(np.prod(shape))].reshape(shape).astype(dtype)


def encode_layout(encoder: EncoderSpec, size: int, frames: int = 1, has_lora: bool = False) -> EncodeLayout:
    """Of the bucket of so many items or patches, which have so many frames. `has_lora`: adapters adapt the tower."""
    shapes = encoder.vision.shapes(encoder.config, size, frames)
    if has_lora:
        shapes = {**shapes, LORA_SLOT: ((1,), "int32")}
    return EncodeLayout(size, encoder.config.num_embeds(size), tuple(shapes.items()))


def encode(
    encoder: EncoderSpec,
    lora: LoraSpec | None,
    mesh: Any,
    layout: EncodeLayout,
    params: Any,
    table_CV: Any,
    encoded_SX: Any,
    packed: Any,
) -> tuple[Any, Any]:
    """The embeddings of a batch -> (encoded_SX with them, which of the [E] embeddings are finite numbers).

    Zeros stand in place of the others, so that whatever a step computes for other requests stays numbers.
    """
    slots_E, arrays = layout.split(packed)
    if layout.has_lora:
        assert lora is not None, "an engine with adapters of the tower has a slot in each batch"
        num_patches = layout.size * (encoder.config.patches_per_item or 1)
        params = bound_tower(params, lora, arrays.pop(LORA_SLOT)[0], num_patches, layout.num_embeds)
    batch = batch_of(arrays, table_CV, mesh if encoder.config.splits_items else None)
    embeds_EX = encoder.vision.encode(params, encoder.config, batch)
    finite_E = jnp.isfinite(embeds_EX).all(axis=1)
    embeds_EX = jnp.where(finite_E[:, None], embeds_EX, 0).astype(encoded_SX.dtype)
    return encoded_SX.at[slots_E].set(embeds_EX, mode="drop"), finite_E


def gather(encoded_SX: Any, slots_E: Any) -> Any:
    """Embeddings in these slots, [E, X]."""
    return encoded_SX.at[slots_E].get(mode="clip")


def scatter(encoded_SX: Any, slots_E: Any, embeds_EX: Any) -> Any:
    """The encoder cache with these embeddings in these slots."""
    return encoded_SX.at[slots_E].set(embeds_EX, mode="drop")


def encoded_together(inputs: Sequence[EncoderInput]) -> list[tuple[str, list[EncoderInput]]]:
    """Pictures, then moments of videos, as far as there are any: those with several frames have programs of their
    own. What has another adapter is another part."""
    kind_of = lambda each: (MODALITIES.index(each.feature.modality), each.lora_slot)
    return [(MODALITIES[kind], list(part)) for (kind, _), part in groupby(sorted(inputs, key=kind_of), kind_of)]


def batches_of(sizes: Sequence[int], spec: EncoderSpec, bucket_for: Callable[[int], int]) -> Batches:
    """Pictures of these sizes, in items or patches, in batches. `bucket_for`: the bucket to take for a size up to
    the largest of the encoder, which is at least as large; asked in the order of the batches.

    A batch of items is one that they fill, where there is such a bucket: an item of padding costs as much as any.
    """
    if not sizes:
        return []
    largest = spec.sizes[-1]
    if not spec.config.is_fixed:
        return batches_of_patches(sizes, 0 if spec.one_each else largest, bucket_for)
    items = [PicturePart(index, item, item + 1) for index, size in enumerate(sizes) for item in range(size)]
    batches = []
    while items:
        bucket = bucket_for(min(len(items), largest))
        batches.append((bucket, joined(items[:bucket])))
        items = items[bucket:]
    return batches


def batches_of_patches(sizes: Sequence[int], largest: int, bucket_for: Callable[[int], int]) -> Batches:
    """As many whole pictures as fit into a batch of `largest` patches, and one at least."""
    batches, parts, total = [], list[PicturePart](), 0
    for index, size in enumerate(sizes):
        if parts and total + size > largest:
            batches.append((bucket_for(total), parts))
            parts, total = [], 0
        parts.append(PicturePart(index, 0, size))
        total += size
    return [*batches, (bucket_for(total), parts)] if parts else batches


def joined(items: Sequence[PicturePart]) -> list[PicturePart]:
    """Items of one picture, one behind the other, as one part."""
    parts: list[PicturePart] = []
    for item in items:
        if parts and parts[-1].index == item.index:
            parts[-1] = parts[-1]._replace(stop=item.stop)
        else:
            parts.append(item)
    return parts
