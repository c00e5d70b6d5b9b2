"""JSON schemas whose objects have the properties that they name and no others, as vLLM's default backend reads them.

A schema by itself lets every object have further properties with any name and content, and a model that has to write
JSON can go on with those until it runs out of tokens. `"additionalProperties": true` says that they are wanted.
This module knows schemas only: no grammar, no request.
"""

from collections.abc import Iterator
from typing import Any

OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords with an object whose values are schemas, whatever their names are."""
OF_SCHEMAS = (
    "allOf", "anyOf", "oneOf", "prefixItems", "items", "additionalItems", "contains", "not", "if", "then", "else",
    "propertyNames", "additionalProperties", "unevaluatedProperties", "unevaluatedItems",
)  # fmt: skip
"""Keywords with a schema, or a list of them."""
NAMING = ("properties", "patternProperties")
SAYS_IT = ("additionalProperties", "unevaluatedProperties")
ALTERNATIVES = ("anyOf", "oneOf")
FURTHER = ("allOf", "if", "then", "else", "$ref", "dependentSchemas", *ALTERNATIVES)
"""Keywords with schemas for the very object that the schema around them is for."""


def close_objects(schema: dict[str, Any], *, unnamed: bool = False) -> None:
    """Forbid further properties in place, where the schema does not say anything of them.

    Objects that name no property stay free, unless `unnamed`. So do objects that several schemas describe together
    (`allOf`, or `properties` beside a `$ref`): what one of them names is a further property to the other.
    """
    shared = shared_schemas(schema)
    for part in subschemas(schema):
        named = any(keyword in part for keyword in NAMING)
        if id(part) in shared or not (named or (unnamed and part.get("type") == "object")):
            continue
        if not any(keyword in part for keyword in SAYS_IT):
            part["additionalProperties"] = False


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Every schema in a schema, itself first. What is only a value (`const`, `enum`, `default`) is none."""
    pending = [schema]
    while pending:
        part = pending.pop()
        if not isinstance(part, dict):
            continue
        yield part
        for keyword, value in list(part.items()):
            if keyword in OF_NAMES and isinstance(value, dict):
                pending += value.values()
            elif keyword in OF_SCHEMAS:
                pending += value if isinstance(value, list) else [value]


def shared_schemas(root: dict[str, Any]) -> set[int]:
    """The identities of those schemas that describe an object together with another one."""
    shared: set[int] = set()
    for part in subschemas(root):
        groups = describers(root, part)
        pending = [schema for group in groups for schema in group] if len(groups) > 1 else []
        while pending:
            member = pending.pop()
            if id(member) not in shared:
                shared.add(id(member))
                pending += [schema for group in describers(root, member) for schema in group]
    return shared


def describers(root: dict[str, Any], part: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The schemas that name properties, or may, of what `part` is for; alternatives of each other are a group."""
    groups: list[list[Any]] = [[part]] if any(keyword in part for keyword in (*NAMING, *SAYS_IT)) else []
    for keyword in FURTHER:
        value = part.get(keyword)
        if keyword == "$ref":
            groups.append([target(root, value)])
        elif keyword in ALTERNATIVES:
            groups.append(value if isinstance(value, list) else [])
        elif keyword == "dependentSchemas":
            groups += [[each] for each in (value.values() if isinstance(value, dict) else ())]
        else:
            groups += [[each] for each in (value if isinstance(value, list) else [value])]
    speaking = [[schema for schema in group if speaks(schema)] for group in groups]
    return [group for group in speaking if group]


def speaks(schema: Any) -> bool:
    """Whether a schema may name properties: `{"required": ["a"]}` does not."""
    return isinstance(schema, dict) and any(keyword in schema for keyword in (*NAMING, *SAYS_IT, *FURTHER))


def target(root: dict[str, Any], reference: Any) -> Any:
    """The schema that a `$ref` into the same document names; None where there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for step in reference[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, dict) else None
    return found
