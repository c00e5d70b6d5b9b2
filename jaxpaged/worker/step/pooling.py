"""The output stage of an engine that pools: a prompt that is complete gives its vector, not a token."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpaged.messages import ModelRunnerOutput, NewRequestData, ProgramKey
from jaxpaged.worker.device import Device, start_copy
from jaxpaged.worker.model_runner import StageOutput, Step
from jaxpaged.worker.programs.declare import ProgramKind

NOT_NUMBERS = "its hidden states are not finite numbers"


class Pooler:
    """The output stage of an engine that pools. A prompt that is complete gives its vector, not a token. Which tokens
    count is compiled into the programs.

    `DeviceState.row_state` holds the sums of rows whose prompt takes several steps; None where there are none.
    """

    def admit(self, device: Device, rank: int, row: int, request: NewRequestData) -> None:
        """Sums begin at zero where a prompt begins."""

    def dispatch(self, device: Device, step: Step, masks_NW: np.ndarray | None = None) -> StageOutput:
        assert masks_NW is None, "nothing is drawn in an engine that pools"
        key, state, hidden_SD = step.scheduled.programs.finish, device.state, step.hidden_SD
        if state.row_state is not None:
            accumulate = ProgramKey(ProgramKind.ACCUMULATE, step.program.size)
            state.row_state, hidden_SD = device.call(accumulate, state.hidden, state.row_state, step.packed)
        if key is None:
            return StageOutput()
        ids_of_ranks = [rank.sampling()[0] for rank in step.ranks]
        pooled = PooledLines(ids_of_ranks, start_copy(device.call(key, device.head_for(key), hidden_SD)))
        return StageOutput([pooled], len(step.ranks) * key.size)


@dataclass
class PooledLines:
    """`pooled` is `[S, ...]`; the requests are the first lines. So it is for each attention rank, in turn."""

    ids_of_ranks: Sequence[list[str]]
    pooled: Any

    def read(self, output: ModelRunnerOutput) -> None:
        of_ranks = np.split(np.asarray(self.pooled), len(self.ids_of_ranks))
        output.request_ids = list(itertools.chain.from_iterable(self.ids_of_ranks))
        output.pooled = np.concatenate([lines[: len(ids)] for lines, ids in zip(of_ranks, self.ids_of_ranks)])
        is_finite = np.isfinite(output.pooled).all(axis=1)
        output.corrupted = [output.request_ids[i] for i in np.flatnonzero(~is_finite)]
        output.failed.update(dict.fromkeys(output.corrupted, NOT_NUMBERS))
