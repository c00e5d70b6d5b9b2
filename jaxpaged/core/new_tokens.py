"""The tokens of a single step: appended to their requests, and told to the clients. The way of most tokens there are.

Those of runs of decode steps are in `decode_runs.py`. Ending a request is the scheduler's; here it is only seen.
"""

from collections.abc import Mapping

from jaxpaged.core.logprob_lines import add_logprobs
from jaxpaged.core.request import Request
from jaxpaged.messages import EngineCoreOutput, ModelRunnerOutput


def take_tokens(
    requests: Mapping[str, Request], output: ModelRunnerOutput
) -> tuple[list[EngineCoreOutput], list[tuple[Request, EngineCoreOutput]]]:
    """(What the clients are told, and what of it ends a request). Requests that ended before are passed over."""
    if output.pooled is not None:
        return take_pooled(requests, output)
    results: list[EngineCoreOutput] = []
    ended: list[tuple[Request, EngineCoreOutput]] = []
    append = results.append
    for line, (request_id, token_id) in enumerate(zip(output.request_ids, output.sampled_token_ids)):
        request = requests[request_id]
        if request.finish_reason is not None:
            continue
        tokens = request.all_token_ids
        tokens.append(token_id)
        result = EngineCoreOutput(request_id, [token_id], request.num_cached_tokens, request.num_preemptions)
        if request.times is not None:
            result.times, request.times = request.times, None
        if request.reports_logprobs:
            add_logprobs(result, request, output, line)
        if token_id in request.stop_ids or len(tokens) >= request.max_total_tokens or request.matcher is not None:
            check_end(request, token_id, result)
            if result.finish_reason is not None:
                ended.append((request, result))
        append(result)
    return results, ended


def take_pooled(
    requests: Mapping[str, Request], output: ModelRunnerOutput
) -> tuple[list[EngineCoreOutput], list[tuple[Request, EngineCoreOutput]]]:
    """The same for requests that end with a vector in place of tokens."""
    ended = []
    for request_id, pooled in zip(output.request_ids, output.pooled, strict=True):
        request = requests[request_id]
        if request.finish_reason is None:
            result = request.to_last_output()
            result.finish_reason, result.pooled = "stop", pooled
            ended.append((request, result))
    return [result for _, result in ended], ended


def check_end(request: Request, token_id: int, result: EngineCoreOutput) -> None:
    """Say so if the newest token ends the request. One whose grammar allows nothing more needs no other end."""
    end = request.check_stop(token_id)
    if end is not None:
        result.finish_reason, result.stop_reason = end
    elif not request.matcher.accept([token_id]):
        result.finish_reason = "error"
        result.error, result.error_parameter = fault_of(request, "a token did not fit its grammar")
    elif request.matcher.is_complete:
        result.finish_reason = "stop"


def fault_of(request: Request, reason: str) -> tuple[str, str | None]:
    """(Why a request failed, the field that is to blame): that of its grammar where this cannot be followed, such as
    `start: "a"{1000000000}`, which shows what it costs only when a token has come."""
    error = None if request.matcher is None else request.matcher.error
    if error is None:
        return reason, None
    return f"structured_outputs cannot be followed: {error}", "structured_outputs"
