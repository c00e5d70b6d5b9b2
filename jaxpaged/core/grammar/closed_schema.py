"""Closes JSON schemas: their objects have only the properties that they name, as vLLM's default backend reads them.

By itself a schema lets every object have further properties with any name and content, and a model that must write JSON
can add such properties until it runs out of tokens. `"additionalProperties": true` says that they are wanted. An object
stays open where closing it could forbid what the schema asks for. This module knows schemas only: no grammar, no
request.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxpaged.sampling_params.json_schema import subschemas, target

NAMING = ("properties", "patternProperties")
SAYS_IT = ("additionalProperties", "unevaluatedProperties")
ALTERNATIVES = ("anyOf", "oneOf")
FURTHER = ("allOf", "if", "then", "else", "$ref", "dependentSchemas", "dependencies", *ALTERNATIVES)
"""Keywords with schemas for the very object that the schema around them is for."""
MOST_LOOKED_AT = 50_000
"""Schemas, each as often as another one stands beside it."""
CONDITIONS = ("not", "if", "contains", "propertyNames")
"""Keywords whose schemas allow nothing: one that is closed would let more pass, or mean another condition."""


def close_objects(schema: dict[str, Any], *, unnamed: bool = False) -> None:
    """Forbid further properties in place, where the schema does not say anything of them.

    Objects that name no property stay free, unless `unnamed`. So do objects that several schemas describe together
    (`allOf`, or `properties` beside a `$ref`), for what one of them names is a further property to the other, and those
    of which something is asked beyond the properties that they name.
    """
    for part in closable(schema, unnamed=unnamed):
        part["additionalProperties"] = False


def closable(root: dict[str, Any], *, unnamed: bool = False) -> list[dict[str, Any]]:
    """The schemas that can be closed: everything that was allowed before, but for further properties, still is."""
    parts = list(subschemas(root, CONDITIONS))
    if not all(is_understood(root, part) for part in subschemas(root)):
        return []
    kept = open_schemas(root, parts, unnamed)
    return [part for part in parts if id(part) not in kept and wants_closing(part, unnamed)]


def is_understood(root: dict[str, Any], part: dict[str, Any]) -> bool:
    """Whether it is known which schemas apply where this one does."""
    if "$dynamicRef" in part or "$recursiveRef" in part or (part is not root and isinstance(part.get("$id"), str)):
        return False
    return "$ref" not in part or isinstance(target(root, part["$ref"]), dict | bool)


def wants_closing(part: dict[str, Any], unnamed: bool) -> bool:
    if any(keyword in part for keyword in SAYS_IT):
        return False
    if any(keyword in part for keyword in NAMING):
        return demand_of(part).is_met_by(part)
    is_free = part.get("type") == "object" and not any(keyword in part for keyword in FURTHER)
    return unnamed and is_free and demand_of(part).is_met_by(part)


def open_schemas(root: dict[str, Any], parts: Iterable[dict[str, Any]], unnamed: bool) -> set[int]:
    """The identities of schemas that must stay open for what another one says of the same object.

    Raises ValueError where finding them takes too long.
    """
    kept: set[int] = set()
    looked_at = 0
    for part in parts:
        groups = describers(root, part)
        if len(groups) < 2:
            continue
        found = [[each for member in group for each in same_object(root, member)] for group in groups]
        found = [[part], *found[1:]] if groups[0] == [part] else found
        looked_at += sum(map(len, found))
        if looked_at > MOST_LOOKED_AT:
            raise ValueError("too many of its schemas describe the same objects. Make it simpler")
        naming = [group for group in found if any(names_any(each, unnamed) for each in group)]
        if len(naming) > 1:
            kept |= {id(each) for group in naming for each in group}
        for group in naming:
            demand = Demand.of_all(demand_of(each) for other in found if other is not group for each in other)
            kept |= {id(each) for each in group if not demand.is_met_by(each)}
    return kept


def names_any(schema: dict[str, Any], unnamed: bool) -> bool:
    """Whether a schema names properties, or would be closed without naming one."""
    return any(keyword in schema for keyword in (*NAMING, *SAYS_IT)) or (unnamed and schema.get("type") == "object")


def describers(root: dict[str, Any], part: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Groups of schemas that say something of what `part` is for, itself first if it does. Those of a group are
    alternatives of each other."""
    says = any(keyword in part for keyword in (*NAMING, *SAYS_IT)) or demand_of(part) != Demand()
    groups = [[part]] if says else []
    for keyword in FURTHER:
        inner = [each for each in applied(root, part, keyword) if isinstance(each, dict)]
        groups += [inner] if keyword in ALTERNATIVES else [[each] for each in inner]
    return [group for group in groups if group]


def same_object(root: dict[str, Any], schema: Any, keywords: Collection[str] = FURTHER) -> list[dict[str, Any]]:
    """A schema and those that it applies to the same object, by these keywords."""
    found, pending, seen = [], [schema], set()
    while pending:
        part = pending.pop()
        if isinstance(part, dict) and id(part) not in seen:
            seen.add(id(part))
            found.append(part)
            pending += [each for keyword in keywords for each in applied(root, part, keyword)]
    return found


def together(root: dict[str, Any], schema: Any) -> list[dict[str, Any]]:
    """A schema and those that apply wherever it does."""
    return same_object(root, schema, ("allOf", "$ref"))


def applied(root: dict[str, Any], part: dict[str, Any], keyword: str) -> Iterator[Any]:
    """The schemas that a keyword applies to the same object."""
    value = part.get(keyword)
    if keyword == "$ref":
        yield target(root, value)
    elif isinstance(value, dict) and keyword in ("dependentSchemas", "dependencies"):
        yield from value.values()
    else:
        yield from value if isinstance(value, list) else (value,)


@dataclass(frozen=True)
class Demand:
    """What is asked of an object: properties of these names, or at least so many."""

    names: frozenset[str] = frozenset()
    count: int = 0

    @classmethod
    def of_all(cls, demands: Iterable["Demand"]) -> "Demand":
        each = list(demands)
        return cls(frozenset().union(*(one.names for one in each)), max((one.count for one in each), default=0))

    def is_met_by(self, schema: dict[str, Any]) -> bool:
        """Whether an object with no other properties than the schema names can do it."""
        named = schema.get("properties")
        named = named if isinstance(named, dict) else {}
        possible = sum(not is_never(each) for each in named.values())
        return self.names <= named.keys() and (self.count <= possible or "patternProperties" in schema)


def demand_of(schema: dict[str, Any]) -> Demand:
    """What one schema by itself asks of an object."""
    names = set(texts(schema.get("required")))
    for keyword in ("dependentRequired", "dependencies"):
        value = schema.get(keyword)
        names.update(name for each in (value.values() if isinstance(value, dict) else ()) for name in texts(each))
    listed = schema.get("enum")
    values = [*(listed if isinstance(listed, list) else ()), schema.get("const")]
    names.update(name for value in values if isinstance(value, dict) for name in value)
    count = schema.get("minProperties")
    return Demand(frozenset(names), int(count) if isinstance(count, int | float) else 0)


def texts(value: Any) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def is_never(schema: Any) -> bool:
    """Whether a schema plainly allows nothing."""
    if not isinstance(schema, dict):
        return schema is False
    return schema.get("not") in ({}, True) or schema.get("enum") == []
