"""Messages of `jaxpaged.proto` as the requests of `serving`, which checks and prepares them for all protocols."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from jaxpaged.engine.input.tokenizer import Truncation
from jaxpaged.proto import jaxpaged_pb2 as pb
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.sampling_params.structured_outputs import StructuredOutputsParams
from jaxpaged.serving import generate as common
from jaxpaged.serving.errors import ServingError, client_names
from jaxpaged.serving.generate import GenerateRequest, TextPrompts, check_logprobs, check_stop
from jaxpaged.serving.pooling import PoolRequest, check_count
from jaxpaged.serving.prompts import (
    Conversation,
    TokenPrompt,
    checked_tools,
    template_messages,
    template_variables,
    tool_use,
)
from jaxpaged.serving.service import Service

NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})
DEFAULT_MAX_TOKENS = 16
"""Of a text; a chat goes on to the end of the context."""
SIDES = {pb.TRUNCATION_SIDE_UNSPECIFIED: None, pb.TRUNCATION_SIDE_LEFT: "left", pb.TRUNCATION_SIDE_RIGHT: "right"}
FIELDS = [field for field in pb.SamplingParams.DESCRIPTOR.fields if field.message_type is None]
PLAIN = tuple(field.name for field in FIELDS if field.has_presence and field.name != "logprobs")
LISTS = tuple(field.name for field in FIELDS if not field.has_presence)


def present(message: Message, names: Iterable[str]) -> dict[str, Any]:
    """Those of the optional fields that are set."""
    return {name: getattr(message, name) for name in names if message.HasField(name)}


def message_values(message: pb.ChatMessage) -> dict[str, Any]:
    values: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.parts:
        first = [{"type": "text", "text": message.content}] if message.content else []
        values["content"] = first + list(map(part_values, message.parts))
    values |= {name: value for name in ("name", "reasoning", "tool_call_id") if (value := getattr(message, name))}
    if message.tool_calls:
        values["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return values


def part_values(part: pb.ContentPart) -> dict[str, Any]:
    """A part without anything is an empty text."""
    if not part.HasField("image"):
        return {"type": "text", "text": part.text}
    uuid = {"uuid": part.image.uuid} if part.image.uuid else {}
    return {"type": "image", "image": picture(part.image), **uuid}


def picture(image: pb.Image) -> bytes | str | dict[str, bytes] | None:
    """The bytes, the URL, or a dict of embeddings; None: only its uuid is given."""
    source = image.WhichOneof("source")
    if source == "embeds":
        return {"image_embeds": image.embeds}
    return None if source is None else getattr(image, source)


def has_images(chat: pb.Chat) -> bool:
    return any(part.HasField("image") for message in chat.messages for part in message.parts)


def messages_of(chat: pb.Chat, takes_pictures: bool) -> list[dict[str, Any]]:
    """The messages as templates read them, where errors name parts as they are here. Raises ServingError."""
    given = list(map(message_values, chat.messages))
    if not has_images(chat):
        return template_messages(given, takes_pictures)
    for number, message in enumerate(chat.messages):
        if not takes_pictures and any(part.HasField("image") for part in message.parts):
            path = f"messages[{number}].parts"
            raise ServingError(f"{path} has a picture, but the model takes text only. Leave it out.", path)
    messages = template_messages(given, takes_pictures)
    for number, message in enumerate(chat.messages):
        found = [part for part in messages[number]["content"] if "field" in part] if message.parts else []
        places = [place for place, part in enumerate(message.parts) if part.HasField("image")]
        for place, part in zip(places, found, strict=True):
            source = message.parts[place].image.WhichOneof("source") or "uuid"
            part["field"] = f"messages[{number}].parts[{place}].image.{source}"
    return messages


def tool_values(tool: pb.Tool, number: int) -> dict[str, Any]:
    """Raises ServingError for parameters that are no JSON."""
    values: dict[str, Any] = {"name": tool.name}
    if tool.description:
        values["description"] = tool.description
    if tool.parameters_json:
        field = f"tools[{number}].parameters_json"
        try:
            values["parameters"] = msgspec.json.decode(tool.parameters_json)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ServingError(f"{field} is not JSON: {error}.", field) from None
        if not isinstance(values["parameters"], dict):
            raise ServingError(f"{field} is no object. Give a JSON schema.", field)
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


def generate_request(
    request: pb.GenerateRequest, defaults: Mapping[str, Any] = NO_DEFAULTS, takes_pictures: bool = False
) -> GenerateRequest:
    """`defaults`: the model's, and whether it `takes_pictures`. Raises ServingError and RequestError without a prompt,
    and for what cannot be."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise ServingError("text, token_ids or chat is missing. Give one of them.", "text")
    transfer = transfer_params(request)
    check_streamed(request, transfer)
    params, shape = sampling_params(request, kind, defaults, transfer), shape_of(request.sampling_params)
    prompt: TextPrompts | Conversation
    if kind == "chat":
        if request.images:
            raise ServingError("images are given beside a chat, whose pictures are in its messages.", "images")
        prompt, names = conversation(request, shape, takes_pictures), {"prompt": "messages"}
        if prompt.tool_use is not None and prompt.tool_use.is_forced:
            names["structured_outputs"] = "tools"
    else:
        names = {"prompt": kind, **image_names(request.images)}
        if request.images and not takes_pictures:
            raise ServingError("images is given, but the model takes text only. Leave it out.", "images")
        special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        text = request.text if kind == "text" else list(request.token_ids.ids)
        prompt = TextPrompts(
            [text],
            truncation_of(request),
            special,
            request.cache_salt or None,
            shape,
            images=list(map(picture, request.images)),
            image_uuids=[each.uuid or None for each in request.images],
        )
    return GenerateRequest(prompt=prompt, params=params, priority=request.priority, names=names)


