"""The body of `/v1/completions` as what the engine is to do; what this API cannot do is refused by its field."""

from jaxpaged.entrypoints.http.openai.fields import (
    beam_params,
    check_fields,
    check_given,
    sampling_params,
    shape_name,
    shape_of,
)
from jaxpaged.entrypoints.http.openai.protocol import DEFAULT_MAX_TOKENS, CompletionRequest
from jaxpaged.entrypoints.http.respond import Parsed
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.serving.errors import ServingError
from jaxpaged.serving.generate_request import GenerateRequest, TextPrompts, check_logprobs, prepare
from jaxpaged.serving.requests import RequestContext
from jaxpaged.serving.service import Service

MAX_PROMPTS = 1024


def parse(service: Service, body: CompletionRequest, context: RequestContext) -> Parsed[CompletionRequest]:
    """Raises ServingError and RequestError for what cannot be."""
    check(body)
    params, given = params_of(service, body), prompts_of(body.prompt)
    if body.kv_transfer_params and len(given) > 1:
        raise ServingError(
            f"kv_transfer_params is given with {len(given)} prompts; it is about one.", "kv_transfer_params"
        )
    beams = beam_params(body, params.max_tokens)
    texts = TextPrompts(given, body.truncation, body.add_special_tokens is not False, body.cache_salt, shape_of(body))
    request = GenerateRequest(
        prompt=texts,
        params=params,
        beams=beams,
        priority=body.priority or 0,
        names=shape_name(body),
        repeats_prompt=bool(body.echo or body.return_token_ids),
    )
    return Parsed(body, context.model, prepare(service, request, context).generation)


def params_of(service: Service, body: CompletionRequest) -> SamplingParams:
    """With an echo, log probabilities are those of the prompt too; the engine computes at least one token."""
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if body.echo and max_tokens == 0:
        max_tokens = 1
    defaults = service.engine.input_processor.defaults.sampling
    params = sampling_params(body, defaults, max_tokens=max_tokens, logprobs=body.logprobs)
    if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
        params.prompt_logprobs, params.skip_reading_prefix_cache = body.logprobs, True
    return params


def check(body: CompletionRequest) -> None:
    """Raise ServingError for what this API cannot do."""
    check_fields(body)
    check_given(body, "prompt")
    if body.use_beam_search and body.echo and body.logprobs is not None:
        raise ServingError(
            "echo and logprobs are given, but beam search has no log probabilities of the prompt. Leave one out.",
            "echo",
        )
    if body.suffix:
        raise ServingError("suffix is given, but the model does not fill in the middle. Leave it out.", "suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ServingError(
            f"best_of is {body.best_of} and n is {body.n or 1}, but all sequences are returned. Leave it out.",
            "best_of",
        )
    if body.stream and body.echo and body.logprobs is not None and (body.n or 1) > 1:
        raise ServingError(
            f"n is {body.n}, but a stream with echo and logprobs has one sequence. Set stream to false.", "n"
        )
    check_logprobs("logprobs", body.logprobs)


def prompts_of(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The prompts of a request, each as text or token ids. Raises ServingError for a mixture and for too many."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ServingError("prompt is an empty list. Give at least one prompt.", "prompt")
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [prompt]
    if len(kinds) > 1:
        raise ServingError("prompt mixes texts, ids and lists of ids. Give a list of one kind.", "prompt")
    if len(prompt) > MAX_PROMPTS:
        raise ServingError(f"prompt has {len(prompt)} prompts; one request may have {MAX_PROMPTS}.", "prompt")
    return prompt
