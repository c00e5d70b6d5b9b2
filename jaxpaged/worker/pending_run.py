"""A dispatched run of decode steps: the only place that reads its arrays back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxpaged.errors import EngineError
from jaxpaged.messages import ModelRunnerOutput, SampledLogprobs, StepBuckets
from jaxpaged.sampling.logprobs import LogprobOutput
from jaxpaged.worker.decode_loop import NOT_COMPUTED

NOTHING_TO_DRAW = (
    "no token can be drawn: the model's logits for this request are not finite numbers, or its own structured_outputs, "
    "allowed_token_ids, logit_bias, bad_words and min_tokens leave none. Other requests are unharmed."
)


@dataclass
class PendingRun:
    """`tokens` is `[max_steps, R]`, and so are the log probabilities; the requests are the first rows.

    How many steps there were is known when they are over: `count` is then called for each, with its tokens and bucket.
    """

    step_id: int
    request_ids: list[str]
    tokens: Any
    logprobs: LogprobOutput | None
    buckets: StepBuckets
    count: Callable[[int, int], None]

    def result(self) -> ModelRunnerOutput:
        """Wait for the run. Raises EngineError when the devices could not compute it."""
        try:
            return self._read()
        except jax.errors.JaxRuntimeError as error:
            raise EngineError(f"the run of decode steps {self.step_id} failed on the device: {error}") from error

    def _read(self) -> ModelRunnerOutput:
        tokens_RI = np.asarray(self.tokens).T[: len(self.request_ids)]
        computed_RI, good_RI = tokens_RI != NOT_COMPUTED, tokens_RI >= 0
        output = ModelRunnerOutput(self.step_id, self.request_ids, buckets=self.buckets)
        output.sampled_token_ids = [tokens_I[good_I].tolist() for tokens_I, good_I in zip(tokens_RI, good_RI)]
        bad_R = (computed_RI & ~good_RI).any(axis=1)
        output.failed = {self.request_ids[r]: NOTHING_TO_DRAW for r in np.flatnonzero(bad_R)}
        if self.logprobs is not None:
            lines = jax.tree.map(lambda array: np.asarray(array).swapaxes(0, 1)[: len(good_RI)][good_RI], self.logprobs)
            output.logprobs = SampledLogprobs(lines.token_ids_SJ, lines.logprobs_SJ, lines.ranks_S)
        for num_tokens in np.count_nonzero(computed_RI, axis=0):  # at last: a wait may be interrupted, and begun again
            if num_tokens:
                self.count(int(num_tokens), self.buckets.token_bucket)
        return output
