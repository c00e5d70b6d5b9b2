"""Fields of a request besides its messages: what they must be, and what they become.

Types are checked when a body is decoded; ranges by `SamplingParams`. This module knows no endpoint.
"""

import re
from collections.abc import Mapping
from typing import Any

from jaxpaged.entrypoints.http.anthropic.conversation import chat_messages, continues
from jaxpaged.entrypoints.http.anthropic.protocol import (
    MessagesPrompt,
    MessagesRequest,
    MessagesTool,
    MessagesToolChoice,
    ThinkingOption,
)
from jaxpaged.entrypoints.http.body import check_depth
from jaxpaged.entrypoints.http.errors import HttpError
from jaxpaged.entrypoints.http.prepare import Conversation
from jaxpaged.entrypoints.http.sampling_fields import check_refusals, check_stop
from jaxpaged.entrypoints.http.tool_use import ToolUse
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams
from jaxpaged.structured_outputs import StructuredOutputsParams

REFUSALS = {
    "mcp_servers": "This server calls no tools itself",
    "container": "This server runs no code",
    "thread": "This server keeps no conversations: send all messages every time",
}
TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
LEAST_BUDGET = 1024
CHOICES = {"auto": "auto", "any": "required", "tool": "named"}
"""Type of a tool choice -> what all APIs call it."""
EFFORTS = ("low", "medium", "high", "xhigh", "max")


def engine_names(wanted: MessagesPrompt) -> dict[str, str]:
    """The engine's name of a field -> what it is called here. Grammars come from a format or from forced tools."""
    use = tool_use(wanted)
    grammar = "tools" if use is not None and use.is_forced else "output_config.format"
    return {"prompt": "messages", "stop": "stop_sequences", "structured_outputs": grammar}


def check_prompt_fields(wanted: MessagesPrompt) -> None:
    """Raise HttpError 400 for fields that cannot be honoured, or contradict each other."""
    check_refusals(wanted, REFUSALS)
    check_tools(wanted.tools or [])
    check_tool_choice(wanted.tool_choice, wanted.tools or [])
    check_thinking(wanted.thinking, wanted.tool_choice)
    effort = wanted.output_config.effort if wanted.output_config else None
    if effort is not None and effort not in EFFORTS:
        path = "output_config.effort"
        raise HttpError(400, f"{path} is {effort!r}; it must be one of {', '.join(EFFORTS)}.", path)


def check_request_fields(wanted: MessagesRequest) -> None:
    """The same for what counts only when there is an answer."""
    check_stop("stop_sequences", wanted.stop_sequences)
    budget = wanted.thinking.budget_tokens if wanted.thinking else None
    if budget is not None and budget >= wanted.max_tokens:
        path = "thinking.budget_tokens"
        raise HttpError(400, f"{path} is {budget}; it must be less than max_tokens = {wanted.max_tokens}.", path)


def check_tools(tools: list[MessagesTool]) -> None:
    names = set()
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        if tool.type not in (None, "custom"):
            raise HttpError(
                400, f"{path}.type is {tool.type!r}; this server has no tools of its own. Give 'custom' ones.",
                f"{path}.type",
            )  # fmt: skip
        if not TOOL_NAME.fullmatch(tool.name):
            raise HttpError(
                400, f"{path}.name is {tool.name!r}; it must have 1 to 128 letters, digits, _ or -.", f"{path}.name"
            )
        if tool.name in names:
            raise HttpError(400, f"{path}.name is {tool.name!r}, as that of another tool is.", f"{path}.name")
        names.add(tool.name)
        check_input_schema(f"{path}.input_schema", tool.input_schema)


def check_input_schema(path: str, schema: dict[str, Any] | None) -> None:
    if schema is None:
        raise HttpError(400, f"{path} is missing. Add it.", path)
    if schema.get("type") != "object":
        raise HttpError(400, f"{path}.type is {schema.get('type')!r}; it must be 'object'.", f"{path}.type")
    check_depth(path, schema)


def check_tool_choice(choice: MessagesToolChoice | None, tools: list[MessagesTool]) -> None:
    if choice is None:
        return
    if not tools:
        raise HttpError(400, "tool_choice is given without tools. Give tools, or leave it out.", "tool_choice")
    names = [tool.name for tool in tools]
    if choice.type == "tool" and choice.name not in names:
        raise HttpError(
            400, f"tool_choice.name is {choice.name!r}, but tools has {', '.join(names)}.", "tool_choice.name"
        )


