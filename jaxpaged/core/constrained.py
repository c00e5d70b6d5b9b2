"""The requests whose tokens are bound, by a shape or by a limit of thinking.

Until its grammar is compiled a request waits in `preparation.py`. This module decides nothing about steps: it says
which of them need masks, and makes these.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from jaxpaged.core.grammar.matcher import Grammars, Matcher
from jaxpaged.core.grammar.thinking_budget import BudgetMatcher
from jaxpaged.core.request import Request
from jaxpaged.errors import RequestError
from jaxpaged.messages import EngineCoreRequest, SchedulerOutput

BOUND_BY = ("structured_outputs", "thinking_token_budget")
EVERY_TOKEN = np.uint32(0xFFFFFFFF)


class ConstrainedRequests:
    """`grammars` None: there is no vocabulary to compile for, and such requests are refused."""

    def __init__(self, grammars: Grammars | None):
        self._known_grammars = grammars
        self._following: set[Request] = set()

    @property
    def _grammars(self) -> Grammars:
        assert self._known_grammars is not None, "`check` refuses such requests"
        return self._known_grammars

    def check(self, message: EngineCoreRequest) -> None:
        """Raise RequestError when the request's tokens must be bound and cannot be."""
        bound_by = [name for name in BOUND_BY if getattr(message.sampling_params, name) is not None]
        if bound_by and self._known_grammars is None:
            what = f"{bound_by[0]} is given, but this engine has no tokenizer to compile it for. Leave it out."
            raise RequestError(what, bound_by[0])

    def compile(self, request: Request) -> Future[Any] | None:
        """Begin to compile a request's grammar; None: nothing binds it."""
        params = request.sampling_params
        if params.structured_outputs is not None:
            return self._grammars.compile(params.structured_outputs)
        if params.thinking_token_budget is None:
            return None
        nothing: Future[Any] = Future()
        nothing.set_result(None)
        return nothing

    def bind(self, request: Request, grammar: Future[Any]) -> None:
        """From now on the request follows what was compiled for it. Raises what compiling raised."""
        request.matcher = self._matcher_of(request, grammar)
        self._following.add(request)

    def _matcher_of(self, request: Request, future: Future[Any]) -> Matcher | BudgetMatcher:
        """Raises what compiling raised."""
        params = request.sampling_params
        matcher = None if params.structured_outputs is None else self._grammars.matcher_of(future)
        if (budget := params.thinking_token_budget) is not None:
            assert params.thinking_token_ids is not None, "the sampling parameters are not complete"
            return BudgetMatcher(budget, *params.thinking_token_ids, params.is_thinking, matcher)
        assert matcher is not None, "nothing binds the request"
        return matcher

    def forget(self, request: Request) -> None:
        """A request has ended."""
        self._following.discard(request)

    def need_masks(self, requests: Iterable[Request], max_sampled_tokens: Iterable[int]) -> bool:
        """Whether a request that may be bound then gets tokens in this step, whose placeholders are counted already."""
        return bool(self._following) and any(
            request.matcher is not None and request.matcher.num_free(request.num_output_placeholders - most) < most
            for request, most in zip(requests, max_sampled_tokens)
            if most
        )

    def masks(
        self, scheduled: SchedulerOutput, requests: Mapping[str, Request], drafts: Sequence[Sequence[int]] = ()
    ) -> np.ndarray:
        """Which tokens may be drawn in a step, uint32 [N, words]: a line for each token that each request may get, in
        their order. All of them without a grammar, none where a grammar cannot be followed any more.

        The tokens of all steps before it must be known. `requests` are those that are unfinished; `drafts` those of the
        requests that may get more than one token: the second one is drawn behind the first of them, and so on.
        """
        masks_NW = np.full((sum(scheduled.max_sampled_tokens), self._grammars.num_words), EVERY_TOKEN)
        drafted, end = iter(drafts), 0
        for request_id, most in zip(scheduled.request_ids, scheduled.max_sampled_tokens):
            end += most
            follow = next(drafted)[: most - 1] if most > 1 else ()
            request = requests.get(request_id)
            if most and request is not None and request.matcher is not None:
                num_follow = next((i for i, token_id in enumerate(follow) if token_id in request.stop_ids), len(follow))
                request.matcher.fill(masks_NW[end - most : end], follow[:num_follow])
        return masks_NW


def reason_of(error: Exception) -> str:
    """What an error says, or its name when it says nothing."""
    return str(error) or type(error).__name__
