"""The body of `/v1/responses` as what the engine is to do, and as the response that has not begun yet.

What this API cannot do is refused by its field. This module does not know how a response is made or handed out.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxpaged.entrypoints.http.openai.fields import (
    ENCODER_REFUSALS,
    check_given,
    check_refusals,
    check_service_tier,
    given,
)
from jaxpaged.entrypoints.http.respond import Parsed
from jaxpaged.entrypoints.http.responses.conversation import (
    Item,
    Messages,
    Turns,
    input_items,
    newest_that_fit,
    tool_use,
)
from jaxpaged.entrypoints.http.responses.protocol import LOGPROBS, ReasoningOptions, Response, ResponsesRequest
from jaxpaged.entrypoints.http.responses.store import ResponseStore
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.sampling_params.structured_outputs import StructuredOutputsParams
from jaxpaged.serving import generate
from jaxpaged.serving.errors import ServingError, client_names
from jaxpaged.serving.generate import GenerateRequest, PreparedRequest, check_stop, prepare
from jaxpaged.serving.prompts import Conversation
from jaxpaged.serving.requests import RequestContext, check_depth
from jaxpaged.serving.service import Service

ENGINE_NAMES = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "extra_args": "vllm_xargs",
}
"""What other parts of the server call a field -> what it is called here."""
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
MAX_TOP_LOGPROBS = 20
INCLUDABLE = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
"""Values of `include`. Thinking is never encrypted: its text is in the items, so clients can send it back without a
store. The others are about tools and media that are not served, so there is nothing that they could include."""

REFUSALS = {
    "conversation": "Conversations are not kept; previous_response_id goes on from a response",
    "prompt": "This server has no prompt templates",
    "context_management": "Contexts are not compacted",
    "moderation": "Nothing is moderated",
    **ENCODER_REFUSALS,
    "enable_response_messages": "Responses have items, and no messages",
    "previous_input_messages": "Give earlier messages as input",
    "max_tokens": "It is called max_output_tokens here",
    "max_completion_tokens": "It is called max_output_tokens here",
    "response_format": "It is called text.format here",
    "messages": "They are called input here",
}
"""Field -> why no value of it is served. The last ones are for clients that mistake this API for another."""

FORMATS = ("text", "json_object", "json_schema")


@dataclass(frozen=True, kw_only=True)
class ParsedResponse(Parsed[ResponsesRequest]):
    """A response to make. `items` are the conversation up to it, `owner` who may ask for it."""

    response: Response
    items: list[Item]
    owner: bytes


def parse(
    service: Service,
    store: ResponseStore,
    body: ResponsesRequest,
    context: RequestContext,
    owner: bytes,
    earlier: list[Item],
) -> ParsedResponse:
    """`context` has the id of the response. `earlier`: what `earlier_items` gives. Takes long for long conversations.

    Raises ServingError and RequestError for what cannot be.
    """
    items = input_items(body.input)
    shape_field = "text.format" if body.structured_outputs is None else "structured_outputs"
    names = {**ENGINE_NAMES, "structured_outputs": shape_field}
    with client_names(names):
        turns = Turns(body.instructions, service.takes_pictures)
        turns.add_all(earlier, "previous_response_id")
        turns.add_all(items, "input")
        prepared = prepared_conversation(service, body, context, names, turns.messages)
    generation = prepared.generation
    response = response_of(body, context, generation.params, is_kept(store, body))
    return ParsedResponse(
        body, context.model, generation, prepared.reading, response=response, items=[*earlier, *items], owner=owner
    )


def earlier_items(store: ResponseStore, body: ResponsesRequest, owner: bytes) -> list[Item]:
    """The conversation of the previous response, its own items included."""
    previous_id = body.previous_response_id
    if previous_id is None:
        return []
    with client_names({"response_id": "previous_response_id"}):
        previous = store.get(previous_id, owner)
    status = previous.response.status
    if status in ("queued", "in_progress", "failed"):
        raise ServingError(
            f"The response {previous_id!r} is {status}, so nothing can follow it. Wait for it, or go on from another.",
            "previous_response_id",
        )
    output = [msgspec.to_builtins(item) for item in previous.response.output]
    # Arguments that were cut off are no JSON, and templates refuse them.
    whole = [item for item in output if item["type"] != "function_call" or item["status"] == "completed"]
    return [*previous.items, *whole]


def is_kept(store: ResponseStore, body: ResponsesRequest) -> bool:
    """Raises ServingError for a wish to keep what cannot be kept."""
    if not store.is_enabled and (body.store or body.background):
        field = "store" if body.store else "background"
        raise ServingError(f"{field} is true, but this server keeps no responses. Leave it out.", field)
    return store.is_enabled and body.store is not False


def prepared_conversation(
    service: Service, body: ResponsesRequest, context: RequestContext, names: Mapping[str, str], messages: Messages
) -> PreparedRequest:
    """The prompt and how its response is read; where the client wishes it, of the newest messages that fit."""
    use = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls is not False)
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning is not None and body.reasoning.effort is not None:
        variables["reasoning_effort"] = body.reasoning.effort
    of_pictures = service.check_picture_options({"mm_processor_kwargs": body.mm_processor_kwargs})
    template = {"template_variables": variables, "tools": None if use is None else list(use.tools), **of_pictures}
    shape, params = shape_of(body), params_of(service, body)

    def with_messages(kept: Messages) -> PreparedRequest:
        conversation = Conversation(kept, template, use, shape, cache_salt=body.cache_salt)
        request = GenerateRequest(prompt=conversation, params=params, priority=body.priority or 0, names=names)
        return prepare(service, request, context)

    if body.truncation != "auto":
        return with_messages(messages)
    length = service.model.max_model_len
    answer = min(params.max_tokens or 1, length // 2)
    return newest_that_fit(messages, with_messages, length - answer)


def params_of(service: Service, body: ResponsesRequest) -> SamplingParams:
    """Without a limit of its own a request gets the model's, or the rest of the context."""
    given_params = given(body)
    given_params["logprobs"] = (body.top_logprobs or 0) if body.wants_logprobs else None
    if body.max_output_tokens is not None:
        given_params["max_tokens"] = body.max_output_tokens
    if body.vllm_xargs is not None:
        given_params["extra_args"] = body.vllm_xargs
    return generate.sampling_params(
        given_params,
        service.engine.input_processor.defaults.sampling,
        streams=bool(body.stream or body.background),
        kv_transfer_params=body.kv_transfer_params,
    )


