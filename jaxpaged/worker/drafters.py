"""Who drafts: guesses at the next tokens of rows, which `step/verify.py` verifies. Drafts stay on the device.

A model or a head drafts with a run of its decode steps, in one program (`step/decode_loop.py`). Its layers lie behind
those of the decoder, and each pass over tokens of a request is one of both (`models/drafted.py`): so drafting begins
with the newest token, and needs no catching up. What it writes into the cache lies at places of the newest token and of
the drafts behind it, which the step that verifies writes again. A row drafts as it draws: with its temperature, limits,
seed and positions. A draft is accepted where it is the token that the decoder draws, and two models of nearly the same
probabilities mostly draw the same with the same noise.

Without a model drafts are looked up (`step/lookup.py`).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxpaged.messages import NewRequestData, ProgramKey
from jaxpaged.worker.device import Device
from jaxpaged.worker.model_runner import DraftRequest
from jaxpaged.worker.programs.declare import ProgramKind
from jaxpaged.worker.step.input_batch import multi_step_lines
from jaxpaged.worker.step.lookup import pack_history
from jaxpaged.worker.step.packed import MultiStepLayout, StepLayout
from jaxpaged.worker.step.sampler import Sampler


class LookupDrafter:
    """Looks for the newest tokens of a row in what is known of it, and in answers to earlier requests."""

    layouts: Mapping[int, StepLayout] = MappingProxyType({})

    def __init__(self, max_num_seqs: int):
        self._null_row = max_num_seqs
        self._private_R = np.zeros(max_num_seqs, bool)

    def admit(self, device: Device, rank: int, row: int, request: NewRequestData) -> None:
        self._private_R[row] = request.is_private
        for packed in pack_history(row, request.token_ids):
            self._call(device, ProgramKey(ProgramKind.LOAD_HISTORY), packed)

    def propose(self, device: Device, key: ProgramKey, draft: DraftRequest, packed: np.ndarray | None) -> Any:
        rows, places = draft.newest.rows, np.full(key.size, self._null_row, np.int32)
        places[: len(rows)] = np.where(self._private_R[rows], -1 - rows, rows)
        device.state.rows, drafts_SK = device.call(key, device.state.rows, places)
        return drafts_SK

    def release(self, device: Device, row: int, num_prompt_tokens: int) -> None:
        """A row is taken back: its answer may help others."""
        if device.state.rows.answers is not None and not self._private_R[row]:
            self._call(device, ProgramKey(ProgramKind.REMEMBER), np.array([row, num_prompt_tokens], np.int32))

    @staticmethod
    def _call(device: Device, key: ProgramKey, packed: np.ndarray) -> None:
        device.state.rows = device.call(key, device.state.rows, packed)


class ModelDrafter:
    """Lets a model or a head draft. `sampler` knows how its rows draw."""

    def __init__(self, sampler: Sampler, multi_step_layouts: Mapping[int, MultiStepLayout]):
        self._sampler = sampler
        self.layouts: Mapping[int, StepLayout] = {size: each.step for size, each in multi_step_layouts.items()}

    def admit(self, device: Device, rank: int, row: int, request: NewRequestData) -> None:
        """The step's own pass computes the prompt."""

    def propose(self, device: Device, key: ProgramKey, draft: DraftRequest, packed: np.ndarray | None) -> Any:
        rows, state = draft.newest.rows, device.state
        lines_SF, stop_ids_RJ = self._sampler.lines([rows], key.size), self._sampler.ranks[0].stop_ids_RJ[rows]
        lines_SC = multi_step_lines(lines_SF, draft.num_drafts, stop_ids_RJ)
        state.kv, state.tables, state.rows, drafts_SK = device.call(
            key, device.token_params, state.kv, state.tables, state.rows, packed, lines_SC
        )
        return drafts_SK

    def release(self, device: Device, row: int, num_prompt_tokens: int) -> None:
        """Nothing is kept of a row."""
