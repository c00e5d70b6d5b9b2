"""Messages of `jaxpaged.proto` as the requests of the HTTP server, which checks and prepares them.

This module knows names and types of fields; what a value may be is checked where it is checked for HTTP.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from jaxpaged.entrypoints.http.openai.protocol import ChatCompletionRequest, CompletionRequest, TokenizeRequest
from jaxpaged.entrypoints.http.pooling.protocol import EmbeddingRequest, ScoreRequest
from jaxpaged.proto import jaxpaged_pb2 as pb
from jaxpaged.serving.errors import ServingError

NAMES = {
    "top_logprobs": "logprobs",
    "vllm_xargs": "extra_args",
    "input": "inputs",
    "prompt": "text",
}
"""What the HTTP server calls a field -> what it is called here."""
SIDES = {pb.TRUNCATION_SIDE_UNSPECIFIED: None, pb.TRUNCATION_SIDE_LEFT: "left", pb.TRUNCATION_SIDE_RIGHT: "right"}
FIELDS = [field for field in pb.SamplingParams.DESCRIPTOR.fields if field.message_type is None]
PLAIN = tuple(field.name for field in FIELDS if field.has_presence and field.name != "logprobs")
LISTS = tuple(field.name for field in FIELDS if not field.has_presence)


def generation_request(request: pb.GenerateRequest) -> CompletionRequest | ChatCompletionRequest:
    """Raises ServingError without a prompt, and for what cannot be streamed."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise ServingError("text, token_ids or chat is missing. Give one of them.", "text")
    values = common_values(request)
    values["stream"] = not request.final_only
    params = request.sampling_params
    if params.prompt_logprobs and not request.final_only:
        raise ServingError(
            f"prompt_logprobs is {params.prompt_logprobs}, but responses come as they are made. Set final_only.",
            "prompt_logprobs",
        )
    values |= sampling_values(params)
    if request.HasField("kv_transfer_params"):
        values["kv_transfer_params"] = plain(request.kv_transfer_params)
        if values["kv_transfer_params"].get("do_remote_decode") and not request.final_only:
            raise ServingError(
                "kv_transfer_params has do_remote_decode, but responses come as they are made. Set final_only.",
                "kv_transfer_params",
            )
    if kind != "chat":
        if params.HasField("logprobs"):
            values["logprobs"] = params.logprobs
        elif params.logprob_token_ids:
            values["logprobs"] = len(params.logprob_token_ids)
        prompt = request.text if kind == "text" else list(request.token_ids.ids)
        return converted({**values, "prompt": prompt}, CompletionRequest)
    if params.HasField("logprobs") or params.logprob_token_ids:
        values["logprobs"] = True
    if params.HasField("logprobs"):
        values["top_logprobs"] = params.logprobs
    return converted({**values, **chat_values(request.chat)}, ChatCompletionRequest)


def embedding_request(request: pb.EmbedRequest) -> EmbeddingRequest:
    """Raises ServingError for an input without text and ids."""
    inputs: list[str | list[int]] = []
    for number, each in enumerate(request.inputs):
        kind = each.WhichOneof("input")
        if kind is None:
            raise ServingError(f"inputs[{number}] has neither text nor token_ids.", f"inputs[{number}]")
        inputs.append(each.text if kind == "text" else list(each.token_ids.ids))
    values = {**common_values(request), "input": inputs}
    return converted(values | present(request, ("dimensions", "normalize")), EmbeddingRequest)


def score_request(request: pb.ScoreRequest) -> ScoreRequest:
    texts = {"queries": list(request.queries), "documents": list(request.documents)}
    return converted({**common_values(request), **texts}, ScoreRequest)


def tokenize_request(request: pb.TokenizeRequest) -> TokenizeRequest:
    values = common_values(request) | {"return_token_strs": request.return_token_strs}
    kind = request.WhichOneof("prompt")
    if kind == "text":
        values["prompt"] = request.text
    elif kind == "chat":
        values |= chat_values(request.chat, TokenizeRequest.__struct_fields__)
    return converted(values, TokenizeRequest)


