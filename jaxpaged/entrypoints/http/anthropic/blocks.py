"""What the model wrote, in blocks: text, thinking and calls, as a whole and as the pieces of a stream.

Both come from the same deltas and are cut into blocks in the same way: a block lasts as long as deltas are of its kind.
This module knows no events.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from jaxpaged.entrypoints.http.anthropic.protocol import OutputBlock, TextBlock, ThinkingBlock, ToolUseBlock
from jaxpaged.parsing.deltas import Delta


@dataclass
class OpenBlock:
    """A block while it is being written."""

    kind: str  # "text", "thinking" or "tool_use"
    call: int | None = None  # number of the call
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    def belongs(self, delta: Delta) -> bool:
        call = delta.tool_call
        return kind_of(delta) == self.kind and (call is None or call.index == self.call)

    def begun(self) -> OutputBlock:
        """The block before its first piece."""
        match self.kind:
            case "thinking":
                return ThinkingBlock("", "")
            case "tool_use":
                return ToolUseBlock(self.id, self.name, {})
        return TextBlock("")

    def ended(self) -> OutputBlock:
        """The whole block."""
        text = "".join(self.pieces)
        match self.kind:
            case "thinking":
                return ThinkingBlock(text, signature(text))
            case "tool_use":
                return ToolUseBlock(self.id, self.name, input_of(text))
        return TextBlock(text)


def kind_of(delta: Delta) -> str:
    if delta.tool_call is not None:
        return "tool_use"
    return "text" if delta.reasoning is None else "thinking"


def text_of(delta: Delta) -> str:
    """The piece of text, of thinking, or of a call's input as JSON."""
    if delta.tool_call is not None:
        return delta.tool_call.arguments
    return (delta.content if delta.reasoning is None else delta.reasoning) or ""


def open_block(delta: Delta) -> OpenBlock:
    call = delta.tool_call
    return OpenBlock("tool_use", call.index, call.id or "", call.name or "") if call else OpenBlock(kind_of(delta))


def signature(thinking: str) -> str:
    """Clients leave out thinking without a signature. There is nothing to keep secret, so it is a digest."""
    return hashlib.sha256(thinking.encode()).hexdigest()


def input_of(arguments: str) -> dict:
    """A call's input; an empty object when the model was cut off or wrote no JSON object."""
    try:
        return msgspec.json.decode(arguments, type=dict)
    except msgspec.DecodeError:
        return {}


def content_of(deltas: Iterable[Delta]) -> list[OutputBlock]:
    """The blocks that deltas add up to; an answer without any is an empty text."""
    blocks: list[OpenBlock] = []
    for delta in deltas:
        if not blocks or not blocks[-1].belongs(delta):
            blocks.append(open_block(delta))
        blocks[-1].pieces.append(text_of(delta))
    return [block.ended() for block in blocks] or [TextBlock("")]
