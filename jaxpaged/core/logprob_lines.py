"""From the runner's arrays of log probabilities to what each request asked for.

The runner computes as many candidates for all requests of a step as the most demanding asks for; a request gets
the first ones of its line. Which token was sampled, and why, is not known here.
"""

from collections.abc import Mapping

from jaxpaged.core.request import Request
from jaxpaged.errors import EngineError
from jaxpaged.messages import EngineCoreOutput, ModelRunnerOutput, PromptLogprobs, SampledLogprobs, TokenLogprobs


def add_logprobs(result: EngineCoreOutput, request: Request, output: ModelRunnerOutput, first_line: int) -> None:
    """What a request's new tokens bring besides themselves, if it was asked for. Their lines follow one another."""
    if request.sampling_params.logprobs is not None:
        lines = range(first_line, first_line + len(result.new_token_ids))
        result.new_logprobs = [sampled_logprobs(request, output, line) for line in lines]
    if request.prompt_logprobs is not None and result.new_token_ids:
        result.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None


def sampled_logprobs(request: Request, output: ModelRunnerOutput, line: int) -> TokenLogprobs:
    """Candidates of a token that a request sampled in a step. Raises EngineError when the step has none."""
    k = request.sampling_params.logprobs
    if k is None or output.logprobs is None:
        raise EngineError(
            f"request {request.request_id!r} asks for {k} logprobs, but the output of step {output.step_id} has none."
        )
    return _cut_line(output.logprobs, line, k)


def collect_prompt_logprobs(output: ModelRunnerOutput, requests: Mapping[str, Request]) -> None:
    """Append what a step computed of prompts to `request.prompt_logprobs`.

    A preempted request computes its prompt again; lines that it has already are passed over.
    """
    for request_id, chunk in output.prompt_logprobs.items():
        request = requests[request_id]
        collected, k = request.prompt_logprobs, request.sampling_params.prompt_logprobs
        if collected is None or k is None or request.is_finished:
            continue
        first = 1 + len(collected) - chunk.start
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
