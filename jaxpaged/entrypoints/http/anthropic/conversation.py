"""Turns of blocks as chat messages, which templates read.

Every message's content is one text, so that all templates take it, but for messages with pictures: theirs is a list of
parts. This module knows no tokens, and nothing of how
answers are generated.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from jaxpaged.entrypoints.http.anthropic.protocol import (
    DocumentBlock,
    ImageBlock,
    ImageSource,
    InputBlock,
    InputMessage,
    MessagesPrompt,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from jaxpaged.serving.errors import ServingError
from jaxpaged.serving.requests import check_depth

BILLING = "x-anthropic-billing-header:"
"""How a text block begins that Claude Code puts into system prompts. It always differs: nothing behind it is cached."""

Located = tuple[str, InputBlock]
"""Where a block stands in the request, and the block."""


def has_pictures(body: MessagesPrompt) -> bool:
    """Whether a turn, or a result of a call in one, has a picture."""
    return any(
        isinstance(block, ImageBlock)
        or (isinstance(block, ToolResultBlock) and any(isinstance(part, ImageBlock) for part in block.content or ()))
        for message in body.messages
        for block in message.content
    )


def chat_messages(body: MessagesPrompt, takes_pictures: bool = False) -> list[dict[str, Any]]:
    """The system prompt and all turns. Raises ServingError naming the block at fault."""
    if not body.messages:
        raise ServingError("messages is an empty list. Give at least one message.", "messages")
    messages = system_messages(body.system)
    tools: dict[str, str] = {}  # id of a call so far -> name of its tool
    numbered = enumerate(body.messages)
    for role, turns in itertools.groupby(numbered, key=lambda turn: turn[1].role):
        blocks = [
            block
            for index, message in turns
            for block in located(message, f"messages[{index}].content", takes_pictures)
        ]
        if role == "assistant":
            messages.append(assistant_message(blocks, tools))
        else:
            messages += given_messages(role, blocks, tools, takes_pictures)
    if continues(body) and "tool_calls" in messages[-1]:
        raise ServingError(
            "messages ends with a tool_use block, which needs an answer. Add a user message with its tool_result.",
            "messages",
        )
    return messages


def continues(body: MessagesPrompt) -> bool:
    """Whether the last turn is the beginning of the response."""
    return body.messages[-1].role == "assistant"


def system_messages(system: str | list[TextBlock] | None) -> list[dict[str, Any]]:
    texts = [system or ""] if not isinstance(system, list) else [block.text for block in system]
    text = "\n".join(each for each in texts if not each.startswith(BILLING))
    return [{"role": "system", "content": text}] if text else []


def located(message: InputMessage, path: str, takes_pictures: bool) -> list[Located]:
    """The blocks of a message. Raises ServingError for those that its role cannot have, and for no text at all."""
    content = [TextBlock(message.content)] if isinstance(message.content, str) else message.content
    if message.role != "assistant" and content in ([], [TextBlock("")]):
        raise ServingError(f"{path} is empty. Give it at least one character.", path)
    blocks = [(f"{path}[{index}]", block) for index, block in enumerate(content)]
    for where, block in blocks:
        check_block(message.role, where, block, takes_pictures)
    return blocks


def check_block(role: str, path: str, block: InputBlock, takes_pictures: bool) -> None:
    kind = block.__struct_config__.tag
    if isinstance(block, DocumentBlock) or (isinstance(block, ImageBlock) and not takes_pictures):
        what = "text and pictures" if takes_pictures else "text"
        raise ServingError(f"{path} is of type {kind!r}, but the model takes {what} only. Send text instead.", path)
    allowed = {
        "user": TextBlock | ImageBlock | ToolResultBlock,
        "assistant": InputBlock,
        "system": TextBlock,
    }[role]
    if not isinstance(block, allowed) or (role == "assistant" and isinstance(block, ToolResultBlock | ImageBlock)):
        raise ServingError(f"{path} is of type {kind!r}, which a message of role {role!r} cannot have.", path)


def assistant_message(blocks: Sequence[Located], tools: dict[str, str]) -> dict[str, Any]:
    """What the model said. Its calls become known in `tools`."""
    text = "".join(block.text for _, block in blocks if isinstance(block, TextBlock))
    message: dict[str, Any] = {"role": "assistant", "content": text}
    thoughts = [block.thinking for _, block in blocks if isinstance(block, ThinkingBlock)]
    if thoughts:
        message["reasoning"] = message["reasoning_content"] = "\n".join(thoughts)  # templates know one or the other
    uses = [(path, block) for path, block in blocks if isinstance(block, ToolUseBlock)]
    for path, block in uses:
        check_depth(f"{path}.input", block.input)
        tools[block.id] = block.name
    if uses:
        message["tool_calls"] = [tool_call(block) for _, block in uses]
    return message


def tool_call(block: ToolUseBlock) -> dict[str, Any]:
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}


def given_messages(
    role: str, blocks: Sequence[Located], tools: dict[str, str], takes_pictures: bool
) -> list[dict[str, Any]]:
    """What the model is told: texts and pictures, and results of calls as messages of their own, in this order."""
    messages = []
    for is_result, group in itertools.groupby(blocks, key=lambda located: isinstance(located[1], ToolResultBlock)):
        if is_result:
            messages += [tool_message(path, block, tools, takes_pictures) for path, block in group]
        else:
            messages.append({"role": role, "content": content_of(list(group))})
    return messages


def content_of(blocks: Sequence[Located]) -> str | list[dict[str, Any]]:
    """One text, or where there are pictures the parts."""
    if all(isinstance(block, TextBlock) for _, block in blocks):
        return "\n".join(block.text for _, block in blocks)
    return [
        {"type": "text", "text": block.text} if isinstance(block, TextBlock) else picture_part(block.source, path)
        for path, block in blocks
    ]


def picture_part(source: ImageSource | None, path: str) -> dict[str, Any]:
    """A picture as `InputProcessor.chat_prompt` reads it. Raises ServingError for a source without one."""
    if source is None:
        raise ServingError(f"{path}.source is missing. Add it.", f"{path}.source")
    if source.type == "url" and source.url is not None:
        return {"type": "image_url", "image_url": source.url, "field": f"{path}.source.url"}
    if source.type == "base64" and source.data is not None:
        url = f"data:{source.media_type or ''};base64,{source.data}"
        return {"type": "image", "image": url, "field": f"{path}.source.data"}
    if source.type in ("url", "base64"):
        name = f"{path}.source.{'url' if source.type == 'url' else 'data'}"
        raise ServingError(f"{name} is missing. Add it.", name)
    raise ServingError(
        f"{path}.source.type is {source.type!r}; pictures come as 'base64' or by 'url'.", f"{path}.source.type"
    )


def tool_message(path: str, block: ToolResultBlock, tools: dict[str, str], takes_pictures: bool) -> dict[str, Any]:
    """A result. Templates have no word for a call that failed, so the text says it."""
    if block.tool_use_id not in tools:
        raise ServingError(
            f"{path}.tool_use_id is {block.tool_use_id!r}, but no tool_use block before it has this id.",
            f"{path}.tool_use_id",
        )
    parts = [TextBlock(block.content)] if isinstance(block.content, str) else block.content or []
    blocks = [(f"{path}.content[{index}]", part) for index, part in enumerate(parts)]
    for where, part in blocks:
        check_block("user", where, part, takes_pictures)
    content = content_of(blocks)
    if block.is_error:
        word = "Error: "
        content = word + content if isinstance(content, str) else [{"type": "text", "text": word}, *content]
    return {
        "role": "tool",
        "tool_call_id": block.tool_use_id,
        "name": tools[block.tool_use_id],
        "content": content,
    }
