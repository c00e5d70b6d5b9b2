"""What a text stands for that a model wrote as the value of a parameter: a string or JSON, whichever the schema allows.

Where both would do it is a string, but for the word null. Those keywords of a schema are read that say of which type a
value is, or which values there are; no pattern of a client's is matched here. This module knows no format.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxpaged.sampling_params.json_schema import target

PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}
TEXT_TYPES = ("string", "str", "text")
SAYS_WHICH = frozenset({"type", "enum", "const", "$ref", "allOf", "anyOf", "oneOf", "not"})
OF_TEXTS = frozenset({"minLength", "maxLength", "pattern", "format", "contentEncoding", "contentMediaType"})
OF_OTHERS = frozenset(
    {
        "properties",
        "patternProperties",
        "additionalProperties",
        "required",
        "minProperties",
        "maxProperties",
        "items",
        "prefixItems",
        "minItems",
        "maxItems",
        "uniqueItems",
        "contains",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
    }
)
"""A schema that names no type shows by such keywords that it does not mean strings."""
MOST_STEPS = 1000
MAX_DEPTH = 64
"""Schemas that are looked at for one value, and how deep in each other. What is behind these allows everything."""
SOME_STRING = object()
"""Stands for a string of which nothing is known."""


def argument_json(text: str, schema: Any, root: Any) -> str:
    """The JSON of a parameter written as text. `schema` is the parameter's, a part of `root`; None: it has none."""
    if schema is None:
        return json_string(text)
    judge, read = Judge(root), read_json(text)
    if text.strip() == "null" and judge.allows(schema, None):
        return "null"
    if read is None or judge.allows(schema, text):
        return json_string(text)
    value_json, value = read
    fits = judge.allows(schema, value) or not judge.allows(schema, SOME_STRING)
    return value_json if fits else json_string(text)


def loose_json(text: str) -> str:
    """The JSON of a value of which a format says that it is no string; one that is no JSON is a string all the same."""
    read = read_json(text)
    return json_string(text) if read is None else read[0]


def parameter_schema(root: Any, name: str) -> Any:
    """What the schema of an object says of its property `name`; None: nothing."""
    return property_schema(Judge(root), root, name)


@dataclass
class Judge:
    """Says whether schemas allow values. References are looked up in `root`."""

    root: Any
    num_steps: int = 0

    def allows(self, schema: Any, value: Any, depth: int = 0) -> bool:
        if not isinstance(schema, Mapping) or not self.goes_on(depth):
            return schema is not False
        if not SAYS_WHICH & schema.keys():
            is_string = isinstance(value, str) or value is SOME_STRING
            return not is_string or bool(OF_TEXTS & schema.keys()) or not OF_OTHERS & schema.keys()
        return all(self._verdicts(schema, value, depth + 1))

    def goes_on(self, depth: int) -> bool:
        """Whether another schema may be looked at; it counts."""
        self.num_steps += 1
        return self.num_steps <= MOST_STEPS and depth <= MAX_DEPTH

    def _verdicts(self, schema: Mapping[str, Any], value: Any, depth: int) -> Iterator[bool]:
        kinds, listed = schema.get("type"), schema.get("enum")
        if kinds is not None:
            yield any(is_of(value, kind) for kind in (kinds if isinstance(kinds, list) else [kinds]))
        if isinstance(listed, list):
            yield any(is_same(value, each) for each in listed)
        if "const" in schema:
            yield is_same(value, schema["const"])
        if "$ref" in schema:
            yield self.allows(target(self.root, schema["$ref"]), value, depth)
        for each in as_list(schema.get("allOf")):
            yield self.allows(each, value, depth)
        for keyword in ("anyOf", "oneOf"):
            if isinstance(schema.get(keyword), list):
                yield any(self.allows(each, value, depth) for each in schema[keyword])
        refused = schema.get("not")
        if isinstance(refused, Mapping) and refused.keys() <= {"type", "enum", "const"}:
            is_known = value is not SOME_STRING or "type" in refused
            yield not (is_known and self.allows(refused, value, depth))


def property_schema(judge: Judge, schema: Any, name: str, depth: int = 0) -> Any:
    if not isinstance(schema, Mapping) or not judge.goes_on(depth):
        return None

    def of(part: Any) -> Any:
        return property_schema(judge, part, name, depth + 1)

    found = [own_property(schema, name)]
    found += map(of, (target(judge.root, schema.get("$ref")), *as_list(schema.get("allOf"))))
    found += [any_of(map(of, as_list(schema.get(keyword)))) for keyword in ("anyOf", "oneOf")]
    found.append(any_of(map(of, (schema.get("then"), schema.get("else")))))
    known = [each for each in found if each is not None]
    return {"allOf": known} if len(known) > 1 else known[0] if known else None


def own_property(schema: Mapping[str, Any], name: str) -> Any:
    """What one schema by itself says of a property. Which pattern a name fits is not found out: it may be any."""
    named, patterns = schema.get("properties"), schema.get("patternProperties")
    if isinstance(named, Mapping) and name in named:
        return named[name]
    further = schema.get("additionalProperties")
    others = [each for each in [further] if isinstance(each, Mapping)]
    return any_of([*(patterns.values() if isinstance(patterns, Mapping) else ()), *others])


def any_of(schemas: Iterable[Any]) -> Any:
    known = [each for each in schemas if each is not None]
    return {"anyOf": known} if known else None


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def is_of(value: Any, kind: Any) -> bool:
    """Whether a value has a type of JSON schemas. Of a type that these do not have everything is but strings."""
    if isinstance(value, str) or value is SOME_STRING:
        return kind in TEXT_TYPES
    match kind:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
            return whole and not isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "array":
            return isinstance(value, list)
        case "object":
            return isinstance(value, dict)
    return kind not in TEXT_TYPES


def is_same(value: Any, other: Any) -> bool:
    """Whether two values are the same JSON: true is not 1, and 1.0 is."""
    if value is SOME_STRING:
        return isinstance(other, str)
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(is_same, value, other))
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(is_same(value[key], other[key]) for key in value)
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def read_json(text: str) -> tuple[str, Any] | None:
    """(The JSON that a text is, its value); Python's names of constants are read too. None: it is no JSON."""
    text = PYTHON_NAMES.get(text.strip(), text.strip())
    try:
        return text, json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return None


def refuse_constant(name: str) -> None:
    """NaN and Infinity are no JSON, whatever Python's parser thinks."""
    raise ValueError(name)


def json_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