def response_of(body: ResponsesRequest, context: RequestContext, params: SamplingParams, keeps: bool) -> Response:
    """The response before it has begun, with the options that hold for it."""
    text, reasoning = body.text, body.reasoning
    return Response(
        id=context.request_id,
        created_at=int(time.time()),
        status="queued" if body.background else "in_progress",
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        model=context.model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning={
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary or reasoning.generate_summary,
        },
        safety_identifier=body.safety_identifier,
        store=keeps,
        temperature=params.temperature,
        text={"format": (text.format if text is not None else None) or {"type": "text"}, "verbosity": "medium"},
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=params.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
        metadata=body.metadata or {},
    )


# ---- what is refused


def check(body: ResponsesRequest) -> None:
    """Raise ServingError for fields that cannot be honoured, or contradict each other."""
    check_refusals(body, REFUSALS)
    check_given(body, "input")
    if body.n not in (None, 1):
        raise ServingError("n is given. A response is one answer, so leave it out.", "n")
    check_metadata(body.metadata)
    check_logprobs(body)
    check_way_to_answer(body)
    check_style(body)
    for name in ("input", "tools", "tool_choice", "structured_outputs", "chat_template_kwargs"):
        check_depth(name, getattr(body, name))
    if body.text is not None:
        check_depth("text", body.text.format)
    check_stop("stop", body.stop)
    if body.max_tool_calls is not None and body.max_tool_calls < 1:
        raise ServingError(f"max_tool_calls is {body.max_tool_calls}; it must be at least 1.", "max_tool_calls")


