"""The body of `/v1/messages` as what the engine is to do; what this API cannot do is refused by its field.

Types are checked when a body is decoded; ranges by `SamplingParams`.
"""

import re
from collections.abc import Mapping
from typing import Any

from jaxpaged.entrypoints.http.anthropic.conversation import chat_messages, continues
from jaxpaged.entrypoints.http.anthropic.protocol import (
    ContextManagement,
    CountTokensRequest,
    MessagesPrompt,
    MessagesRequest,
    MessagesTool,
    MessagesToolChoice,
    ThinkingOption,
)
from jaxpaged.entrypoints.http.openai.fields import check_refusals
from jaxpaged.entrypoints.http.respond import Parsed
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.sampling_params.structured_outputs import StructuredOutputsParams
from jaxpaged.serving import generate
from jaxpaged.serving.errors import ServingError, client_names
from jaxpaged.serving.generate import GenerateRequest, check_stop, prepare
from jaxpaged.serving.prompts import Conversation
from jaxpaged.serving.requests import RequestContext, check_depth
from jaxpaged.serving.service import Service
from jaxpaged.serving.tool_use import ToolUse

REFUSALS = {
    "mcp_servers": "This server calls no tools itself",
    "container": "This server runs no code",
    "thread": "This server keeps no conversations: send all messages every time",
    "speed": "There is one speed",
    "inference_geo": "The model runs where this server is",
}
NOTHING = (None, False, "", [], {}, "standard")
"""Values of those that ask for nothing."""
TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
LEAST_BUDGET = 1024
CHOICES = {"auto": "auto", "any": "required", "tool": "named"}
"""Type of a tool choice -> what all APIs call it."""
EFFORTS = ("low", "medium", "high", "xhigh", "max")


def parse(service: Service, body: MessagesRequest, context: RequestContext) -> Parsed[MessagesRequest]:
    """Raises ServingError and RequestError for what cannot be."""
    check_prompt_fields(body)
    check_request_fields(body)
    check_calls_are_found(body, service.formats.tool_parser)
    names, processor = engine_names(body), service.engine.input_processor
    with client_names(names):
        params = sampling_params(body, processor.defaults.sampling, processor.thinking_token_ids is not None)
        conversation = conversation_of(service, body, body.cache_salt)
    request = GenerateRequest(prompt=conversation, params=params, priority=body.priority or 0, names=names)
    prepared = prepare(service, request, context)
    return Parsed(body, context.model, prepared.generation, prepared.reading)


def count_tokens(service: Service, body: CountTokensRequest) -> int:
    """How many tokens the prompt has. Raises ServingError and RequestError."""
    check_prompt_fields(body)
    conversation = conversation_of(service, body)
    with client_names(engine_names(body)):
        prompt = service.prompts.read_chat(
            conversation.messages,
            conversation.truncation,
            conversation.add_special_tokens,
            None,
            most=service.most_counted,
            **conversation.template,
        )
    return len(prompt.token_ids)


def engine_names(body: MessagesPrompt) -> dict[str, str]:
    """The engine's name of a field -> what it is called here. Grammars come from a format or from forced tools."""
    grammar = "tools" if choice_of(body) in ("required", "named") else "output_config.format"
    return {"prompt": "messages", "stop": "stop_sequences", "structured_outputs": grammar}


def check_prompt_fields(body: MessagesPrompt) -> None:
    """Raise ServingError for fields that cannot be honoured, or contradict each other."""
    check_refusals(body, REFUSALS, NOTHING)
    check_edits(body.context_management)
    check_tools(body.tools or [])
    check_tool_choice(body.tool_choice, body.tools)
    check_thinking(body.thinking, body.tool_choice)
    effort = body.output_config.effort if body.output_config else None
    if effort is not None and effort not in EFFORTS:
        path = "output_config.effort"
        raise ServingError(f"{path} is {effort!r}; it must be one of {', '.join(EFFORTS)}.", path)


def check_request_fields(body: MessagesRequest) -> None:
    """The same for what counts only when there is a response."""
    check_stop("stop_sequences", body.stop_sequences)
    budget = body.thinking.budget_tokens if body.thinking else None
    if budget is not None and budget >= body.max_tokens:
        path = "thinking.budget_tokens"
        raise ServingError(f"{path} is {budget}; it must be less than max_tokens = {body.max_tokens}.", path)


def check_edits(management: ContextManagement | None) -> None:
    for index, edit in enumerate(management.edits or () if management else ()):
        if not edit.type.startswith("clear_thinking"):
            path = f"context_management.edits[{index}]"
            raise ServingError(
                f"{path}.type is {edit.type!r}; the messages are taken as they are. Leave it out, and send those "
                "that are to be read.",
                path,
            )


def check_tools(tools: list[MessagesTool]) -> None:
    names = set()
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        if tool.type not in (None, "custom"):
            raise ServingError(
                f"{path}.type is {tool.type!r}; this server has no tools of its own. Give 'custom' ones.",
                f"{path}.type",
            )
        if not TOOL_NAME.fullmatch(tool.name):
            raise ServingError(
                f"{path}.name is {tool.name!r}; it must have 1 to 128 letters, digits, _ or -.", f"{path}.name"
            )
        if tool.name in names:
            raise ServingError(f"{path}.name is {tool.name!r}, as that of another tool is.", f"{path}.name")
        names.add(tool.name)
        check_input_schema(f"{path}.input_schema", tool.input_schema)


