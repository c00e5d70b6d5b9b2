"""`POST /inference/v1/generate`, vLLM's: tokens in, tokens out, with the engine's own sampling parameters.

For clients that make tokens themselves, such as trainers and routers. There is no text in either direction; in log
probabilities tokens are called `token_id:5`. Sampling parameters mean what they say: the model's defaults are for those
who talk to it.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxpaged.engine.input.tokenizer import Truncation
from jaxpaged.entrypoints.for_trainers import for_trainers
from jaxpaged.entrypoints.http.openai.events import OpenAIStream
from jaxpaged.entrypoints.http.openai.fields import StreamOptions
from jaxpaged.entrypoints.http.openai.logprobs import (
    LEAST,
    ChatLogprobs,
    TokenLogprob,
    TopLogprob,
    prompt_logprobs,
)
from jaxpaged.entrypoints.http.openai.protocol import Chunk, Usage, usage_of
from jaxpaged.entrypoints.http.respond import Parsed, Stages, respond
from jaxpaged.errors import shown
from jaxpaged.messages import CompletionOutput, Logprob, RequestOutput
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.sampling_params.structured_outputs import StructuredOutputsParams
from jaxpaged.serving.errors import ServingError, client_names
from jaxpaged.serving.generate import GenerateRequest, TextPrompts, prepare, sampling_params
from jaxpaged.serving.output_reader import UsageCounter
from jaxpaged.serving.requests import RequestContext
from jaxpaged.serving.service import Service

NAMES = {name: f"sampling_params.{name}" for name in SamplingParams.__struct_fields__}
"""What the engine calls a parameter -> what errors call it."""


class GenerateTokensRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Token ids to continue."""

    token_ids: list[int]
    sampling_params: dict[str, Any]
    request_id: str | None = None
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int | None = 0
    kv_transfer_params: dict[str, Any] | None = None
    features: Any = None


class GeneratedTokens(msgspec.Struct, kw_only=True):
    """One sequence, or in a stream what is new of it."""

    index: int
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: list[int]
    sampling_mask: list[list[int]] | msgspec.UnsetType = msgspec.UNSET
    routed_experts: str | msgspec.UnsetType = msgspec.UNSET


class GenerateTokensResponse(msgspec.Struct, kw_only=True):
    """All sequences. `id` is the request's too, as in other APIs."""

    request_id: str
    id: str
    created: int
    model: str
    choices: list[GeneratedTokens]
    usage: Usage
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    kv_transfer_params: dict[str, Any] | None = None


class TokensChunk(Chunk, kw_only=True):
    """One event of a stream."""

    request_id: str


def parse(service: Service, body: GenerateTokensRequest, context: RequestContext) -> Parsed[GenerateTokensRequest]:
    """Raises ServingError and RequestError for what cannot be."""
    if body.features is not None:
        raise ServingError(
            "features is given, but pictures that others have processed are not taken. Give them to "
            "/v1/chat/completions.",
            "features",
        )
    if body.stream_options is not None and not body.stream:
        raise ServingError("stream_options is given, but stream is not true. Leave it out.", "stream_options")
    # Whether results come at once or in parts is what `stream` says.
    values = {name: value for name, value in body.sampling_params.items() if name != "output_kind"}
    shape = values.pop("structured_outputs", None)
    if shape is not None and not isinstance(shape, dict):
        field = NAMES["structured_outputs"]
        raise ServingError(f"{field} is {shown(shape)}; it must be an object, such as {{'regex': 'a+'}}.", field)
    with client_names(NAMES):
        params = sampling_params(values, {}, streams=bool(body.stream), kv_transfer_params=body.kv_transfer_params)
        structured = None if shape is None else StructuredOutputsParams.from_dict(shape)
    if body.stream and params.prompt_logprobs is not None:
        field = NAMES["prompt_logprobs"]
        what = f"{field} is {params.prompt_logprobs}, but a stream has none."
        raise ServingError(f"{what} Leave it out, or set stream to false.", field)
    params.detokenize = bool(params.stop)
    request = GenerateRequest(
        prompt=TextPrompts([body.token_ids], Truncation(), False, body.cache_salt, structured),
        params=params,
        priority=body.priority or 0,
        names={**NAMES, "prompt": "token_ids"},
    )
    return Parsed(body, context.model, prepare(service, request, context).generation)


def answer(
    service: Service, parsed: Parsed[GenerateTokensRequest], outputs: Sequence[RequestOutput]
) -> GenerateTokensResponse:
    """The whole of it."""
    (output,) = outputs
    usage = UsageCounter(service.options.enable_prompt_tokens_details)
    usage.add(0, output)
    return GenerateTokensResponse(
        request_id=parsed.generation.request_id,
        id=parsed.generation.request_id,
        created=int(time.time()),
        model=parsed.model,
        choices=[choice_of(each, parsed.generation.params.logprobs) for each in output.outputs],
        usage=usage_of(usage),
        prompt_logprobs=None if output.prompt_logprobs is None else prompt_logprobs(output.prompt_logprobs),
        kv_transfer_params=output.kv_transfer_params,
    )


def choice_of(completion: CompletionOutput, top: int | None) -> GeneratedTokens:
    """A sequence, with `top` candidates of each token; None: without log probabilities."""
    return GeneratedTokens(
        index=completion.index,
        logprobs=None if top is None else logprobs_of(completion, top),
        finish_reason=completion.finish_reason,
        token_ids=list(completion.token_ids),
        **for_trainers(completion),
    )


def logprobs_of(completion: CompletionOutput, top: int) -> ChatLogprobs:
    """At least the drawn token is among its candidates, as in vLLM. -1: all."""
    content = []
    for token_id, candidates in zip(completion.token_ids, completion.logprobs or ()):
        tops = [TopLogprob(name_of(i), max(each.logprob, LEAST), None) for i, each in candidates.items()]
        drawn = max(candidates[token_id].logprob, LEAST)
        content.append(TokenLogprob(name_of(token_id), drawn, None, tops if top == -1 else tops[: max(top, 1)]))
    return ChatLogprobs(content)


def name_of(token_id: int) -> str:
    return f"token_id:{token_id}"


class TokensStream(OpenAIStream):
    """Writes the chunks of a stream."""

    def __init__(self, service: Service, parsed: Parsed[GenerateTokensRequest]):
        kind = partial(TokensChunk, request_id=parsed.generation.request_id)
        super().__init__(service, parsed, kind, "generate.tokens")
        self._top = parsed.generation.params.logprobs

    def of(self, number: int, output: RequestOutput) -> bytes:
        """Events of a new result: one for every sequence that has something new."""
        self._counter.add(number, output)
        events = self.lent(output)
        for completion in output.outputs:
            if completion.token_ids or completion.finish_reason is not None:
                events += self._chunks.chunk(choice_of(completion, self._top))
        return events


TOKENS = Stages("generate-tokens", GenerateTokensRequest, parse, answer, TokensStream)


class Generate:
    """The endpoint."""

    def __init__(self, service: Service):
        self._service = service

    async def respond(self, request: Request) -> Response:
        """Continue a list of token ids, at once or as a stream."""
        return await respond(self._service, TOKENS, request)
