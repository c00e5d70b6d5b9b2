"""From Python values to messages of `jaxpaged.proto`. The server checks values; only their types matter here."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from google.protobuf.struct_pb2 import Struct

from jaxpaged.proto import jaxpaged_pb2 as pb

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, token ids, or a chat as messages with role and content."""
SIDES = {"left": pb.TRUNCATION_SIDE_LEFT, "right": pb.TRUNCATION_SIDE_RIGHT}
CHAT_FIELDS = (
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "reasoning_effort",
    "include_reasoning",
)
SAMPLING_FIELDS = tuple(pb.SamplingParams.DESCRIPTOR.fields_by_name)
CONVERTED = ("truncation_side", "kv_transfer_params", "images")
"""Fields of a request whose Python values are no messages yet."""
REQUEST_FIELDS = tuple(
    name
    for name in pb.GenerateRequest.DESCRIPTOR.fields_by_name
    if name not in ("text", "token_ids", "chat", "sampling_params", *CONVERTED)
)


def generate_request(prompt: Prompt, values: Mapping[str, Any]) -> pb.GenerateRequest:
    """`values` are fields of GenerateRequest, of Chat and of SamplingParams by their names.

    Raises TypeError for a name that is none of them, and for a value of a wrong type.
    """
    values = {name: value for name, value in values.items() if value is not None}
    known = {*REQUEST_FIELDS, *CONVERTED, *CHAT_FIELDS, *SAMPLING_FIELDS}
    for name in values:
        if name not in known:
            raise TypeError(f"{name!r} is no field of a request. Known are {', '.join(sorted(known))}.")
    request = pb.GenerateRequest(**{name: values[name] for name in REQUEST_FIELDS if name in values})
    if "truncation_side" in values:
        request.truncation_side = SIDES[values["truncation_side"]]
    if "kv_transfer_params" in values:
        request.kv_transfer_params.CopyFrom(struct(values["kv_transfer_params"]))
    request.images.extend(image_message(each) for each in values.get("images", ()))
    request.sampling_params.CopyFrom(sampling_params(values))
    chat = {name: values[name] for name in CHAT_FIELDS if name in values}
    if isinstance(prompt, str):
        request.text = prompt
    elif all(isinstance(each, int) for each in prompt):
        request.token_ids.ids.extend(prompt)
    else:
        request.chat.CopyFrom(chat_message(prompt, chat))
        return request
    if chat:
        raise TypeError(f"{', '.join(chat)} belongs to a chat, but the prompt is a text or token ids.")
    return request


def sampling_params(values: Mapping[str, Any]) -> pb.SamplingParams:
    own = {name: values[name] for name in SAMPLING_FIELDS if name in values}
    if isinstance(own.get("stop"), str):
        own["stop"] = [own["stop"]]
    if "structured_outputs" in own:
        own["structured_outputs"] = structured_outputs(own["structured_outputs"])
    if "extra_args" in own:
        own["extra_args"] = struct(own["extra_args"])
    return pb.SamplingParams(**own)


def structured_outputs(values: Mapping[str, Any]) -> pb.StructuredOutputs:
    """A schema or a structural tag may be a dict."""
    own = dict(values)
    for name in ("json", "structural_tag"):
        if isinstance(own.get(name), Mapping):
            own[name] = json.dumps(own[name])
    if "choice" in own:
        own["choice"] = pb.Choices(texts=own["choice"])
    return pb.StructuredOutputs(**own)


def chat_message(messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> pb.Chat:
    """Messages and tools have OpenAI's form; a tool may also be just its function."""
    own = dict(values)
    own["tools"] = [tool_message(tool) for tool in own.pop("tools", ())]
    if "chat_template_kwargs" in own:
        own["chat_template_kwargs"] = struct(own["chat_template_kwargs"])
    return pb.Chat(messages=[message_of(message) for message in messages], **own)


def message_of(message: Mapping[str, Any]) -> pb.ChatMessage:
    own = {name: value for name, value in message.items() if value is not None}
    calls = [
        pb.ToolCall(id=call.get("id", ""), name=call["function"]["name"], arguments=call["function"]["arguments"])
        for call in own.pop("tool_calls", ())
    ]
    if isinstance(own.get("content"), Sequence) and not isinstance(own["content"], str):
        own["parts"] = list(map(part_message, own.pop("content")))
    return pb.ChatMessage(tool_calls=calls, **own)


def part_message(part: Mapping[str, Any]) -> pb.ContentPart:
    """A part in OpenAI's form (`text`, `image_url`), or of type `image` with a file's bytes, its path, or a URL, or of
    type `image_embeds` with the bytes or the path of a file of embeddings."""
    if part.get("type", "text") == "text":
        return pb.ContentPart(text=part["text"])
    key = part["type"] if part["type"] in ("image_url", "image_embeds") else "image"
    value = part.get(key)
    if key == "image_embeds" and value is not None:
        image = pb.Image(embeds=value.read_bytes() if isinstance(value, Path) else value)
    else:
        image = image_message(value.get("url") if isinstance(value, Mapping) else value)
    if part.get("uuid"):
        image.uuid = part["uuid"]
    return pb.ContentPart(image=image)


def image_message(image: bytes | str | Path | pb.Image | None) -> pb.Image:
    """A file's bytes, its path, or a URL. Raises OSError for a path that cannot be read."""
    if isinstance(image, pb.Image):
        return image
    if isinstance(image, Path):
        image = image.read_bytes()
    if image is None:
        return pb.Image()
    return pb.Image(data=image) if isinstance(image, bytes) else pb.Image(url=image)


def tool_message(tool: Mapping[str, Any]) -> pb.Tool:
    """The schema goes as text, which keeps its order, and once more for servers that do not know this field yet."""
    function = tool.get("function", tool)
    message = pb.Tool(name=function["name"], description=function.get("description") or "")
    schema = function.get("parameters")
    if schema is not None:
        message.parameters.CopyFrom(struct(schema))
        message.parameters_json = json.dumps(schema, ensure_ascii=False)
    return message


def inputs_of(inputs: Sequence[str | Sequence[int]]) -> list[pb.Input]:
    return [
        pb.Input(text=each) if isinstance(each, str) else pb.Input(token_ids=pb.TokenIds(ids=each)) for each in inputs
    ]


def struct(values: Mapping[str, Any] | Struct) -> Struct:
    """Of a mapping, or what an answer had, as it came."""
    return values if isinstance(values, Struct) else json_format.ParseDict(dict(values), Struct())