def check_way_to_answer(body: ResponsesRequest) -> None:
    """Streams, the background, and what is kept."""
    if body.background and body.store is False:
        raise ServingError(
            "background is true, but store is false, so nobody could ask for the response. Leave out store.",
            "background",
        )
    if body.stream_options is not None and not body.stream:
        raise ServingError("stream_options is given, but stream is not true. Leave it out.", "stream_options")
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        raise ServingError(
            "stream_options.include_obfuscation is true, but events are not padded. Leave it out.", "stream_options"
        )
    check_service_tier(body.service_tier)


def check_style(body: ResponsesRequest) -> None:
    """What clients wish of the text and of the thinking, where this server can only give what the model gives."""
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        raise ServingError(
            f"text.verbosity is {body.text.verbosity!r}, but the model writes as it does. Leave it out.",
            "text.verbosity",
        )
    reasoning = body.reasoning or ReasoningOptions()
    for name in ("summary", "generate_summary"):
        value = getattr(reasoning, name)
        if value not in (None, "auto"):
            raise ServingError(
                f"reasoning.{name} is {value!r}, but thinking is given as it is, in no other form. Use 'auto', or "
                "leave it out.",
                f"reasoning.{name}",
            )


def check_metadata(metadata: dict[str, str] | None) -> None:
    if metadata is None:
        return
    if len(metadata) > MAX_METADATA:
        raise ServingError(f"metadata has {len(metadata)} entries; at most {MAX_METADATA} are kept.", "metadata")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            raise ServingError(
                f"metadata has an entry of {len(key)} and {len(value)} characters; its key may have "
                f"{MAX_METADATA_KEY} and its value {MAX_METADATA_VALUE}. Shorten it.",
                "metadata",
            )


def check_logprobs(body: ResponsesRequest) -> None:
    for value in body.include or ():
        if value not in INCLUDABLE:
            raise ServingError(f"include has {value!r}; it may have {', '.join(INCLUDABLE)}.", "include")
    top = body.top_logprobs
    if top is None:
        return
    if not 0 <= top <= MAX_TOP_LOGPROBS:
        raise ServingError(f"top_logprobs is {top}; it must be from 0 to {MAX_TOP_LOGPROBS}.", "top_logprobs")
    if top and not body.wants_logprobs:
        raise ServingError(f"top_logprobs is {top}, but include does not have {LOGPROBS!r}. Add it.", "top_logprobs")


# ---- the shape of the text


def shape_of(body: ResponsesRequest) -> StructuredOutputsParams | None:
    """None: free text. Raises ServingError or RequestError for shapes that cannot be."""
    described = None if body.text is None else body.text.format
    shape = None if described is None else shape_of_format(described)
    if body.structured_outputs is None:
        return shape
    if shape is not None:
        raise ServingError(
            "structured_outputs and text.format both say what the answer must look like. Leave one out.",
            "structured_outputs",
        )
    return StructuredOutputsParams.from_dict(body.structured_outputs)


def shape_of_format(described: dict[str, Any]) -> StructuredOutputsParams | None:
    kind = described.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind != "json_schema":
        raise ServingError(f"text.format.type is {kind!r}; it must be one of {', '.join(FORMATS)}.", "text.format.type")
    if not isinstance(described.get("name"), str):
        raise ServingError("text.format.name must be a text. Give the schema a name.", "text.format.name")
    if not isinstance(described.get("schema"), dict):
        raise ServingError("text.format.schema must be a JSON schema, which is an object.", "text.format.schema")
    return StructuredOutputsParams(json=described["schema"])
