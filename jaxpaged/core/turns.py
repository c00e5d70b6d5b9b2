"""Whose turn it is to decode, where several steps are computed at the same time: on the stages of a pipeline.

A request's next step needs the token of its last one, so two steps overlap only if nobody is in both. With n stages a
step has an n-th of those who decode, the ones that have waited longest; n steps later the token is there. That is only
about time: a request that is in two steps in a row waits on the device, and gets the same tokens.
"""

from collections.abc import Sequence

from jaxpaged.core.request import Request


class Turns:
    """With one stage everybody decodes in every step."""

    def __init__(self, num_stages: int):
        self._num_stages = num_stages
        self._num_steps = 0
        self._last_steps: dict[str, int] = {}

    def of_step(self, running: Sequence[Request]) -> tuple[Request, ...]:
        """Those of `running`, in its order, that may be in the next step: all that are not decoding, and those of the
        others whose turn it is. Where everybody decodes and nobody's token would be there, some wait for it."""
        if self._num_stages == 1:
            return tuple(running)
        self._num_steps += 1
        admitted = self._num_steps - 1  # the last step of whoever is not known yet
        last = {each.request_id: self._last_steps.get(each.request_id, admitted) for each in running}
        decoding = list(filter(is_decoding, running))
        share = -(-len(decoding) // self._num_stages)
        ready = [each for each in decoding if self._num_steps - last[each.request_id] >= self._num_stages]
        if not ready and not any(map(is_computing_prompt, running)):
            ready = decoding
        ready.sort(key=lambda each: last[each.request_id])
        waiting = set(decoding).difference(ready[:share])
        self._last_steps = last | {each.request_id: self._num_steps for each in running if each not in waiting}
        return tuple(each for each in running if each not in waiting)


def is_decoding(request: Request) -> bool:
    """Whether it lacks one token only, and is not about to end with it."""
    num_known = request.num_tokens_with_placeholders
    return num_known <= request.num_computed_tokens + 1 and num_known < request.max_total_tokens


def is_computing_prompt(request: Request) -> bool:
    """Whether it lacks more than its newest token."""
    return request.num_tokens_with_placeholders > request.num_computed_tokens + 1
