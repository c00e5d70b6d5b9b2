"""The encoder of an engine on the host: it brings a step's pictures to encode programs, and tells rows where their
embeddings lie.

Each batch is one upload and one call, before the forward pass of the step; which programs these are the step says. The
embeddings are not waited for: whether all are numbers is read with the step's result, and a picture of which some are
not fails the requests that have it, and no others.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jaxpaged.messages import EncoderInput, ModelRunnerOutput, ProgramKey, SchedulerOutput
from jaxpaged.models.vision.interface import Picture
from jaxpaged.worker.device import Device, start_copy
from jaxpaged.worker.encoder_spec import EncoderSpec
from jaxpaged.worker.request_rows import RequestRows
from jaxpaged.worker.step.encoding import LORA_SLOT, EncodeLayout, PicturePart, batches_of, encoded_together
from jaxpaged.worker.visual_rows import slots_of

NOT_NUMBERS = (
    "the embeddings of the picture at token {} of the prompt are not finite numbers. Other requests are unharmed."
)


@dataclass
class EncodedPicture:
    """What lies in pages of the encoder cache. `is_finite`: as far as the host has heard."""

    is_finite: bool = True


class Use(NamedTuple):
    """A request has a picture, which begins at token `offset` of its prompt."""

    request_id: str
    offset: int
    picture: EncodedPicture


class Encoder:
    """Of one engine, whose requests have `rows`. `layouts`: those of encode programs."""

    def __init__(self, spec: EncoderSpec, layouts: Mapping[ProgramKey, EncodeLayout], rows: RequestRows):
        self.spec, self.layouts, self.rows = spec, layouts, rows
        self._pictures: dict[int, EncodedPicture] = {}  # by their first page

    def dispatch(self, device: Device, scheduled: SchedulerOutput) -> list["FiniteReading | UsesReading"]:
        """Compute a step's pictures, and tell rows where those lie that the step needs."""
        batches = self.encode(device, scheduled.programs.encode, scheduled.encoder_inputs)
        uses = []
        for request_id, index, page_ids in scheduled.encoder_pages:
            row = self.rows.row_of[request_id]
            self.rows.visual.place(row, index, page_ids)
            picture = self._pictures.setdefault(page_ids[0], EncodedPicture())
            uses.append(Use(request_id, self.rows.visual.feature(row, index).offset, picture))
        return [*batches, UsesReading(uses)]

    def encode(
        self, device: Device, keys: Sequence[ProgramKey], inputs: Sequence[EncoderInput]
    ) -> list["FiniteReading"]:
        """Dispatch the batches of a step."""
        programs = iter(keys)
        return [reading for _, part in encoded_together(inputs) for reading in self._encode(device, programs, part)]

    def _encode(
        self, device: Device, keys: Iterator[ProgramKey], inputs: Sequence[EncoderInput]
    ) -> list["FiniteReading"]:
        """Dispatch batches of pictures, or of moments of videos, by the next of these programs."""
        config, page_size = self.spec.config, self.spec.cache.page_size
        sizes = [config.size_of(each.feature.grid) for each in inputs]
        slots = [slots_of(each.page_ids, page_size, each.feature.num_embeds) for each in inputs]
        pictures = [EncodedPicture() for _ in inputs]
        for each, picture in zip(inputs, pictures):
            self._pictures[each.page_ids[0]] = picture
        encoded, own = [], list[ProgramKey]()

        def bucket_for(_: int) -> int:
            own.append(next(keys))
            return own[-1].size

        batches = batches_of(sizes, self.spec, bucket_for)
        for key, (_, parts) in zip(own, batches, strict=True):
            packed, state = self._pack(self.layouts[key], parts, inputs, slots), device.state
            state.encoded, finite_E = device.call(key, device.tower_params, device.table_CV, state.encoded, packed)
            counts = [(pictures[part.index], config.num_embeds(part.stop - part.start)) for part in parts]
            encoded.append(FiniteReading(counts, start_copy(finite_E)))
        return encoded

    def _pack(
        self,
        layout: EncodeLayout,
        parts: Sequence[PicturePart],
        inputs: Sequence[EncoderInput],
        slots: Sequence[np.ndarray],
    ) -> np.ndarray:
        config, own_slots = self.spec.config, []
        pictures: list[Picture] = []
        for index, start, stop in parts:
            feature = inputs[index].feature
            assert feature.pixels is not None, "a picture that is encoded has pixels"
            own_slots.append(slots[index][config.num_embeds(start) : config.num_embeds(stop)])
            _, rows, columns = feature.grid
            grid = (stop - start, rows, columns) if config.is_fixed else feature.grid
            pictures.append((feature.pixels[start:stop], grid))
        arrays = self.spec.vision.pack(config, pictures, layout.size)
        if layout.has_lora:
            arrays[LORA_SLOT] = np.array([inputs[0].lora_slot], np.int32)
        num_slots, _ = self.spec.cache_shape
        return layout.pack(np.concatenate(own_slots), arrays, no_slot=num_slots)


@dataclass
class FiniteReading:
    """Which embeddings of a batch are numbers: its pictures, and how many embeddings of each are in it."""

    pictures: Sequence[tuple[EncodedPicture, int]]
    finite_E: Any

    def read(self, output: ModelRunnerOutput) -> None:
        finite_E, first = np.asarray(self.finite_E), 0
        for picture, count in self.pictures:
            picture.is_finite &= bool(finite_E[first : first + count].all())
            first += count
        if (buckets := output.buckets) is not None:
            now, num_encoded = time.perf_counter(), buckets.num_encoded + first
            output.buckets = msgspec.structs.replace(buckets, num_encoded=num_encoded, encoded_at=now)


@dataclass
class UsesReading:
    """The requests that take pictures from this step on. Steps are read in their order, so whether these are numbers is
    known, whichever step has encoded them."""

    uses: Sequence[Use]

    def read(self, output: ModelRunnerOutput) -> None:
        for use in self.uses:
            if not use.picture.is_finite:
                output.failed.setdefault(use.request_id, NOT_NUMBERS.format(use.offset))
                output.corrupted.append(use.request_id)
