"""The requests whose tokens are bound, by a shape or by a limit of thinking: those whose grammar is being compiled,
and those that follow one.

A request waits here, and not in the queue, until its grammar is ready and steps can be masked, so nobody waits behind
it. This module decides nothing about steps: it says which of them need masks, and makes these.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from itertools import compress
from typing import Any

import numpy as np

from jaxpaged.core.request import Request
from jaxpaged.core.structured_output import Grammars, Matcher
from jaxpaged.core.thinking_budget import BudgetMatcher
from jaxpaged.errors import RequestError
from jaxpaged.messages import EngineCoreRequest, SchedulerOutput

BOUND_BY = ("structured_outputs", "thinking_token_budget")
EVERY_TOKEN = np.uint32(0xFFFFFFFF)


class ConstrainedRequests:
    """`grammars` None: there is no vocabulary to compile for, and such requests are refused."""

    def __init__(self, grammars: Grammars | None):
        self._grammars = grammars
        self.compiling: dict[Request, Future[Any]] = {}
        self._following: set[Request] = set()

    def check(self, message: EngineCoreRequest) -> None:
        """Raise RequestError when the request's tokens must be bound and cannot be."""
        bound_by = [name for name in BOUND_BY if getattr(message.sampling_params, name) is not None]
        if bound_by and self._grammars is None:
            what = f"{bound_by[0]} is given, but this engine has no tokenizer to compile it for. Leave it out."
            raise RequestError(what, bound_by[0])

    def add(self, request: Request) -> bool:
        """Begin to compile a request's grammar. False: nothing binds it, and it need not wait."""
        params = request.sampling_params
        if params.structured_outputs is not None:
            self.compiling[request] = self._grammars.compile(params.structured_outputs)
        elif params.thinking_token_budget is not None:  # it waits only until steps can be masked
            self.compiling[request] = Future()
            self.compiling[request].set_result(None)
        return request in self.compiling

    def take_compiled(self, can_mask: Callable[[], bool]) -> tuple[list[Request], list[tuple[Request, RequestError]]]:
        """(Requests that can be queued now, those that cannot be and why). The latter stay to be forgotten.

        `can_mask`: whether steps can be masked by now; it raises when they never will.
        """
        ready, failed = [], []
        try:
            masks = can_mask()
        except Exception as error:  # whatever it is, it concerns nobody else
            return [], [(request, RequestError(reason_of(error))) for request in self.compiling]
        for request, future in list(self.compiling.items()):
            if not future.done() or not (masks or future.exception()):
                continue
            try:
                request.matcher = self._matcher_of(request, future)
            except Exception as error:  # whatever the compiler makes of a grammar fails its own request
                known = isinstance(error, RequestError)
                failed.append((request, error if known else RequestError(reason_of(error))))
                continue
            del self.compiling[request]
            self._following.add(request)
            ready.append(request)
        return ready, failed

    def _matcher_of(self, request: Request, future: Future[Any]) -> "Matcher | BudgetMatcher":
        """Raises what compiling raised."""
        params = request.sampling_params
        matcher = None if params.structured_outputs is None else self._grammars.matcher_of(future)
        if params.thinking_token_budget is None:
            return matcher
        return BudgetMatcher(params.thinking_token_budget, *params.thinking_token_ids, request.all_token_ids, matcher)

    def wait(self, seconds: float) -> None:
        """Sleep, if somebody waits here, until another grammar is compiled or it may be time to ask again."""
        unready = [future for future in self.compiling.values() if not future.done()]
        if unready:
            wait(unready, seconds, FIRST_COMPLETED)
        elif self.compiling:
            time.sleep(seconds)

    def forget(self, request: Request) -> bool:
        """A request has ended. True: its grammar was still being compiled, so it was in no queue."""
        self._following.discard(request)
        return self.compiling.pop(request, None) is not None

    def need_masks(self, requests: Iterable[Request], samples: Iterable[bool]) -> bool:
        """Whether a request that may be bound then samples in this step, whose placeholders are counted already."""
        return bool(self._following) and any(
            request.matcher is not None and not request.matcher.num_free(request.num_output_placeholders - 1)
            for request in compress(requests, samples)
        )

    def masks(self, scheduled: SchedulerOutput, requests: Mapping[str, Request]) -> np.ndarray:
        """Which tokens those that sample in a step may draw, uint32 [n, words]: all of them without a grammar, none
        where a grammar cannot be followed any more.

        The tokens of all steps before it must be known. `requests` are those that are unfinished.
        """
        masks_SW = np.full((sum(scheduled.samples), self._grammars.num_words), EVERY_TOKEN)
        for mask_W, request_id in zip(masks_SW, compress(scheduled.request_ids, scheduled.samples)):
            request = requests.get(request_id)
            if request is not None and request.matcher is not None and not request.matcher.fill(mask_W):
                mask_W[:] = 0
        return masks_SW


def reason_of(error: Exception) -> str:
    return str(error) or type(error).__name__