def check_thinking(thinking: ThinkingOption | None, choice: MessagesToolChoice | None) -> None:
    if thinking is None or thinking.type != "enabled":
        return
    path = "thinking.budget_tokens"
    if thinking.budget_tokens is None:
        raise HttpError(400, f"{path} is missing. Add it.", path)
    if thinking.budget_tokens < LEAST_BUDGET:
        raise HttpError(400, f"{path} is {thinking.budget_tokens}; it must be at least {LEAST_BUDGET}.", path)
    if choice is not None and choice.type in ("any", "tool"):
        raise HttpError(
            400, f"thinking is enabled, but tool_choice.type is {choice.type!r}, which leaves no room for it. "
            "Use 'auto'.", "thinking",
        )  # fmt: skip


def check_calls_are_found(wanted: MessagesPrompt, tool_parser: str | None) -> None:
    """Raise HttpError 400 when the model may call tools as it likes, but nobody would find the calls."""
    use = tool_use(wanted)
    if use is not None and use.choice == "auto" and tool_parser is None:
        raise HttpError(
            400, "tools are given, but this server does not look for calls. Start it with --enable-auto-tool-choice, "
            "or use a tool_choice of type 'any', 'tool' or 'none'.", "tools",
        )  # fmt: skip


def conversation(wanted: MessagesPrompt, cache_salt: str | None = None) -> Conversation:
    """The request as all APIs have it. Raises HttpError and RequestError 400."""
    use = tool_use(wanted)
    return Conversation(
        messages=chat_messages(wanted),
        template={
            "add_generation_prompt": not continues(wanted),
            "continue_final_message": continues(wanted),
            "tools": use.tools if use else None,
            "template_variables": template_variables(wanted),
        },
        tool_use=use,
        shape=answer_format(wanted),
        include_reasoning=wanted.thinking is None or wanted.thinking.type != "disabled",
        cache_salt=cache_salt,
    )


def tool_use(wanted: MessagesPrompt) -> ToolUse | None:
    """The tools that the model may call, and whether it must."""
    choice = wanted.tool_choice or MessagesToolChoice("auto")
    if not wanted.tools or choice.type == "none":
        return None
    return ToolUse(
        [template_tool(tool) for tool in wanted.tools],
        CHOICES[choice.type],
        choice.name if choice.type == "tool" else None,
        parallel=not choice.disable_parallel_tool_use,
    )


def template_tool(tool: MessagesTool) -> dict[str, Any]:
    """The form in which chat templates know tools."""
    description = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **description, "parameters": tool.input_schema}}


def template_variables(wanted: MessagesPrompt) -> dict[str, Any]:
    """What chat templates read besides messages and tools. They call the switch for thinking by one of two names."""
    variables: dict[str, Any] = {}
    if wanted.thinking is not None:
        thinks = wanted.thinking.type != "disabled"
        variables = {"enable_thinking": thinks, "thinking": thinks}
    if wanted.output_config is not None and wanted.output_config.effort is not None:
        variables["reasoning_effort"] = wanted.output_config.effort
    check_depth("chat_template_kwargs", wanted.chat_template_kwargs)
    return {**variables, **(wanted.chat_template_kwargs or {})}


def sampling_params(wanted: MessagesRequest, defaults: Mapping[str, Any], limits_thinking: bool) -> SamplingParams:
    """The request's own parameters over the model's `defaults`. Raises RequestError for values that cannot be.

    `limits_thinking`: whether thinking can be cut short for this model; if not, a budget is a target only.
    """
    own = {"temperature": wanted.temperature, "top_p": wanted.top_p, "top_k": wanted.top_k}
    if limits_thinking and wanted.thinking is not None and wanted.thinking.type == "enabled":
        own["thinking_token_budget"] = wanted.thinking.budget_tokens
    given = {name: value for name, value in own.items() if value is not None}
    return SamplingParams(
        **{**defaults, **given, "max_tokens": wanted.max_tokens, "stop": wanted.stop_sequences},
        output_kind=RequestOutputKind.DELTA if wanted.stream else RequestOutputKind.FINAL_ONLY,
    )


def answer_format(wanted: MessagesPrompt) -> StructuredOutputsParams | None:
    """What the answer must look like, when the request says so. Raises RequestError for a schema that is none."""
    if wanted.output_config is None or wanted.output_config.format is None:
        return None
    return StructuredOutputsParams(json=wanted.output_config.format.schema)
