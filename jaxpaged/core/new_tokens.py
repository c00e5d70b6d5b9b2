"""Tokens that a step gives: how many it may, where that is more than one, and what becomes of them when they come.

Several come from a run of decode steps in one program, while every running request decodes and nobody waits, and from
drafts, which any request may have that decodes. Both are scheduled like a step in which a request computes several
tokens, of which it knows the first: slots for all are taken beforehand, without preempting anybody, and as many
placeholders are added. Why a run, or a draft, is as long as it is, is not known here. What ends a request is decided
when its tokens are known, and those behind its end are dropped; to end it is the scheduler's.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, repeat
from typing import TypeGuard

from jaxpaged.core.kv_cache.manager import KVCacheManager
from jaxpaged.core.logprob_lines import add_logprobs
from jaxpaged.core.request import Request
from jaxpaged.core.steps import Grant, NewStep
from jaxpaged.messages import NOTHING_TO_DRAW, EngineCoreOutput, ModelRunnerOutput
from jaxpaged.sampling_params.checks import nothing_to_draw
from jaxpaged.sampling_params.features import limiting_fields

LEAST_STEPS = 2
"""Fewer are no run."""
Ended = list[tuple[Request, EngineCoreOutput]]
"""Requests, and the outputs whose finish reason says that they have ended, or failed."""


Run = list[tuple[Request, int]]
"""Requests, and how many tokens each of them may get in a run."""


def run_of(running: Sequence[Request], max_steps: int, manager: KVCacheManager) -> Run | None:
    """What a run of at most `max_steps` would be. None when it must be one step: when somebody still computes a prompt,
    or needs a mask, which comes from the host, and when blocks are too few."""
    runs: Run = []
    for request in running:
        num_known = request.num_tokens_with_placeholders
        num_left = request.max_total_tokens - num_known
        if num_left <= 0:
            continue  # its last token is being sampled
        if request.num_drafts:
            return None  # its drafts are worth more
        num_free = num_left if request.matcher is None else request.matcher.num_free(request.num_output_placeholders)
        if num_known != request.num_computed_tokens + 1 or not num_free:
            return None
        runs.append((request, min(max_steps, num_left, num_free)))
    return runs if not runs or manager.can_allocate(runs) else None


def length_of(run: Run | None) -> int:
    """How many steps a run has, 0 if there is none."""
    return max((num_tokens for _, num_tokens in run or ()), default=0)


def is_long(run: Run | None) -> TypeGuard[Run]:
    """Whether there is a run of several steps."""
    return length_of(run) >= LEAST_STEPS


def step_of_run(run: Run, budget: int, manager: KVCacheManager, last_step_id: int) -> NewStep:
    """The step that is a run, which `run_of` has just said to be possible."""
    step = NewStep(budget)
    step.num_steps = max(length_of(run), 1)
    for request, num_tokens in run:
        manager.cache_blocks(request, last_step_id)
        block_ids = manager.allocate_slots(request, num_tokens)
        assert block_ids is not None, "can_allocate has said that there are blocks"
        step.add(request, Grant(num_tokens, num_tokens, block_ids if any(block_ids) else None))
    return step


def num_drafts_in_step(request: Request, step: NewStep, manager: KVCacheManager) -> int:
    """How many drafts of a request that decodes go into a step: none that nobody else has room for."""
    num_left = request.max_total_tokens - request.num_tokens_with_placeholders
    most = min(request.num_drafts, num_left - 1, step.num_spare, step.budget - 1)
    if most <= 0 or not manager.can_allocate([(request, 1 + most)]):
        return 0
    step.num_spare -= most
    return most


def take_tokens(requests: Mapping[str, Request], output: ModelRunnerOutput) -> tuple[list[EngineCoreOutput], Ended]:
    """Append to each request the tokens that it got -> (what the clients are told, what of it ends a request).

    Requests that ended before are passed over.
    """
    if output.pooled is not None:
        return take_pooled(requests, output)
    failed = output.failed
    ended: Ended = []
    results: list[EngineCoreOutput] = []
    append, token_ids = results.append, output.sampled_token_ids
    first_lines = repeat(0) if output.logprobs is None else accumulate(map(len, token_ids), initial=0)
    for request_id, new, first_line in zip(output.request_ids, token_ids, first_lines):
        request = requests[request_id]
        if request.finish_reason is not None:
            continue
        tokens = request.all_token_ids
        result = EngineCoreOutput(request_id, new, request.num_cached_tokens, request.num_preemptions)
        if request.times is not None:
            result.times, request.times = request.times, None
            result.loaded = request.loaded
        may_end = len(tokens) + len(new) >= request.max_total_tokens or not request.stop_ids.isdisjoint(new)
        if not (may_end or failed) and request.matcher is None:
            tokens += new
        else:
            result.new_token_ids = []
            append_until_end(request, new, result, failed.get(request_id))
            if result.finish_reason is not None:
                ended.append((request, result))
        if request.reports_logprobs:
            add_logprobs(result, request, output, first_line)
        append(result)
    return results, ended


def take_pooled(requests: Mapping[str, Request], output: ModelRunnerOutput) -> tuple[list[EngineCoreOutput], Ended]:
    """The same for requests that end with a vector in place of tokens."""
    assert output.pooled is not None
    ended: Ended = []
    for request_id, pooled in zip(output.request_ids, output.pooled, strict=True):
        request = requests[request_id]
        if request.finish_reason is None and request_id not in output.failed:
            result = request.to_last_output()
            result.finish_reason, result.pooled = "stop", pooled
            ended.append((request, result))
    return [result for _, result in ended], ended


def append_until_end(request: Request, token_ids: list[int], result: EngineCoreOutput, failure: str | None) -> None:
    """Append tokens up to the one that ends the request, if one does; otherwise a failure after the last one does."""
    for token_id in token_ids:
        request.all_token_ids.append(token_id)
        result.new_token_ids.append(token_id)
        check_end(request, token_id, result)
        if result.finish_reason is not None:
            return
    if failure is not None:
        result.finish_reason = "error"
        result.error, result.error_parameter = fault_of(request, failure)


def check_end(request: Request, token_id: int, result: EngineCoreOutput) -> None:
    """Say so if the newest token ends the request. One whose grammar allows nothing more needs no other end."""
    end = request.check_stop(token_id)
    if end is not None:
        result.finish_reason, result.stop_reason = end
    elif request.matcher is None:
        return
    elif not request.matcher.accept([token_id]):
        result.finish_reason = "error"
        result.error, result.error_parameter = fault_of(request, "a token did not fit its grammar")
    elif request.matcher.is_complete:
        result.finish_reason = "stop"


def fault_of(request: Request, reason: str) -> tuple[str, str | None]:
    """(Why a request failed, the field that is to blame): that of its grammar where this cannot be followed, such as
    `start: "a"{1000000000}`, which shows what it costs only when a token has come. Where no token was left to draw, the
    fields that allow none are."""
    if request.matcher is not None and (error := request.matcher.error) is not None:
        return f"structured_outputs cannot be followed: {error}", "structured_outputs"
    if reason == NOTHING_TO_DRAW and (fields := limiting_fields(request.sampling_params)):
        return str(nothing_to_draw(fields)), fields[0]
    return reason, None