def check_input_schema(path: str, schema: dict[str, Any] | None) -> None:
    if schema is None:
        raise ServingError(f"{path} is missing. Add it.", path)
    if schema.get("type") != "object":
        raise ServingError(f"{path}.type is {schema.get('type')!r}; it must be 'object'.", f"{path}.type")
    check_depth(path, schema)


def check_tool_choice(choice: MessagesToolChoice | None, tools: list[MessagesTool] | None) -> None:
    """Raise ServingError for a choice that cannot be; with an empty list those pass that demand no call."""
    if choice is None or (tools == [] and choice.type in ("auto", "none")):
        return
    if not tools:
        raise ServingError("tool_choice is given without tools. Give tools, or leave it out.", "tool_choice")
    names = [tool.name for tool in tools]
    if choice.type == "tool" and choice.name not in names:
        raise ServingError(
            f"tool_choice.name is {choice.name!r}, but tools has {', '.join(names)}.", "tool_choice.name"
        )


def check_thinking(thinking: ThinkingOption | None, choice: MessagesToolChoice | None) -> None:
    if thinking is None or thinking.type != "enabled":
        return
    path = "thinking.budget_tokens"
    if thinking.budget_tokens is None:
        raise ServingError(f"{path} is missing. Add it.", path)
    if thinking.budget_tokens < LEAST_BUDGET:
        raise ServingError(f"{path} is {thinking.budget_tokens}; it must be at least {LEAST_BUDGET}.", path)
    if choice is not None and choice.type in ("any", "tool"):
        raise ServingError(
            f"thinking is enabled, but tool_choice.type is {choice.type!r}, which leaves no room for it. Use 'auto'.",
            "thinking",
        )


def check_calls_are_found(body: MessagesPrompt, tool_parser: str | None) -> None:
    """Raise ServingError when the model may call tools as it likes, but nobody would find the calls."""
    if choice_of(body) == "auto" and tool_parser is None:
        raise ServingError(
            "tools are given, but this server does not look for calls. Start it with --enable-auto-tool-choice, "
            "or use a tool_choice of type 'any', 'tool' or 'none'.",
            "tools",
        )


def conversation_of(service: Service, body: MessagesPrompt, cache_salt: str | None = None) -> Conversation:
    """The request as all APIs have it. Raises ServingError and RequestError."""
    use = tool_use(body)
    return Conversation(
        messages=chat_messages(body, service.takes_pictures),
        template={
            "add_generation_prompt": not continues(body),
            "continue_final_message": continues(body),
            "tools": use.tools if use else None,
            "template_variables": template_variables(body),
        },
        tool_use=use,
        shape=output_format(body),
        include_reasoning=shows_thinking(body.thinking),
        cache_salt=cache_salt,
    )


def shows_thinking(thinking: ThinkingOption | None) -> bool:
    return thinking is None or (thinking.type != "disabled" and thinking.display != "omitted")


def choice_of(body: MessagesPrompt) -> str | None:
    """What all APIs call the choice of tools; None where the model may call none."""
    kind = "auto" if body.tool_choice is None else body.tool_choice.type
    return None if not body.tools or kind == "none" else CHOICES[kind]


def tool_use(body: MessagesPrompt) -> ToolUse | None:
    """The tools that the model may call, and whether it must."""
    choice, given = choice_of(body), body.tool_choice or MessagesToolChoice("auto")
    if choice is None:
        return None
    name = given.name if choice == "named" else None
    tools = [template_tool(tool) for tool in body.tools]
    return ToolUse(tools, choice, name, parallel=not given.disable_parallel_tool_use)


def template_tool(tool: MessagesTool) -> dict[str, Any]:
    """The form in which chat templates know tools."""
    description = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **description, "parameters": tool.input_schema}}


def template_variables(body: MessagesPrompt) -> dict[str, Any]:
    """What chat templates read besides messages and tools. They call the switch for thinking by one of two names."""
    variables: dict[str, Any] = {}
    if body.thinking is not None:
        thinks = body.thinking.type != "disabled"
        variables = {"enable_thinking": thinks, "thinking": thinks}
    if body.output_config is not None and body.output_config.effort is not None:
        variables["reasoning_effort"] = body.output_config.effort
    check_depth("chat_template_kwargs", body.chat_template_kwargs)
    return {**variables, **(body.chat_template_kwargs or {})}


def sampling_params(body: MessagesRequest, defaults: Mapping[str, Any], limits_thinking: bool) -> SamplingParams:
    """The request's own parameters over the model's `defaults`. Raises RequestError for values that cannot be.

    `limits_thinking`: whether thinking can be cut short for this model; if not, a budget is a target only.
    """
    own = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k}
    if limits_thinking and body.thinking is not None and body.thinking.type == "enabled":
        own["thinking_token_budget"] = body.thinking.budget_tokens
    given = {name: value for name, value in own.items() if value is not None}
    given |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences}
    return generate.sampling_params(given, defaults, streams=bool(body.stream))


def output_format(body: MessagesPrompt) -> StructuredOutputsParams | None:
    """What the response must look like, when the request says so. Raises RequestError for a schema that is none."""
    if body.output_config is None or body.output_config.format is None:
        return None
    return StructuredOutputsParams(json=body.output_config.format.schema)
