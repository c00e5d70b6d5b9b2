"""How JSON schemas are walked: where schemas stand in them, what a reference names, how one moves into another.

A keyword is one by where it stands: a property may be called `default`, `enum` or `$ref`, and what a `const` holds is
data. This module knows neither grammars nor requests, and judges no value.
"""

from collections.abc import Collection, Iterator
from typing import Any
from urllib.parse import unquote

OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
"""Keywords with an object whose values are schemas, whatever their names are."""
OF_SCHEMAS = (
    "allOf",
    "anyOf",
    "oneOf",
    "prefixItems",
    "items",
    "additionalItems",
    "contains",
    "not",
    "if",
    "then",
    "else",
    "propertyNames",
    "additionalProperties",
    "unevaluatedProperties",
    "unevaluatedItems",
    "contentSchema",
)
"""Keywords with a schema, or a list of them."""


def children(schema: dict[str, Any], without: Collection[str] = ()) -> Iterator[Any]:
    """The direct subschemas, but for those of the keywords `without`."""
    for keyword, value in schema.items():
        if keyword in without:
            continue
        if keyword in OF_NAMES and isinstance(value, dict):
            yield from value.values()
        elif keyword in OF_SCHEMAS:
            yield from value if isinstance(value, list) else (value,)


def subschemas(root: Any, without: Collection[str] = (), start: Any = None) -> Iterator[dict[str, Any]]:
    """Every schema in a schema that is an object, once: itself first, and what references name, wherever it lies. Those
    below the keywords `without` count only where something else leads to them. `start`: a part of it to begin at."""
    pending, seen = [root if start is None else start], set()
    while pending:
        part = pending.pop()
        if isinstance(part, dict) and id(part) not in seen:
            seen.add(id(part))
            yield part
            pending += [*children(part, without), target(root, part.get("$ref"))]


def target(root: Any, reference: Any) -> Any:
    """What a `$ref` into the same document names: by a pointer, or by an anchor. None: nothing that is found here."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    pointer = unquote(reference[1:])
    if pointer and not pointer.startswith("/"):
        return anchored(root, pointer)
    found = root
    for step in pointer.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(name)] if name.isdecimal() and int(name) < len(found) else None
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found


def anchored(root: Any, name: str) -> Any:
    """The schema with an anchor; None: there is none."""
    pending = [root]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            if part.get("$anchor") == name:
                return part
            pending += list(children(part))
    return None


def moved(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """A copy that means the same as the definition `name` of another schema: its references stay in it."""
    own = schema.get("$id")
    own = own.removesuffix("#") if isinstance(own, str) else ""
    schemas = {id(part) for part in subschemas(schema)}

    def copied(value: Any) -> Any:
        if isinstance(value, list):
            return [copied(item) for item in value]
        if not isinstance(value, dict):
            return value
        copy = {key: copied(item) for key, item in value.items()}
        if id(value) in schemas:
            move_names(copy, own, name)
        return copy

    return {keyword: value for keyword, value in copied(schema).items() if keyword not in ("$id", "$schema")}


def move_names(schema: dict[str, Any], own: str, name: str) -> None:
    """Change the anchor of a schema and its reference, in place, for a document that becomes the definition `name`.
    `own` is what the document calls itself."""
    if isinstance(schema.get("$anchor"), str):
        schema["$anchor"] = f"{name}.{schema['$anchor']}"
    reference = schema.get("$ref")
    if not isinstance(reference, str):
        return
    fragment = reference.removeprefix(own)
    if fragment[:2] in ("", "#", "#/"):
        schema["$ref"] = f"#/$defs/{name}{fragment[1:]}"
    elif fragment.startswith("#"):
        schema["$ref"] = f"#{name}.{fragment[1:]}"
