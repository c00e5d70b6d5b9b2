"""From a step's output to what clients are told: new tokens, log probabilities, and why a request has ended.

A step may give a request one token, several (a multi-step decode, or accepted drafts), or a vector. The end of a
request is decided when its tokens are known, and tokens behind its end are dropped; to end it is the scheduler's.
"""

from collections.abc import Mapping
from itertools import accumulate, compress, repeat

from jaxpaged.core.request import Request, RequestStatus
from jaxpaged.errors import EngineError
from jaxpaged.messages import (
    NOTHING_TO_DRAW,
    EngineCoreOutput,
    ModelRunnerOutput,
    ProcessedLogprob,
    PromptLogprobs,
    SampledLogprobs,
    SamplingMasks,
    SchedulerOutput,
    TokenLogprobs,
)
from jaxpaged.sampling_params.checks import nothing_to_draw
from jaxpaged.sampling_params.features import limiting_fields

Ended = list[tuple[Request, EngineCoreOutput]]
"""Requests that have ended or failed, each with the output that has its finish reason."""


def count_back(requests: Mapping[str, Request], scheduled: SchedulerOutput, output: ModelRunnerOutput) -> None:
    """Where a step gave fewer tokens than it might have, its requests have computed fewer, too, and wait for fewer.

    Raises EngineError when the output lacks a request, or has one too many.
    """
    num_given = sum(map(len, output.sampled_token_ids)) if output.pooled is None else len(output.pooled)
    if num_given == sum(scheduled.max_sampled_tokens):
        return
    check_sampled(scheduled, output)
    if output.pooled is not None:
        return
    tokens = dict(zip(output.request_ids, output.sampled_token_ids, strict=True))
    for request_id, most in zip(scheduled.request_ids, scheduled.max_sampled_tokens):
        request, num_missing = requests[request_id], most - len(tokens.get(request_id, ()))
        request.num_tokens_with_placeholders -= num_missing
        if request.status is RequestStatus.RUNNING:  # a preempted one has computed nothing
            request.num_computed_tokens -= num_missing


def check_sampled(scheduled: SchedulerOutput, output: ModelRunnerOutput) -> None:
    """Raise EngineError unless every request that could get tokens is in `output`, or has failed."""
    sampled = set(compress(scheduled.request_ids, scheduled.max_sampled_tokens))
    missing, unasked = sampled - set(output.request_ids) - set(output.failed), set(output.request_ids) - sampled
    if missing or unasked:
        raise EngineError(
            f"step {scheduled.step_id} was to sample for {len(sampled)} requests, but its output has "
            f"{len(output.request_ids)}; missing {sorted(missing)[:5]}, not asked for {sorted(unasked)[:5]}."
        )


def take_tokens(requests: Mapping[str, Request], output: ModelRunnerOutput) -> tuple[list[EngineCoreOutput], Ended]:
    """Append to each request its new tokens -> (what the clients are told, the outputs that end a request).

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
        if request.untold_spans is not None:
            result.weight_spans, request.untold_spans = request.untold_spans, None
            result.old_kv_from = request.old_kv_from
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
    """Append tokens up to the one that ends the request, if one does. A `failure` ends it behind the last token."""
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
    """Set the finish reason if the newest token ends the request, or its grammar allows no token behind it."""
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
    """(Why a request failed, the field that is to blame).

    A grammar that cannot be followed is to blame, such as `start: "a"{1000000000}`, which shows its cost only when a
    token has come. Where no token was left to sample, the fields that allow none are.
    """
    if request.matcher is not None and (error := request.matcher.error) is not None:
        return f"structured_outputs cannot be followed: {error}", "structured_outputs"
    if reason == NOTHING_TO_DRAW and (fields := limiting_fields(request.sampling_params)):
        return str(nothing_to_draw(fields)), fields[0]
    return reason, None


# ---- log probabilities -------------------------------------------------------------------------------
# The runner computes as many candidates for all requests of a step as the most demanding one asks for. A request gets
# the first ones of its line.


def add_logprobs(result: EngineCoreOutput, request: Request, output: ModelRunnerOutput, first_line: int) -> None:
    """Add the log probabilities that a request asked for. The lines of its new tokens follow one another."""
    lines = range(first_line, first_line + len(result.new_token_ids))
    if request.sampling_params.returns_mask and output.logprobs is not None:
        result.sampling_mask = masks_of(output.logprobs.masks, lines)
    if request.sampling_params.logprobs is not None:
        result.new_logprobs = [sampled_logprobs(request, output, line) for line in lines]
        if output.logprobs is not None and output.logprobs.processed is not None:
            pairs = output.logprobs.processed[lines.start : lines.stop].tolist()
            result.processed_logprobs = [ProcessedLogprob(*pair) for pair in pairs]
    if request.prompt_logprobs is not None and result.new_token_ids:
        result.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None


def masks_of(masks: SamplingMasks | None, lines: range) -> list[list[int]]:
    """What limits left to the tokens of some lines."""
    assert masks is not None, "only an engine that tells masks has requests that want them"
    first = int(masks.counts[: lines.start].sum())
    ends = first + masks.counts[lines.start : lines.stop].cumsum()
    return [masks.token_ids[start:end].tolist() for start, end in zip([first, *ends], ends)]


def sampled_logprobs(request: Request, output: ModelRunnerOutput, line: int) -> TokenLogprobs:
    """The candidates of a sampled token. Raises EngineError when the step has none."""
    k = request.sampling_params.logprobs
    if k is None or output.logprobs is None:
        raise EngineError(
            f"request {request.request_id!r} asks for {k} logprobs, but the output of step {output.step_id} has none."
        )
    return _cut_line(output.logprobs, line, k)


def collect_prompt_logprobs(output: ModelRunnerOutput, requests: Mapping[str, Request]) -> None:
    """Append the log probabilities of prompt tokens that a step computed.

    A preempted request computes its prompt again; lines that it has already are passed over.
    """
    for request_id, chunk in output.prompt_logprobs.items():
        request = requests[request_id]
        collected, k = request.prompt_logprobs, request.sampling_params.prompt_logprobs
        if collected is None or k is None or request.first_scored is None or request.is_finished:
            continue
        first = request.first_scored + len(collected) - chunk.start
        if first < 0:
            raise EngineError(
                f"the prompt logprobs of request {request_id!r} go on at token {chunk.start}, but only "
                f"{len(collected)} lines came before."
            )
        collected.extend(_cut_line(chunk, line, k) for line in range(first, len(chunk.ranks)))


def _cut_line(lines: SampledLogprobs | PromptLogprobs, line: int, k: int) -> TokenLogprobs:
    """The token itself and the `k` most likely ones; all when `k` is -1."""
    end = None if k == -1 else 1 + k
    return TokenLogprobs(
        lines.token_ids[line, :end].tolist(), lines.logprobs[line, :end].tolist(), int(lines.ranks[line])
    )