def image_names(images: Sequence[pb.Image]) -> dict[str, str]:
    """What the engine calls pictures of a text -> what they are called here."""
    if len(images) == 1:
        return {"multi_modal_data.image": "images[0]"}
    return {f"multi_modal_data.image[{number}]": f"images[{number}]" for number in range(len(images))}


def check_streamed(request: pb.GenerateRequest, transfer: Mapping[str, Any]) -> None:
    """Raise ServingError for what cannot be streamed."""
    params = request.sampling_params
    if params.prompt_logprobs and not request.final_only:
        raise ServingError(
            f"prompt_logprobs is {params.prompt_logprobs}, but responses come as they are made. Set final_only.",
            "prompt_logprobs",
        )
    if transfer.get("do_remote_decode") and not request.final_only:
        raise ServingError(
            "kv_transfer_params has do_remote_decode, but responses come as they are made. Set final_only.",
            "kv_transfer_params",
        )


def transfer_params(request: pb.GenerateRequest) -> dict[str, Any]:
    return plain(request.kv_transfer_params) if request.HasField("kv_transfer_params") else {}


def sampling_params(
    request: pb.GenerateRequest, kind: str, defaults: Mapping[str, Any], transfer: Mapping[str, Any]
) -> SamplingParams:
    """The request's own over the model's `defaults`. A text ends after a few tokens where nothing is said."""
    params = request.sampling_params
    check_stop("stop", params.stop)
    values = {} if kind == "chat" else {"max_tokens": DEFAULT_MAX_TOKENS}
    values |= present(params, PLAIN)
    values |= {name: list(ids) for name in LISTS if (ids := getattr(params, name))}
    if params.HasField("logprobs"):
        check_logprobs("logprobs", params.logprobs)
        values["logprobs"] = params.logprobs
    if params.logprob_token_ids and (kind == "chat" or not params.HasField("logprobs")):
        values["logprobs"] = len(params.logprob_token_ids)
    if params.logit_bias:
        values["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias.items()}
    if params.HasField("extra_args"):
        values["extra_args"] = plain(params.extra_args)
    return common.sampling_params(values, defaults, streams=not request.final_only, kv_transfer_params=transfer)


def shape_of(params: pb.SamplingParams) -> StructuredOutputsParams | None:
    """What the output must look like. Raises RequestError for a shape that cannot be."""
    if not params.HasField("structured_outputs"):
        return None
    shape = params.structured_outputs
    values: dict[str, Any] = {}
    kind = shape.WhichOneof("shape")
    if kind is not None:
        values[kind] = list(shape.choice.texts) if kind == "choice" else getattr(shape, kind)
    if shape.disable_any_whitespace:
        values["disable_any_whitespace"] = True
    values |= present(shape, ("disable_additional_properties", "whitespace_pattern"))
    return StructuredOutputsParams.from_dict(values)


def truncation_of(request: pb.GenerateRequest) -> Truncation:
    keep = request.truncate_prompt_tokens if request.HasField("truncate_prompt_tokens") else None
    return Truncation(keep, side_of(request) == "right")


def side_of(request: pb.GenerateRequest | pb.EmbedRequest | pb.ScoreRequest) -> str | None:
    """Raises ServingError for a number that is no side."""
    if request.truncation_side not in SIDES:
        raise ServingError(f"truncation_side: Invalid enum value '{request.truncation_side}'.", "truncation_side")
    return SIDES[request.truncation_side]


def conversation(
    request: pb.GenerateRequest, shape: StructuredOutputsParams | None, takes_pictures: bool
) -> Conversation:
    """Raises ServingError for messages and tools that cannot be."""
    chat = request.chat
    messages, template = messages_of(chat, takes_pictures), template_of(chat)
    named = chat.tool_choice if chat.tool_choice not in ("", "none", "auto", "required") else None
    parallel = chat.parallel_tool_calls if chat.HasField("parallel_tool_calls") else True
    return Conversation(
        messages=messages,
        template=template,
        tool_use=tool_use(None if named else chat.tool_choice or None, named, template["tools"], parallel),
        shape=shape,
        include_reasoning=chat.include_reasoning if chat.HasField("include_reasoning") else True,
        truncation=truncation_of(request),
        add_special_tokens=request.add_special_tokens,
        cache_salt=request.cache_salt or None,
    )


def template_of(chat: pb.Chat) -> dict[str, Any]:
    """The arguments of `InputProcessor.chat_prompt` besides the messages. Raises ServingError."""
    tools = [{"function": tool_values(tool, number), "type": "function"} for number, tool in enumerate(chat.tools)]
    variables = plain(chat.chat_template_kwargs) if chat.HasField("chat_template_kwargs") else None
    return {
        "chat_template": None,
        "add_generation_prompt": chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True,
        "continue_final_message": chat.continue_final_message,
        "tools": checked_tools(tools) if tools else None,
        "template_variables": template_variables(variables, None, chat.reasoning_effort or None),
    }


def embed_inputs(request: pb.EmbedRequest) -> list[str | list[int]]:
    """Raises ServingError for an input without text and ids, and without inputs."""
    inputs: list[str | list[int]] = []
    for number, each in enumerate(request.inputs):
        kind = each.WhichOneof("input")
        if kind is None:
            raise ServingError(f"inputs[{number}] has neither text nor token_ids.", f"inputs[{number}]")
        inputs.append(each.text if kind == "text" else list(each.token_ids.ids))
    if not inputs:
        raise ServingError("inputs is an empty list. Give at least one text.", "inputs")
    kinds = set(map(type, inputs))
    if len(kinds) > 1:
        raise ServingError("inputs mixes texts, ids and lists of ids. Give a list of one kind.", "inputs")
    check_count("inputs", len(inputs))
    return inputs


def pool_request(request: pb.EmbedRequest | pb.ScoreRequest, field: str) -> PoolRequest:
    """What a request says besides its inputs, which are in `field`. Raises ServingError."""
    names = request.DESCRIPTOR.fields_by_name
    optional = ("truncate_prompt_tokens", "add_special_tokens", "dimensions", "normalize")
    values = present(request, [name for name in optional if name in names])
    if "truncation_side" in names:
        values["truncation_side"] = side_of(request)
    if "priority" in names:
        values["priority"] = request.priority
    if "cache_salt" in names:
        values["cache_salt"] = request.cache_salt or None
    return PoolRequest(field=field, **values)


def tokenized_prompt(service: Service, request: pb.TokenizeRequest) -> TokenPrompt:
    """The text or the chat in tokens. Raises ServingError and RequestError."""
    kind, given = request.WhichOneof("prompt"), request.HasField("add_special_tokens")
    if kind is None:
        raise ServingError("Give either prompt or messages, and not both.", "text")
    if kind == "text":
        special = request.add_special_tokens if given else True
        with client_names({"prompt": "text"}):
            return service.prompts.read([request.text], Truncation(), special, None, most=service.most_counted)[0]
    messages, template = messages_of(request.chat, service.takes_pictures), template_of(request.chat)
    with client_names({"prompt": "messages"}):
        return service.prompts.read_chat(
            messages, Truncation(), request.add_special_tokens, None, most=service.most_counted, **template
        )
