"""The conversation of a chat request: its messages, tools and template arguments, checked, as chat templates read them.

This module knows no tokens, and nothing of how answers are generated.
"""

from typing import Any

import msgspec

from jaxpaged.entrypoints.http.body import check_depth
from jaxpaged.entrypoints.http.openai.fields import shape_of
from jaxpaged.entrypoints.http.openai.protocol import ChatCompletionRequest, NamedToolChoice, TokenizeRequest, Tool
from jaxpaged.serving.errors import ServingError
from jaxpaged.serving.prompts import Conversation
from jaxpaged.serving.tool_use import ToolUse

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
"""Type of a part of a message -> its key that holds a text."""


def conversation_of(body: ChatCompletionRequest, trust_template: bool) -> Conversation:
    """The request as all APIs have it. Raises ServingError and RequestError."""
    messages, template = template_messages(body.messages), template_arguments(body, trust_template)
    return Conversation(
        messages=messages,
        template=template,
        tool_use=tool_use(body.tool_choice, template["tools"], body.parallel_tool_calls is not False),
        shape=shape_of(body),
        include_reasoning=body.include_reasoning is not False,
        truncation=body.truncation,
        add_special_tokens=bool(body.add_special_tokens),
        cache_salt=body.cache_salt,
    )


def template_arguments(body: ChatCompletionRequest | TokenizeRequest, trust_template: bool) -> dict[str, Any]:
    """The arguments of `InputProcessor.chat_prompt` besides the messages. Raises ServingError."""
    for name in ("media_io_kwargs", "mm_processor_kwargs"):
        if getattr(body, name):
            raise ServingError(f"{name} is given, but the model takes text only. Leave it out.", name)
    if body.chat_template is not None and not trust_template:
        raise ServingError(
            "chat_template is given, but this server uses the model's own. Leave it out, or start the server with "
            "--trust-request-chat-template.",
            "chat_template",
        )
    variables = dict(body.chat_template_kwargs or {})
    check_depth("chat_template_kwargs", variables)
    check_depth("documents", body.documents)
    if body.documents is not None:
        variables["documents"] = body.documents
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    return {
        "chat_template": body.chat_template,
        "add_generation_prompt": body.add_generation_prompt is not False,
        "continue_final_message": bool(body.continue_final_message),
        "tools": template_tools(body.tools),
        "template_variables": variables,
    }


def template_tools(tools: list[Tool] | None) -> list[dict[str, Any]] | None:
    """Tools as plain objects. Raises ServingError for other kinds, and for names that come twice."""
    if tools is None:
        return None
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.type != "function":
            path = f"tools[{index}].type"
            raise ServingError(f"{path} is {tool.type!r}; only 'function' is served.", path)
        check_depth(f"tools[{index}].function.parameters", tool.function.parameters)
        if tool.function.name in names:
            path = f"tools[{index}].function.name"
            raise ServingError(f"{path} is {tool.function.name!r}, as that of another tool. Rename one.", path)
        names.add(tool.function.name)
    return [msgspec.to_builtins(tool) for tool in tools]


def tool_use(
    choice: str | NamedToolChoice | None, tools: list[dict[str, Any]] | None, parallel: bool
) -> ToolUse | None:
    """The tools and whether to call them; None without tools. Raises ServingError for a choice that cannot be."""
    if not tools:
        if choice in (None, "none") or (choice == "auto" and tools is not None):
            return None
        raise ServingError("tool_choice is given without tools. Give tools, or leave it out.", "tool_choice")
    names = [tool["function"]["name"] for tool in tools]
    if isinstance(choice, NamedToolChoice):
        if choice.function.name not in names:
            raise ServingError(
                f"tool_choice names the function {choice.function.name!r}, but tools has {', '.join(names)}.",
                "tool_choice",
            )
        return ToolUse(tools, "named", choice.function.name, parallel)
    if choice not in (None, "auto", "none", "required"):
        raise ServingError(
            f"tool_choice is {choice!r}; it must be 'none', 'auto', 'required', or name a function.", "tool_choice"
        )
    return ToolUse(tools, choice or "auto", parallel=parallel)


def template_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates read them: roles checked, parts of text only, aliases of old clients renamed.

    Raises ServingError naming the message at fault.
    """
    if not messages:
        raise ServingError("messages is an empty list. Give at least one message.", "messages")
    check_depth("messages", messages)
    return [template_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def template_message(message: dict[str, Any], path: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ServingError(f"{path}.role is {role!r}; it must be a text such as 'user'.", f"{path}.role")
    prepared = dict(message)
    if "reasoning_content" in prepared:
        prepared.setdefault("reasoning", prepared.pop("reasoning_content"))
    content = message.get("content")
    if isinstance(content, list):
        prepared["content"] = [text_part(part, f"{path}.content[{i}]") for i, part in enumerate(content)]
    elif content is None and role == "assistant":
        prepared["content"] = ""  # an answer that was nothing but tool calls; templates add texts to it
    elif not isinstance(content, str):
        raise ServingError(f"{path}.content must be a text or a list of parts. Correct it.", f"{path}.content")
    return prepared


def text_part(part: Any, path: str) -> dict[str, str]:
    """A part as a text part. Raises ServingError for other media."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    key = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        raise ServingError(
            f"{path}.type is {kind!r}, but the model takes text only. Use parts of type 'text'.", f"{path}.type"
        )
    if not isinstance(part.get(key), str):
        raise ServingError(f"{path}.{key} must be a text. Correct it.", f"{path}.{key}")
    return {"type": "text", "text": part[key]}


def text_of(message: dict[str, Any]) -> str:
    """The text of a prepared message."""
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
