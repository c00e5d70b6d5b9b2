"""The tools of a request, whether the model must call them, and the shape of an output that may be or must be a call.

Tools are plain objects as chat templates read them: {"type": "function", "function": {"name", "parameters", ...}}. That
an output is either what the client asked for or a call has a shape for those formats whose calls are JSON between fixed
texts, by which they differ from any output at once. This module knows no API and no grammar.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxpaged.parsing.output import ToolSchemas
from jaxpaged.sampling_params.json_schema import moved
from jaxpaged.sampling_params.structural_tags import read_structural_tag
from jaxpaged.sampling_params.structured_outputs import StructuredOutputsParams

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class ToolUse:
    """`choice` is "auto", "none", "required", or "named": then `name` must be called."""

    tools: Sequence[Mapping[str, Any]]
    choice: str = "auto"
    name: str | None = None
    parallel: bool = True

    @property
    def schemas(self) -> ToolSchemas:
        """Name -> JSON schema of the parameters."""
        return {tool["function"]["name"]: parameters_of(tool) for tool in self.tools}

    @property
    def is_forced(self) -> bool:
        return self.choice in ("required", "named")

    def forced_shape(self) -> StructuredOutputsParams | None:
        """What a forced answer looks like: the arguments of the named tool, or a list of calls. None: free text."""
        if self.choice == "named":
            return StructuredOutputsParams(json=self.schemas[self.name])
        return StructuredOutputsParams(json=self._list_of_calls()) if self.choice == "required" else None

    def _list_of_calls(self) -> dict[str, Any]:
        """Every tool's schema becomes a definition of the one schema, and its references are made to stay in it."""
        definitions, calls = {}, []
        for number, (name, schema) in enumerate(self.schemas.items()):
            definition = f"tool{number}"
            definitions[definition] = moved(schema, definition)
            calls.append(
                {
                    "type": "object",
                    "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{definition}"}},
                    "required": ["name", "parameters"],
                    "additionalProperties": False,
                }
            )
        most = {} if self.parallel else {"maxItems": 1}
        return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}, "$defs": definitions}


def parameters_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's parameters, which are an object even where it does not say so."""
    parameters = tool["function"].get("parameters")
    return {"type": "object", **parameters} if parameters else NO_PARAMETERS


# ---- a shape, or calls


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
            "type": "tags_with_separator",
            "tags": tags,
            "separator": self.separator,
            "at_least_one": True,
            "stop_after_first": not use.parallel,
        }
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
