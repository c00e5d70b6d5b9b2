"""The requests that cannot be queued yet: what they need is being compiled, a grammar or a program of the device.

They wait here, and not in the queue, so nobody waits behind them. Ordinary requests need neither and never come here.
This module does not know what grammars and programs do.
"""

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, NamedTuple

from jaxpaged.core.constrained import ConstrainedRequests, reason_of
from jaxpaged.core.request import Request
from jaxpaged.errors import RequestError
from jaxpaged.sampling_params.features import Extra, extras_of


class Needs(NamedTuple):
    """What a request waits for. `grammar` None: nothing binds its tokens."""

    extras: list[Extra]
    grammar: Future[Any] | None


class Preparation:
    """`can_run` says whether programs are compiled, and raises when they never will be."""

    def __init__(self, constrained: ConstrainedRequests, can_run: Callable[[Extra], bool]):
        self._constrained, self._can_run = constrained, can_run
        self.requests: dict[Request, Needs] = {}

    def add(self, request: Request) -> bool:
        """Begin to compile what a request needs. False: everything is there."""
        needs = Needs(extras_of(request.sampling_params), self._constrained.compile(request))
        if needs.grammar is not None or not all(self._ask(extra) is True for extra in needs.extras):
            self.requests[request] = needs
        return request in self.requests

    def take_ready(self) -> tuple[list[Request], list[tuple[Request, RequestError]]]:
        """(Requests that can be queued now, those that cannot be and why). The latter stay to be forgotten."""
        answers = {extra: self._ask(extra) for needs in self.requests.values() for extra in needs.extras}
        ready: list[Request] = []
        failed: list[tuple[Request, RequestError]] = []
        for request, needs in list(self.requests.items()):
            try:
                if not is_done(needs, answers):
                    continue
                if needs.grammar is not None:
                    self._constrained.bind(request, needs.grammar)
            except Exception as error:  # whatever the compiler makes of a grammar fails its own request
                known = error if isinstance(error, RequestError) else RequestError(reason_of(error))
                failed.append((request, known))
                continue
            del self.requests[request]
            ready.append(request)
        return ready, failed

    def wait(self, seconds: float) -> None:
        """Sleep, if somebody waits here, until another grammar is compiled or it may be time to ask again."""
        grammars = [needs.grammar for needs in self.requests.values() if needs.grammar is not None]
        if unready := [grammar for grammar in grammars if not grammar.done()]:
            wait(unready, seconds, FIRST_COMPLETED)
        elif self.requests:
            time.sleep(seconds)

    def forget(self, request: Request) -> bool:
        """A request has ended. True: it waited here, so it was in no queue."""
        self._constrained.forget(request)
        return self.requests.pop(request, None) is not None

    def _ask(self, extra: Extra) -> bool | Exception:
        try:
            return self._can_run(extra)
        except Exception as error:  # whatever it is, it concerns only those who need this
            return error


def is_done(needs: Needs, answers: dict[Extra, bool | Exception]) -> bool:
    """Whether there is nothing more to wait for. Raises why there never will be something of what is needed."""
    for extra in needs.extras:
        if isinstance(answer := answers[extra], Exception):
            raise answer
    if needs.grammar is None:
        return all(answers[extra] for extra in needs.extras)
    if not needs.grammar.done():
        return False
    return needs.grammar.exception() is not None or all(answers[extra] for extra in needs.extras)
