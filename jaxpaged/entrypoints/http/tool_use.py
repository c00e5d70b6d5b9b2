"""The tools of a request, whether the model must call them, and the shape that forced calls have.

Tools are plain objects as chat templates read them: {"type": "function", "function": {"name", "parameters", ...}}.
This module knows no API and no grammar.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpaged.parsing.output import ToolSchemas
from jaxpaged.structured_outputs import StructuredOutputsParams

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
LITERAL = frozenset({"const", "enum", "default", "examples"})
"""Keywords of JSON schemas whose values are data, in which "$ref" is no reference."""


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
            place = f"#/$defs/tool{number}"
            definitions[f"tool{number}"] = moved(schema, place)
            calls.append({
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": {"$ref": place}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            })  # fmt: skip
        most = {} if self.parallel else {"maxItems": 1}
        return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}, "$defs": definitions}


def parameters_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's parameters, which are an object even where it does not say so."""
    parameters = tool["function"].get("parameters")
    return {"type": "object", **parameters} if parameters else NO_PARAMETERS


def moved(schema: Any, place: str) -> Any:
    """A copy whose references to its own parts are right where the schema lies at `place` of another one."""
    if isinstance(schema, list):
        return [moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {key: value if key in LITERAL else moved(value, place) for key, value in schema.items()}
    reference = copy.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        copy["$ref"] = place + reference[1:]
    return copy
