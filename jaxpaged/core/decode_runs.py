"""Runs of decode steps: several steps in one program, while every running request decodes and nobody waits.

A run is scheduled like a step in which a request computes several tokens, of which it knows the first: slots for all
are taken beforehand, without preempting anybody, and as many placeholders are added. What ends a request is decided
when the tokens come back: those behind its end are dropped. Why a run is as long as it is, is not known here.
"""

from collections.abc import Iterator, Mapping, Sequence

from jaxpaged.core.kv_cache_manager import KVCacheManager
from jaxpaged.core.logprob_lines import sampled_logprobs
from jaxpaged.core.request import Request
from jaxpaged.core.step_plan import Share, StepPlan
from jaxpaged.messages import EngineCoreOutput, ModelRunnerOutput


def plan_run(
    plan: StepPlan, running: Sequence[Request], max_steps: int, manager: KVCacheManager, last_step_id: int
) -> bool:
    """Fill an empty plan with a run of at most `max_steps`. False, and nothing changed, when it must be one step.

    It must when somebody still computes a prompt, or needs a mask, which comes from the host; when blocks are too few,
    and when nobody has two tokens to go.
    """
    if max_steps < 2:
        return False
    runs = []
    for request in running:
        num_known = request.num_tokens_with_placeholders
        num_left = request.max_total_tokens - num_known
        if num_left <= 0:
            continue  # its last token is being sampled
        num_free = num_left if request.matcher is None else request.matcher.num_free(request.num_output_placeholders)
        if num_known != request.num_computed_tokens + 1 or not num_free:
            return False
        runs.append((request, min(max_steps, num_left, num_free)))
    num_steps = max((num_tokens for _, num_tokens in runs), default=0)
    num_blocks = sum(sum(manager.num_new_blocks(request, num_tokens)) for request, num_tokens in runs)
    if num_steps < 2 or num_blocks > manager.pool.num_free_blocks:
        return False
    plan.num_steps = num_steps
    for request, num_tokens in runs:
        manager.cache_blocks(request, last_step_id)
        block_ids = manager.allocate_slots(request, num_tokens)
        plan.add(request, Share(num_tokens, True, block_ids if any(block_ids) else None))
    return True


def take_runs(requests: Mapping[str, Request], output: ModelRunnerOutput) -> Iterator[tuple[Request, EngineCoreOutput]]:
    """Append each run's tokens to its request, up to the one that ends it; what the clients are told comes with it.

    A finish reason says that the request has ended, or failed; to end it is the caller's.
    """
    line = 0
    for request_id, tokens in zip(output.request_ids, output.token_runs):
        request, first_line, line = requests[request_id], line, line + len(tokens)
        if request.is_finished:
            continue
        result = EngineCoreOutput(
            request_id, [], num_cached_tokens=request.num_cached_tokens, num_preemptions=request.num_preemptions
        )
        if request.times is not None:
            result.times, request.times = request.times, None
        append_run(request, tokens, result)
        if result.finish_reason is None and request_id in output.failed:
            result.finish_reason, result.error = "error", output.failed[request_id]
        if request.sampling_params.logprobs is not None:
            lines = range(first_line, first_line + len(result.new_token_ids))
            result.new_logprobs = [sampled_logprobs(request, output, line) for line in lines]
        if request.prompt_logprobs is not None and result.new_token_ids:
            result.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
        yield request, result


def append_run(request: Request, tokens: Sequence[int], result: EngineCoreOutput) -> None:
    for token_id in tokens:
        request.all_token_ids.append(token_id)
        result.new_token_ids.append(token_id)
        if request.matcher is not None:
            request.matcher.accept([token_id])
        end = request.check_stop(token_id)
        if end is not None:
            result.finish_reason, result.stop_reason = end
            return
