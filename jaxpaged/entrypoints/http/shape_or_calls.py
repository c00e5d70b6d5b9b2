"""The shape of an answer that is either what the client asked for, or calls of tools as the model writes them.

Known for the formats whose calls are JSON between fixed texts, by which they differ from any answer at once. This
module knows no API and no grammar.
"""

import json
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxpaged.entrypoints.http.tool_use import ToolUse
from jaxpaged.structural_tags import read_structural_tag
from jaxpaged.structured_outputs import StructuredOutputsParams


@dataclass(frozen=True)
class WrittenCalls:
    """Calls between `start` and `end`, each between `before` and `after`, with `separator` between each two."""

    before: str = '{"name": %s, "arguments": '
    after: str = "}"
    separator: str = ", "
    start: str = ""
    end: str = ""

    def format(self, use: ToolUse) -> dict[str, Any]:
        """One call or several, as a format of structural tags."""
        tags = [
            {
                "type": "tag",
                "begin": self.before % json.dumps(name),
                "content": {"type": "json_schema", "json_schema": schema},
                "end": self.after,
            }
            for name, schema in use.schemas.items()
        ]
        calls = {
            "type": "tags_with_separator", "tags": tags, "separator": self.separator, "at_least_one": True,
            "stop_after_first": not use.parallel,
        }  # fmt: skip
        around = [{"type": "const_string", "value": text} if text else None for text in (self.start, self.end)]
        return {"type": "sequence", "elements": [part for part in (around[0], calls, around[1]) if part]}


def tagged_objects(name: str) -> WrittenCalls:
    """Each call in a pair of tags of its own."""
    return WrittenCalls(f'<{name}>\n{{"name": %s, "arguments": ', f"}}\n</{name}>", "\n")


WRITTEN = {
    "granite": WrittenCalls(start="<|tool_call|>[", end="]"),
    "hermes": tagged_objects("tool_call"),
    "jamba": WrittenCalls(start="<tool_calls>[", end="]</tool_calls>"),
    "longcat": tagged_objects("longcat_tool_call"),
    "phi4_mini_json": WrittenCalls(start="functools[", end="]"),
}
"""Tool parser -> how the calls that it finds are written."""


def shape_or_calls(shape: StructuredOutputsParams, use: ToolUse, tool_parser: str) -> StructuredOutputsParams | None:
    """None: it is not known how calls in this format are written."""
    written = WRITTEN.get(tool_parser)
    if written is None:
        return None
    either = {"type": "or", "elements": [format_of(shape), written.format(use)]}
    tag = {"type": "structural_tag", "format": either}
    return msgspec.structs.replace(shape, **{shape.kind: None, "structural_tag": tag})


def format_of(shape: StructuredOutputsParams) -> dict[str, Any]:
    """A shape of any kind as a format of structural tags."""
    value = getattr(shape, shape.kind)
    match shape.kind:
        case "json":
            return {"type": "json_schema", "json_schema": json.loads(value) if isinstance(value, str) else value}
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "regex":
            return {"type": "regex", "pattern": value}
        case "grammar":
            return {"type": "grammar", "grammar": value}
        case "choice":
            return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in value]}
    return msgspec.to_builtins(read_structural_tag(json.loads(value) if isinstance(value, str) else value))
