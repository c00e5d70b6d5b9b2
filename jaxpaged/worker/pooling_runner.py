"""The runner of a pooling engine: the same steps, but a prompt that is complete gives its vector, not a token.

It knows neither which tokens count nor what the vectors are for: that is compiled into the programs.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpaged.messages import ModelRunnerOutput, NewRequestData, SchedulerOutput
from jaxpaged.worker.input_batch import StepRequests
from jaxpaged.worker.model_runner import ModelRunner, PendingStep
from jaxpaged.worker.programs import ProgramKey

NOT_NUMBERS = "its hidden states are not finite numbers"


class PoolingRunner(ModelRunner):
    """`state.sampling` holds the sums of rows whose prompt takes several steps, or None where there are none."""

    def _new_pending(self, step_id: int) -> "PendingPooling":
        return PendingPooling(step_id)

    def _admit(self, request: NewRequestData, updates: list[tuple[int, int, int]], pending: PendingStep) -> None:
        row = self.rows.add(request)
        self.rows.append_blocks(row, request.block_ids, updates)

    def _forward(self, requests: StepRequests, updates: list[tuple[int, int, int]]) -> tuple[int, Any]:
        bucket, packed = self._pack(requests, updates)
        hidden_SD = self._run_forward(bucket, packed)
        if self.state.sampling is not None:
            key = ProgramKey("accumulate", bucket)
            self.state.sampling, hidden_SD = self._call(key, self.state.hidden, self.state.sampling, packed)
        return bucket, hidden_SD

    def _sample(
        self, scheduled: SchedulerOutput, requests: StepRequests, hidden_SD: Any, pending: "PendingPooling",
        masks_SW: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        pending.request_ids = list(itertools.compress(scheduled.request_ids, scheduled.max_new_tokens))
        bucket = self.programs.smallest_ready("pool", len(pending.request_ids), self.sample_buckets)
        pending.buckets.sample_bucket = bucket
        pending.pooled = self._call(ProgramKey("pool", bucket), self.head, hidden_SD)
        pending.pooled.copy_to_host_async()


@dataclass
class PendingPooling(PendingStep):
    """A dispatched step of a pooling engine."""

    pooled: Any = None

    def _read(self) -> ModelRunnerOutput:
        output = ModelRunnerOutput(self.step_id, self.request_ids, buckets=self.buckets)
        n = len(self.request_ids)
        if n:
            output.pooled = np.asarray(self.pooled)[:n]
            is_finite = np.isfinite(output.pooled).all(axis=1)
            output.failed.update((self.request_ids[i], NOT_NUMBERS) for i in np.flatnonzero(~is_finite))
        return output
