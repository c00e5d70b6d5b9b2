"""Requests whose tokens are bound, by a grammar or by a limit of thinking; and those for which something is compiled.

A request waits here, and not in the queue, until its grammar is compiled, and the programs of the device that ordinary
requests do not need. So no other request waits behind it. This module says which steps need masks, and makes them; it
decides nothing about steps, and does not know what grammars and programs do.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, NamedTuple

import numpy as np

from jaxpaged.core.grammar.matcher import Grammars, Matcher
from jaxpaged.core.grammar.thinking_budget import BudgetMatcher
from jaxpaged.core.request import Request
from jaxpaged.errors import RequestError
from jaxpaged.messages import EngineCoreRequest, SchedulerOutput
from jaxpaged.sampling_params.features import Extra, extras_of

OF_MODALITIES = {"image": Extra.PICTURES, "video": Extra.VIDEOS}
"""What features of a modality need."""
BOUND_BY = ("structured_outputs", "thinking_token_budget")
EVERY_TOKEN = np.uint32(0xFFFFFFFF)


class Needs(NamedTuple):
    """What a request waits for. `grammar` None: nothing binds its tokens."""

    extras: list[Extra]
    grammar: Future[Any] | None


class StructuredOutputManager:
    """`waiting`: the requests that cannot be queued yet. `bound`: unfinished requests whose tokens are bound.

    `grammars` None: there is no vocabulary to compile for, and bound requests are refused. `can_run` says whether
    programs are compiled, and raises when they never will be.
    """

    def __init__(self, grammars: Grammars | None, can_run: Callable[[Extra], bool]):
        self._known_grammars, self._can_run = grammars, can_run
        self.waiting: dict[Request, Needs] = {}
        self.bound: set[Request] = set()

    @property
    def _grammars(self) -> Grammars:
        assert self._known_grammars is not None, "`check` refuses such requests"
        return self._known_grammars

    # ---- what a request needs ------------------------------------------------------------------

    def check(self, message: EngineCoreRequest) -> None:
        """Raise RequestError when the request's tokens must be bound and cannot be."""
        bound_by = [name for name in BOUND_BY if getattr(message.sampling_params, name) is not None]
        if bound_by and self._known_grammars is None:
            what = f"{bound_by[0]} is given, but this engine has no tokenizer to compile it for. Leave it out."
            raise RequestError(what, bound_by[0])

    def add(self, request: Request) -> bool:
        """Begin to compile what a request needs. False: nothing has to be compiled."""
        extras = extras_of(request.sampling_params)
        for modality, extra in OF_MODALITIES.items() if request.mm_features else ():
            if any(each.modality == modality and not each.is_embeds for each in request.mm_features):
                extras.append(extra)
        needs = Needs(extras, self._compile(request))
        if needs.grammar is not None or not all(self._ask(extra) is True for extra in needs.extras):
            self.waiting[request] = needs
        return request in self.waiting

    def _compile(self, request: Request) -> Future[Any] | None:
        """Begin to compile a request's grammar; None: nothing binds its tokens."""
        params = request.sampling_params
        if params.structured_outputs is not None:
            return self._grammars.compile(params.structured_outputs)
        if params.thinking_token_budget is None:
            return None
        nothing: Future[Any] = Future()
        nothing.set_result(None)
        return nothing

    def take_ready(self) -> tuple[list[Request], list[tuple[Request, RequestError]]]:
        """(Requests that can be queued now, those that failed and why). The failed ones stay until `forget`."""
        answers = {extra: self._ask(extra) for needs in self.waiting.values() for extra in needs.extras}
        ready: list[Request] = []
        failed: list[tuple[Request, RequestError]] = []
        for request, needs in list(self.waiting.items()):
            try:
                if not is_done(needs, answers):
                    continue
                if needs.grammar is not None:
                    request.matcher = self._matcher_of(request, needs.grammar)
                    self.bound.add(request)
            except Exception as error:  # an error of the grammar's compiler fails its own request, whatever it is
                known = error if isinstance(error, RequestError) else RequestError(str(error) or type(error).__name__)
                failed.append((request, known))
                continue
            del self.waiting[request]
            ready.append(request)
        return ready, failed

    def _matcher_of(self, request: Request, grammar: Future[Any]) -> Matcher | BudgetMatcher:
        """Raises what compiling raised."""
        params = request.sampling_params
        matcher = None if params.structured_outputs is None else self._grammars.matcher_of(grammar)
        if (budget := params.thinking_token_budget) is not None:
            assert params.thinking_token_ids is not None, "the sampling parameters are not complete"
            return BudgetMatcher(budget, *params.thinking_token_ids, params.is_thinking, matcher)
        assert matcher is not None, "nothing binds the request"
        return matcher

    def wait(self, seconds: float) -> None:
        """If requests wait here, sleep until another grammar is compiled, or it may be time to ask for programs."""
        grammars = [needs.grammar for needs in self.waiting.values() if needs.grammar is not None]
        if unready := [grammar for grammar in grammars if not grammar.done()]:
            wait(unready, seconds, FIRST_COMPLETED)
        elif self.waiting:
            time.sleep(seconds)

    def forget(self, request: Request) -> bool:
        """A request has ended. True: it waited here, so it was in no queue."""
        self.bound.discard(request)
        return self.waiting.pop(request, None) is not None

    def _ask(self, extra: Extra) -> bool | Exception:
        try:
            return self._can_run(extra)
        except Exception as error:  # whatever it is, it concerns only the requests that need this
            return error

    # ---- masks ---------------------------------------------------------------------------------

    def need_masks(self, requests: Mapping[str, Request], scheduled: SchedulerOutput) -> bool:
        """Whether a request gets tokens in this step, whose placeholders are counted already, that may be bound."""
        for request_id, most in zip(scheduled.request_ids, scheduled.max_sampled_tokens):
            request = requests[request_id]
            matcher = request.matcher
            if most and matcher is not None and matcher.num_free(request.num_output_placeholders - most) < most:
                return True
        return False

    def grammar_bitmask(
        self, scheduled: SchedulerOutput, requests: Mapping[str, Request], drafts: Sequence[Sequence[int]] = ()
    ) -> np.ndarray:
        """Which tokens may be sampled in a step, uint32 [N, words]: a line for each token that each request may get, in
        their order. A request without a grammar may get all tokens, one whose grammar cannot be followed any more none.

        The tokens of all steps before it must be known. `requests` are those that are unfinished; `drafts` those of the
        requests that may get more than one token: the second one is sampled behind the first draft, and so on.
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


def is_done(needs: Needs, answers: dict[Extra, bool | Exception]) -> bool:
    """Whether everything that is needed is compiled. Raises the reason why something of it never will be."""
    for extra in needs.extras:
        if isinstance(answer := answers[extra], Exception):
            raise answer
    if needs.grammar is None:
        return all(answers[extra] for extra in needs.extras)
    if not needs.grammar.done():
        return False
    return needs.grammar.exception() is not None or all(answers[extra] for extra in needs.extras)
