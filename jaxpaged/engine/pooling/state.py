"""What the front end knows of a pooling request under way: a prompt whose one result is a vector.

It stands in the output processor where a prompt that generates does. What the numbers become is `pooler.py`'s business.
"""

from collections.abc import Sequence
from typing import Any

from jaxpaged.engine.output.prompt_state import PromptState, SequenceState
from jaxpaged.engine.pooling.pooler import Pooler
from jaxpaged.messages import EngineCoreOutput, EngineCoreRequest
from jaxpaged.pooling import PoolingOutput, PoolingRequestOutput


class PooledSequence(SequenceState):
    """The only sequence of a pooling request, without tokens."""

    pooled: Any = None

    def push(self, output: EngineCoreOutput) -> bool:
        """Take the vector. The engine has ended the request already."""
        self.pooled = output.pooled
        if output.finish_reason is not None:
            self.finish(output.finish_reason)
        return False


class PooledPrompt(PromptState):
    """One prompt."""

    sequences: Sequence[PooledSequence]

    def __init__(
        self, request: EngineCoreRequest, text: str | None, sequences: Sequence[PooledSequence], pooler: Pooler
    ):
        super().__init__(request, text, sequences)
        self._pooler = pooler

    def output(self, changed: Sequence[int]) -> PoolingRequestOutput | None:  # type: ignore[override]
        """The result, once it is there: the numbers that were asked for, or an error."""
        if not self.finished:
            return None
        sequence, request = self.sequences[0], self.request
        pooled, error = sequence.pooled, self.error
        if pooled is not None:
            assert request.pooling_params is not None, "only requests for vectors get one"
            pooled = self._pooler.finish(pooled, request.pooling_params)
        elif error is None:
            error = f"it ended before it was computed: {sequence.finish_reason}"
        token_ids = self._pooler.token_ids(request.prompt_token_ids)
        return PoolingRequestOutput(
            self.request_id, PoolingOutput(pooled), token_ids, self.num_cached_tokens or 0, True, error
        )
