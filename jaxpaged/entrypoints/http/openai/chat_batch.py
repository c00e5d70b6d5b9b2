"""`POST /v1/chat/completions/batch`: several conversations in one request, with one choice for each, as vLLM has it.

Each conversation is a chat of its own, with what the body says besides; the first failure ends them all.
"""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxpaged.entrypoints.http.body import read_struct
from jaxpaged.entrypoints.http.openai.chat import CHATS
from jaxpaged.entrypoints.http.openai.completions import MAX_PROMPTS
from jaxpaged.entrypoints.http.openai.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionTokensDetails,
    PromptTokensDetails,
    Usage,
)
from jaxpaged.entrypoints.http.respond import Parsed, Stages, context_of, parse, unless_left
from jaxpaged.entrypoints.http.transport.sending import json_in_pieces
from jaxpaged.errors import RequestError
from jaxpaged.serving.admission import Load
from jaxpaged.serving.errors import ServingError, as_serving_error, client_names
from jaxpaged.serving.generate import EngineRequest, Output, last_results
from jaxpaged.serving.service import Service

REFUSALS = ("stream", "tools", "use_beam_search", "echo", "kv_transfer_params")
"""Fields that are about one response, or about how one goes on."""
PROMPT_REPORTS = ("prompt_logprobs", "return_prompt_text", "return_token_ids")
"""Fields that ask for something of the prompt, for which the response has one place."""


class ChatBatchRequest(ChatCompletionRequest, kw_only=True):
    """Conversations to go on with."""

    messages: list[list[dict[str, Any]]]


class ChatBatches:
    """The endpoint."""

    def __init__(self, service: Service):
        self._service = service

    async def respond(self, request: Request) -> Response:
        """Answer several conversations, with one choice for each."""
        return await respond_to_batch(self._service, CHATS, request)


async def respond_to_batch(service: Service, stages: Stages, request: Request) -> Response:
    """`stages`: those of chats."""
    await service.pace.turn()
    body = await read_struct(request, ChatBatchRequest, service.max_body_bytes)
    check(body)
    context = await context_of(service, stages.prefix, request, body)
    service.traffic.check_num_sequences(len(body.messages), 1)
    chats = []
    for number, chat in enumerate(chats_of(body)):
        with naming(number):
            chats.append(await parse(service, stages, chat, context))
    return await unless_left(service, request, context.request_id, answered(service, stages, chats))


def check(body: ChatBatchRequest) -> None:
    """Raise ServingError for what this API cannot do."""
    if not 1 <= len(body.messages) <= MAX_PROMPTS:
        raise ServingError(
            f"messages has {len(body.messages)} conversations; it must have 1 to {MAX_PROMPTS}.", "messages"
        )
    if body.n not in (None, 1):
        raise ServingError(f"n is {body.n}, but a batch has one choice for each conversation. Leave it out.", "n")
    for name in (*REFUSALS, *PROMPT_REPORTS):
        if getattr(body, name):
            raise ServingError(
                f"{name} is given, but is not served for a batch. Leave it out, or ask /v1/chat/completions.", name
            )


def chats_of(body: ChatBatchRequest) -> list[ChatCompletionRequest]:
    """Each conversation as a request of its own."""
    fields: Mapping[str, Any] = {name: getattr(body, name) for name in body.__struct_fields__ if name != "messages"}
    return [ChatCompletionRequest(messages=messages, **fields) for messages in body.messages]


@contextlib.contextmanager
def naming(number: int) -> Iterator[None]:
    """Make errors about the messages name conversation `number`."""
    try:
        yield
    except (ServingError, RequestError) as error:
        name, text = error.parameter, str(error)
        if name is None or not name.startswith("messages"):
            raise
        path = f"messages[{number}]{name.removeprefix('messages')}"
        text = path + text.removeprefix(name) if text.startswith(name) else f"{path}: {text}"
        raise ServingError(text, path, kind=as_serving_error(error).kind) from error


async def answered(service: Service, stages: Stages, chats: Sequence[Parsed]) -> Response:
    """The stages `generate` and `write` of all chats at once."""

    async def collected(number: int, generation: EngineRequest) -> list[Output]:
        with naming(number), client_names(generation.names):
            return await last_results(service.engine, generation)

    generations = [chat.generation for chat in chats]
    try:
        with service.traffic.admitted(load_of(generations, service.model.max_model_len)):
            async with asyncio.TaskGroup() as group:
                asking = [group.create_task(collected(*each)) for each in enumerate(generations)]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    outputs = [each.result() for each in asking]
    num_bytes = sum(each.size_of(output) for each, output in zip(generations, outputs, strict=True))
    return await json_in_pieces(
        num_bytes, lambda: joined([stages.write(service, *each) for each in zip(chats, outputs, strict=True)])
    )


def load_of(generations: Sequence[EngineRequest], max_model_len: int) -> Load:
    """What all of them put on the engine: there is room for the whole batch, or for none of it."""
    loads = [each.load(max_model_len) for each in generations]
    return Load(
        loads[0].request_id,
        [engine_id for each in loads for engine_id in each.engine_ids],
        sum(each.num_sequences for each in loads),
        sum(each.num_prompt_tokens for each in loads),
        sum(each.answer_bytes for each in loads),
    )


def joined(responses: Sequence[ChatCompletionResponse]) -> ChatCompletionResponse:
    """One response with the choice of each."""
    choices = [msgspec.structs.replace(response.choices[0], index=number) for number, response in enumerate(responses)]
    return msgspec.structs.replace(
        responses[0], choices=choices, usage=total([response.usage for response in responses])
    )


def total(usages: Sequence[Usage]) -> Usage:
    """The tokens of all of them; details where each has some."""
    prompt, whole, completion = (
        sum(getattr(each, name) for each in usages) for name in ("prompt_tokens", "total_tokens", "completion_tokens")
    )
    cached, thinking = usages[0].prompt_tokens_details, usages[0].completion_tokens_details
    if isinstance(cached, PromptTokensDetails):
        cached = PromptTokensDetails(sum(each.prompt_tokens_details.cached_tokens for each in usages))
    if isinstance(thinking, CompletionTokensDetails):
        thinking = CompletionTokensDetails(sum(each.completion_tokens_details.reasoning_tokens for each in usages))
    return Usage(prompt, whole, completion, cached, thinking)
