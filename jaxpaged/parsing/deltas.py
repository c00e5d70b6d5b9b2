"""What a parser gives: deltas while text comes in, and the message that they add up to.

The pieces are those of OpenAI's streams: a tool call's first delta has its id and name, later ones only fragments of
its arguments, which are JSON text. This module knows no format.
"""

from collections.abc import Iterable

import msgspec


class ToolCallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of call number `index`. `id` and `name` come once, with the first piece."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """Exactly one of the three is set."""

    content: str | None = None
    reasoning: str | None = None
    tool_call: ToolCallDelta | None = None


class ToolCall(msgspec.Struct):
    """A whole call. `arguments` is what the model wrote: JSON, unless it was cut off or the model erred."""

    id: str
    name: str
    arguments: str


class ParsedMessage(msgspec.Struct):
    """All deltas of a text, joined. None means that there was no such piece."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = []


def joined(deltas: Iterable[Delta]) -> ParsedMessage:
    """The message that deltas add up to."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[tuple[ToolCallDelta, list[str]]] = []
    for delta in deltas:
        if delta.content is not None:
            content.append(delta.content)
        if delta.reasoning is not None:
            reasoning.append(delta.reasoning)
        if (call := delta.tool_call) is not None:
            if call.id is not None:
                calls.append((call, []))
            calls[call.index][1].append(call.arguments)
    return ParsedMessage(
        "".join(content) if content else None,
        "".join(reasoning) if reasoning else None,
        [ToolCall(first.id, first.name, "".join(pieces)) for first, pieces in calls],
    )
