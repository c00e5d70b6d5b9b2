"""Encoders whose embeddings travel: what was computed elsewhere, by other engines or by callers, they take to the
device, and what they compute one gives to a folder. Nothing is waited for: embeddings are read back with the step's
result, and written by a thread.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxpaged.messages import EncoderInput, ModelRunnerOutput, MultiModalFeature, ProgramKey
from jaxpaged.models.config import facts_text
from jaxpaged.multimodal.embeds_folder import EmbedsFolder, Form, namespace
from jaxpaged.worker.device import Device, start_copy
from jaxpaged.worker.encoder import EncodedPicture, Encoder, FiniteReading
from jaxpaged.worker.encoder_spec import EncoderSpec
from jaxpaged.worker.engine_spec import EngineSpec
from jaxpaged.worker.programs.declare import ProgramKind
from jaxpaged.worker.request_rows import RequestRows
from jaxpaged.worker.step.encoding import EncodeLayout
from jaxpaged.worker.visual_rows import slots_of


def open_embeds(engine_spec: EngineSpec) -> EmbedsFolder | None:
    """The folder in which engines share embeddings, if the options name one."""
    if engine_spec.ec_transfer is None or engine_spec.encoder is None:
        return None
    _, numbers = engine_spec.encoder.cache_shape
    return EmbedsFolder(engine_spec.ec_transfer, Form(numbers, np.dtype(engine_spec.dtype)))


def embeds_space(engine_spec: EngineSpec, weights_version: str) -> str:
    """Names all that embeddings depend on besides the picture: the weights, the tower, the type, and what pixels
    become. How the tower is divided over devices is not counted: it changes the order of sums only."""
    encoder, config = engine_spec.encoder, engine_spec.config
    assert encoder is not None and encoder.vision.processor is not None, "an engine that has embeddings sees"
    tower = replace(encoder.config, splits_items=False)
    return namespace(
        weights=(weights_version, config.load.load_format, 0 if weights_version else config.model.seed),
        dummies=not weights_version and engine_spec.encodes_only,  # which are others where there are others beside them
        tower=facts_text(tower),
        quantization=config.model.quantization,
        dtype=engine_spec.dtype.name,
        deterministic=config.compile.deterministic,
        table=hashlib.sha256(np.ascontiguousarray(encoder.vision.processor.table_CV)).hexdigest(),
    )


class TakingEncoder(Encoder):
    """An encoder that takes embeddings, too, which need no computing."""

    def encode(
        self, device: Device, keys: Sequence[ProgramKey], inputs: Sequence[EncoderInput]
    ) -> list["FiniteReading | EmbedsReading"]:
        self._upload(device, [each for each in inputs if each.feature.is_encoded])
        return [*super().encode(device, keys, [each for each in inputs if not each.feature.is_encoded])]

    def _upload(self, device: Device, inputs: Sequence[EncoderInput]) -> None:
        """Bring embeddings to their pages, those of several pictures together."""
        if not inputs:
            return
        key, dtype = ProgramKey(ProgramKind.EMBEDS_SCATTER), device.state.encoded.dtype
        embeds_EX = np.concatenate([embeds_of(each.feature, dtype) for each in inputs])
        for each in inputs:
            self._pictures[each.page_ids[0]] = EncodedPicture()
        for part, slots in self._chunks(inputs):
            padded = np.zeros((len(slots), embeds_EX.shape[1]), dtype)
            padded[: part.stop - part.start] = embeds_EX[part]
            device.state.encoded = device.call(key, device.state.encoded, slots, padded)

    def _chunks(self, inputs: Sequence[EncoderInput]) -> list[tuple[slice, np.ndarray]]:
        """Embeddings of pictures, one behind the other, as many as a program copies at a time, and their slots, with
        those of padding."""
        num_copied, (no_slot, _) = self.spec.num_copied, self.spec.cache_shape
        page_size = self.spec.cache.page_size
        slots = np.concatenate([slots_of(each.page_ids, page_size, each.feature.num_embeds) for each in inputs])
        chunks = []
        for first in range(0, len(slots), num_copied):
            padded, part = np.full(num_copied, no_slot, np.int32), slots[first : first + num_copied]
            padded[: len(part)] = part
            chunks.append((slice(first, first + len(part)), padded))
        return chunks


def embeds_of(feature: MultiModalFeature, dtype: np.dtype) -> np.ndarray:
    """[E, X] of a picture that is encoded."""
    if not feature.is_embeds:
        assert feature.embeds is not None, "another engine has computed them"
        return feature.embeds
    assert feature.pixels is not None, "what is given has come"
    return feature.pixels.view(dtype)


class SharingEncoder(TakingEncoder):
    """An encoder with a folder. `space` names what embeddings depend on, as the weights are now."""

    def __init__(
        self,
        spec: EncoderSpec,
        layouts: Mapping[ProgramKey, EncodeLayout],
        rows: RequestRows,
        folder: EmbedsFolder,
        space: Callable[[], str],
    ):
        super().__init__(spec, layouts, rows)
        self._folder, self._space = folder, space

    def encode(
        self, device: Device, keys: Sequence[ProgramKey], inputs: Sequence[EncoderInput]
    ) -> list["FiniteReading | EmbedsReading"]:
        readings = super().encode(device, keys, inputs)
        own = [each for each in inputs if not each.feature.is_encoded]
        if not self._folder.transfer.saves or not own:
            return readings
        space = self._space()
        return [*readings, *(self._read_back(device, each, space) for each in own)]

    def _read_back(self, device: Device, each: EncoderInput, space: str) -> "EmbedsReading":
        key = ProgramKey(ProgramKind.EMBEDS_GATHER)
        parts = [(part, device.call(key, device.state.encoded, slots)) for part, slots in self._chunks([each])]
        start_copy([array for _, array in parts])
        picture = self._pictures[each.page_ids[0]]
        return EmbedsReading(self._folder, space, each.feature.key, picture, parts)


@dataclass
class EmbedsReading:
    """Embeddings that were computed, on their way to the folder. It is read behind what says whether they are
    finite."""

    folder: EmbedsFolder
    space: str
    key: bytes
    picture: EncodedPicture
    parts: Sequence[tuple[slice, Any]]

    def read(self, output: ModelRunnerOutput) -> None:
        if self.picture.is_finite:
            arrays = [np.asarray(array)[: part.stop - part.start] for part, array in self.parts]
            self.folder.save(self.space, self.key, np.concatenate(arrays))  # a copy, without the padding
