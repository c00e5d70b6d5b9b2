"""A step while it is being decided, and the steps whose output is still to come.

Which requests get what is the scheduler's decision; this is where it keeps the record of it.
"""

from itertools import compress
from typing import NamedTuple

from jaxpaged.core.request import Request, RequestStatus
from jaxpaged.errors import EngineError
from jaxpaged.messages import ModelRunnerOutput, NewRequestData, SchedulerOutput


class Grant(NamedTuple):
    """What a request gets of a step, where it is not one decoded token in a slot that it has."""

    num_tokens: int
    max_sampled_tokens: int
    new_block_ids: tuple[list[int], ...] | None


class NewStep:
    """A step while it is being decided. Requests without a `Grant` decode one token.

    `grants` are by the request's index in `requests`.
    """

    def __init__(self, budget: int, num_running: int = 0, num_pools: int = 1, most_drafts: int = 0):
        self.most = self.budget = budget  # tokens that it may have, and that are left
        self.num_spare = min(budget - num_running, most_drafts)  # for drafts: everybody's own token comes first
        self.requests: list[Request] = []
        self.grants: dict[int, Grant] = {}
        self.new_requests: list[NewRequestData] = []
        self.num_reserved_blocks = [0] * num_pools  # that running requests need to finish their prompts
        self.preempted = False
        self.num_steps = 1  # above 1: a run of decode steps

    def add(self, request: Request, grant: Grant) -> None:
        self.grants[len(self.requests)] = grant
        self.requests.append(request)
        self.budget -= grant.num_tokens

    def discard(self, request: Request) -> None:
        """Take a request out, if it is in, and its tokens back."""
        if request in self.requests:
            index = self.requests.index(request)
            del self.requests[index]
            grant = self.grants.pop(index, None)
            self.budget += grant.num_tokens if grant else 1
            self.grants = {each - (each > index): grant for each, grant in self.grants.items()}


class InFlightStep(NamedTuple):
    """What must be known of a step when its output comes. Requests are kept as objects: an id may be used again."""

    requests: dict[str, Request]
    scheduled: SchedulerOutput


class StepsInFlight:
    """Scheduled steps, oldest first, from `add` until their output is taken or they are revoked."""

    def __init__(self):
        self._steps: dict[int, InFlightStep] = {}
        self._last_requests: list[Request] = []  # of the newest step, and what follows from them
        self._last_ids: list[str] = []
        self._last_by_id: dict[str, Request] = {}

    def ids_of(self, requests: list[Request]) -> list[str]:
        """The ids of the next step's requests. While all decode, these are those of the step before."""
        if requests != self._last_requests:
            self._last_requests = requests
            self._last_ids = [request.request_id for request in requests]
            self._last_by_id = dict(zip(self._last_ids, requests))
        return self._last_ids

    def add(self, scheduled: SchedulerOutput) -> None:
        """A step of the requests that `ids_of` was last asked for."""
        self._steps[scheduled.step_id] = InFlightStep(self._last_by_id, scheduled)

    def take(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> InFlightStep | None:
        """The record of a step whose output is here; None when the step was empty, or revoked.

        Raises EngineError when the output belongs to another step or lacks tokens, or when requests still wait
        for an older step.
        """
        step_id = scheduled.step_id
        if output.step_id != step_id:
            raise EngineError(
                f"the output of step {output.step_id} came for step {step_id}. The executor must return outputs in "
                "the order of the steps."
            )
        while self._steps and (oldest := next(iter(self._steps))) < step_id:
            self._drop_failed_step(oldest)
        step = self._steps.pop(step_id, None)
        num_given = sum(map(len, output.sampled_token_ids)) if output.pooled is None else len(output.pooled)
        if step is not None and num_given != sum(scheduled.max_sampled_tokens):
            check_sampled(scheduled, output)
            if output.pooled is None:
                take_back(step, output)
        return step

    def _drop_failed_step(self, step_id: int) -> None:
        """A step without output must have been reported as failed, request by request."""
        step = self._steps.pop(step_id)
        alive = [request.request_id for request in step.requests.values() if not request.is_finished]
        if alive:
            raise EngineError(
                f"no output came for step {step_id}, in which {alive[:5]} took part. The executor must return "
                "outputs in the order of the steps, or report the step as failed."
            )

    def revoke(self, first_step_id: int) -> list[InFlightStep]:
        """Forget all steps from `first_step_id` on."""
        return [self._steps.pop(step_id) for step_id in list(self._steps) if step_id >= first_step_id]


def check_sampled(scheduled: SchedulerOutput, output: ModelRunnerOutput) -> None:
    """Raise EngineError unless every request that could get tokens is in `output`, or has failed."""
    sampled = set(compress(scheduled.request_ids, scheduled.max_sampled_tokens))
    missing, unasked = sampled - set(output.request_ids) - set(output.failed), set(output.request_ids) - sampled
    if missing or unasked:
        raise EngineError(
            f"step {scheduled.step_id} was to sample for {len(sampled)} requests, but its output has "
            f"{len(output.request_ids)}; missing {sorted(missing)[:5]}, not asked for {sorted(unasked)[:5]}."
        )


def take_back(step: InFlightStep, output: ModelRunnerOutput) -> None:
    """Whoever got fewer tokens than it might have has computed fewer, too, and waits for fewer."""
    tokens = dict(zip(output.request_ids, output.sampled_token_ids, strict=True))
    for request_id, most in zip(step.scheduled.request_ids, step.scheduled.max_sampled_tokens):
        request, num_missing = step.requests[request_id], most - len(tokens.get(request_id, ()))
        request.num_tokens_with_placeholders -= num_missing
        if request.status is RequestStatus.RUNNING:  # a preempted one has computed nothing
            request.num_computed_tokens -= num_missing