def common_values(request: Message) -> dict[str, Any]:
    """Fields that several requests have, those of them that this one has and that are set."""
    names = request.DESCRIPTOR.fields_by_name
    values = {name: getattr(request, name) for name in ("model", "request_id", "cache_salt") if name in names}
    values = {name: value for name, value in values.items() if value}
    if "priority" in names:
        values["priority"] = request.priority
    if "truncation_side" in names:
        values["truncation_side"] = SIDES.get(request.truncation_side, str(request.truncation_side))
    optional = [name for name in ("truncate_prompt_tokens", "add_special_tokens") if name in names]
    return values | present(request, optional)


def present(message: Message, names: Iterable[str]) -> dict[str, Any]:
    """Those of the optional fields that are set."""
    return {name: getattr(message, name) for name in names if message.HasField(name)}


def sampling_values(params: pb.SamplingParams) -> dict[str, Any]:
    """All but `logprobs`, which texts and chats give in different ways."""
    values = present(params, PLAIN)
    values |= {name: list(ids) for name in LISTS if (ids := getattr(params, name))}
    if params.logit_bias:
        values["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias.items()}
    if params.HasField("extra_args"):
        values["vllm_xargs"] = plain(params.extra_args)
    if params.HasField("structured_outputs"):
        values["structured_outputs"] = shape_values(params.structured_outputs)
    return values


def shape_values(shape: pb.StructuredOutputs) -> dict[str, Any]:
    values: dict[str, Any] = {}
    kind = shape.WhichOneof("shape")
    if kind is not None:
        values[kind] = list(shape.choice.texts) if kind == "choice" else getattr(shape, kind)
    if shape.disable_any_whitespace:
        values["disable_any_whitespace"] = True
    return values | present(shape, ("disable_additional_properties", "whitespace_pattern"))


def chat_values(chat: pb.Chat, wanted: Iterable[str] | None = None) -> dict[str, Any]:
    """The fields of a chat, or those of them that are `wanted`."""
    values: dict[str, Any] = {"messages": [message_values(message) for message in chat.messages]}
    if chat.tools:
        values["tools"] = [{"function": tool_values(tool, number)} for number, tool in enumerate(chat.tools)]
    if chat.tool_choice:
        named = chat.tool_choice not in ("none", "auto", "required")
        values["tool_choice"] = {"function": {"name": chat.tool_choice}} if named else chat.tool_choice
    values |= present(chat, ("parallel_tool_calls", "add_generation_prompt", "include_reasoning"))
    values["continue_final_message"] = chat.continue_final_message
    if chat.HasField("chat_template_kwargs"):
        values["chat_template_kwargs"] = plain(chat.chat_template_kwargs)
    if chat.reasoning_effort:
        values["reasoning_effort"] = chat.reasoning_effort
    return values if wanted is None else {name: values[name] for name in values if name in wanted}


def message_values(message: pb.ChatMessage) -> dict[str, Any]:
    values: dict[str, Any] = {"role": message.role, "content": message.content}
    values |= {name: value for name in ("name", "reasoning", "tool_call_id") if (value := getattr(message, name))}
    if message.tool_calls:
        values["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return values


def tool_values(tool: pb.Tool, number: int) -> dict[str, Any]:
    """Raises ServingError for parameters that are no JSON."""
    values: dict[str, Any] = {"name": tool.name}
    if tool.description:
        values["description"] = tool.description
    if tool.parameters_json:
        try:
            values["parameters"] = msgspec.json.decode(tool.parameters_json)
        except (msgspec.DecodeError, RecursionError) as error:
            field = f"tools[{number}].parameters_json"
            raise ServingError(f"{field} is not JSON: {error}.", field) from None
    elif tool.HasField("parameters"):
        values["parameters"] = plain(tool.parameters)
    return values


def plain(struct: Message) -> Any:
    """A google.protobuf.Struct as Python has it; its numbers are floats, and whole ones become integers again."""
    return whole_numbers(MessageToDict(struct))


def whole_numbers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {name: whole_numbers(each) for name, each in value.items()}
    return [whole_numbers(each) for each in value] if isinstance(value, list) else value


def converted[T](values: Mapping[str, Any], kind: type[T]) -> T:
    """Raises ServingError naming the field at fault."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$.")
        field = place.rstrip("`")
        raise ServingError(f"{field or 'the request'}: {message}.", field or None) from None
