"""Requests of several readers over one engine in one thread: whoever waits for results steps the engine for everybody.

What a step gives for the requests of others is kept until they ask, so a batch may run inside a loop over a stream, and
two streams side by side. This module knows no prompts and no text.
"""

from collections.abc import Iterable, Sequence

from jaxpaged.engine.llm_engine import LLMEngine
from jaxpaged.engine.output.stream import joined
from jaxpaged.errors import ConflictError
from jaxpaged.interrupts import held_interrupts, holding_interrupts
from jaxpaged.messages import RequestOutput
from jaxpaged.pooling import PoolingRequestOutput

Output = RequestOutput | PoolingRequestOutput


class RequestRunner:
    """Steps `engine` and keeps results of the requests that were announced to it."""

    def __init__(self, engine: LLMEngine):
        self._engine = engine
        self._results: dict[str, Output | None] = {}  # by request; None: nothing new
        self._deltas: set[str] = set()  # requests whose results hold only what is new
        self._left: list[str] = []
        self._stepping = False

    def expect(self, request_id: str, by_delta: bool = False) -> None:
        """Keep the results of a request, the newest of them, or all joined to one if they come `by_delta`."""
        self._results[request_id] = None
        if by_delta:
            self._deltas.add(request_id)

    def step(self) -> list[Output]:
        """Step the engine. Raises ConflictError when it sleeps and has nothing to say; requests stay as they are."""
        with held_interrupts():
            self._abort_left()
            self._stepping = True
            try:
                outputs = self._engine.step()
            finally:
                self._stepping = False
            for output in outputs:
                request_id = output.request_id
                if request_id in self._results:
                    before = self._results[request_id]
                    join = before is not None and request_id in self._deltas
                    self._results[request_id] = joined(before, output) if join else output
        if not outputs and self._engine.is_sleeping():
            raise ConflictError("the engine sleeps, so no prompt can be completed. Call wake_up() first.")
        return outputs

    def take(self, request_id: str) -> Output | None:
        """What came of a request since it was asked for last; a finished one is forgotten."""
        output = self._results[request_id]
        self._results[request_id] = None
        if output is not None and output.finished:
            self._forget(request_id)
        return output

    def finished(self, request_ids: Iterable[str]) -> list[Output]:
        """The results of those of these requests that are done."""
        found = (self._results[request_id] for request_id in request_ids)
        return [output for output in found if output is not None and output.finished]

    @holding_interrupts
    def leave(self, request_ids: Sequence[str]) -> None:
        """Nobody waits for these any more: those under way are aborted.

        The garbage collector may close a stream in the middle of a step; then the next step aborts it first.
        """
        for request_id in request_ids:
            self._forget(request_id)
        self._left += request_ids
        if not self._stepping:
            self._abort_left()

    def _forget(self, request_id: str) -> None:
        self._results.pop(request_id, None)
        self._deltas.discard(request_id)

    def _abort_left(self) -> None:
        if self._left:
            left, self._left = self._left, []
            self._engine.abort_request(left)
