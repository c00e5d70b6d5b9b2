"""Rewrites JSON schemas in keywords that llguidance knows, where these can say the same.

llguidance refuses the rest; `schema_problems.py` explains its refusals in our words. Unknown formats are notes to the
reader, as JSON schemas define them. This module compiles nothing.
"""

from collections.abc import Iterator
from typing import Any

from jaxpaged.core.grammar.closed_schema import FURTHER, is_never, same_object, texts, together
from jaxpaged.errors import shown
from jaxpaged.sampling_params.json_schema import subschemas, target

FORMATS = frozenset(
    {
        "date-time",
        "time",
        "date",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "uuid",
        "uri",
        "unknown",
    }
)
"""The formats that llguidance makes texts follow."""
TYPES = ("null", "boolean", "number", "string", "array", "object")
NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"})
EVERYTHING: tuple[Any, ...] = ({}, True)
NUMBER = ((int, float), "a number")
LIST = (list, "a list")
VALUES: dict[str, tuple[Any, str]] = {
    "type": ((str, list), "the name of a type, or a list of names"),
    "properties": (dict, "an object"),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "enum"), LIST),
    **dict.fromkeys(("minItems", "maxItems", "minContains", "maxContains", "minProperties", "maxProperties"), NUMBER),
}
"""Keyword -> the types of its value, and their name."""


def make_plain(root: dict[str, Any]) -> None:
    """Say in place with other keywords what llguidance has no words for, where that is possible.

    Raises ValueError for a keyword whose value is of a type that it cannot have.
    """
    for part in list(subschemas(root)):
        check_values(part)
        if isinstance(part.get("format"), str) and part["format"] not in FORMATS:
            del part["format"]
        if is_never(target(root, part.get("$ref"))):
            del part["$ref"]
            part["enum"] = []
        drop_idle(part)
        evaluate(root, part)
        if "not" in part and negate(part, part["not"]):
            del part["not"]
        count_contained(part)
        decide(part)
        for condition, consequence in list(dependents(part)):
            require(part, {"anyOf": [without(condition), consequence]})
        name_properties(root, part)
        loosen_counts(part)


def check_values(part: dict[str, Any]) -> None:
    """Raise ValueError for the value of a keyword that is read here."""
    for keyword, (kinds, what) in VALUES.items():
        if keyword in part and (not isinstance(part[keyword], kinds) or isinstance(part[keyword], bool)):
            raise ValueError(f"{keyword} is {shown(part[keyword])}; it must be {what}")
    kinds = part.get("type", "null")
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind not in (*TYPES, "integer"):
            raise ValueError(f"type is {shown(kind)}; the types of JSON are {', '.join(TYPES)} and integer")


def require(part: dict[str, Any], schema: Any) -> None:
    """Ask for one thing more."""
    part["allOf"] = [*part.get("allOf", ()), schema]


def without(name: str) -> dict[str, Any]:
    """Objects that do not have a property."""
    return {"properties": {name: False}}


def drop_idle(part: dict[str, Any]) -> None:
    """Drop keywords that change nothing."""
    kinds = kinds_of(part)
    items = part.get("maxItems")
    if "array" not in kinds or part.get("uniqueItems") is False or (isinstance(items, int) and items <= 1):
        part.pop("uniqueItems", None)
    if "array" not in kinds or "contains" not in part:
        for keyword in ("contains", "minContains", "maxContains"):
            part.pop(keyword, None)
    if "if" not in part or not {"then", "else"} & part.keys():
        for keyword in ("if", "then", "else"):
            part.pop(keyword, None)
    if "object" not in kinds:
        for keyword in ("propertyNames", "dependentRequired", "dependentSchemas", "dependencies"):
            part.pop(keyword, None)


def kinds_of(part: dict[str, Any]) -> set[str]:
    kinds = part.get("type", TYPES)
    return {"number" if kind == "integer" else kind for kind in ([kinds] if isinstance(kinds, str) else kinds)}


# ---- negations


def negate(part: dict[str, Any], refused: Any) -> bool:
    """Forbid in other words what `refused` allows. False: there are none."""
    if refused in EVERYTHING:
        part["enum"] = []
        return True
    if is_never(refused):
        return True
    if not isinstance(refused, dict):
        return False
    match sorted(refused.keys() - NOTES):
        case ["type"]:
            return forbid_types(part, refused["type"])
        case ["const"]:
            return forbid_values(part, [refused["const"]])
        case ["enum"] if isinstance(refused["enum"], list):
            return forbid_values(part, refused["enum"])
        case ["required"] if texts(refused["required"]) == refused["required"]:
            alternatives = [without(name) for name in refused["required"]]
            require(part, {"type": "object", "anyOf": alternatives})
            return True
        case ["not"]:
            require(part, refused["not"])
            return True
        case ["anyOf"] if isinstance(refused["anyOf"], list):
            copy = dict(part)
            if all(negate(copy, each) for each in refused["anyOf"]):
                part.update(copy)
                return True
    return False


def forbid_types(part: dict[str, Any], kinds: Any) -> bool:
    refused = {kinds} if isinstance(kinds, str) else set(texts(kinds))
    given = part.get("type", TYPES)
    given = [given] if isinstance(given, str) else list(given)
    if "integer" in refused and "number" in given and "number" not in refused:
        return False
    kept = [kind for kind in given if kind not in refused and not (kind == "integer" and "number" in refused)]
    part["type"] = kept
    if not kept:
        part["enum"] = []
    return True


def forbid_values(part: dict[str, Any], values: list[Any]) -> bool:
    """Possible where the values are listed, or are of other types."""
    listed = [part["const"]] if "const" in part else part.get("enum")
    if listed is None and kinds_of(part) <= {"null", "boolean"}:
        named = [part["type"]] if isinstance(part["type"], str) else part["type"]
        listed = [value for kind in named for value in ((None,) if kind == "null" else (False, True))]
    if isinstance(listed, list):
        part["enum"] = [value for value in listed if not any(is_same(value, each) for each in values)]
        part.pop("const", None)
        return True
    return kinds_of(part).isdisjoint(map(kind_of, values))


def is_same(value: Any, other: Any) -> bool:
    """Whether two values are equal as JSON; lists and objects only where they are so to the letter."""
    return kind_of(value) == kind_of(other) and value == other


def kind_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object" if isinstance(value, dict) else "number"


# ---- the rest


def count_contained(part: dict[str, Any]) -> None:
    """Items of any kind that must be there are a number of items; none that need be are no matter."""
    least, most = part.get("minContains", 1), part.get("maxContains")
    if "contains" not in part or (part["contains"] not in EVERYTHING and (least != 0 or most is not None)):
        return
    if part["contains"] in EVERYTHING:
        part["minItems"] = max(part.get("minItems", 0), least)
        if most is not None:
            part["maxItems"] = min(part.get("maxItems", most), most)
    for keyword in ("contains", "minContains", "maxContains"):
        part.pop(keyword, None)


def decide(part: dict[str, Any]) -> None:
    """A condition that is known beforehand."""
    if part.get("if") in EVERYTHING or ("if" in part and is_never(part["if"])):
        holds = part.pop("if") in EVERYTHING
        chosen, other = part.pop("then", True), part.pop("else", True)
        require(part, chosen if holds else other)


def dependents(part: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What must hold where a property is there: (its name, a schema). The keywords are taken out."""
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        value = part.pop(keyword, None)
        for name, each in value.items() if isinstance(value, dict) else ():
            yield name, {"required": [name, *texts(each)]} if isinstance(each, list) else {"allOf": [each]}


def name_properties(root: dict[str, Any], part: dict[str, Any]) -> None:
    """`propertyNames`, where no property is named."""
    names = part.get("propertyNames")
    if isinstance(names, dict) and names.keys() - NOTES == {"$ref"}:
        names = target(root, names["$ref"])
    if names in EVERYTHING or names == {"type": "string"}:
        part.pop("propertyNames", None)
    if not isinstance(names, dict) or {"properties", "patternProperties"} & part.keys():
        return
    further = part.get("additionalProperties", True)
    match sorted(names.keys() - NOTES - {"type"}):
        case ["enum"] if texts(names["enum"]) == names["enum"]:
            part["properties"] = dict.fromkeys(names["enum"], further)
        case ["const"] if isinstance(names["const"], str):
            part["properties"] = {names["const"]: further}
        case ["pattern"] if isinstance(names["pattern"], str):
            part["patternProperties"] = {names["pattern"]: further}
        case _:
            return
    del part["propertyNames"]
    part["additionalProperties"] = False


def evaluate(root: dict[str, Any], part: dict[str, Any]) -> None:
    """`unevaluated...`, where it is plain which schemas have their say."""
    for keyword, plain in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if keyword not in part:
            continue
        if part[keyword] in EVERYTHING or plain in part:
            del part[keyword]
        elif not any(each in part for each in FURTHER):
            part[plain] = part.pop(keyword)
        elif keyword == "unevaluatedProperties" and (names := plain_names(root, part)) is not None:
            part["properties"] = {**part.get("properties", {}), **names}
            part[plain] = part.pop(keyword)


def plain_names(root: dict[str, Any], part: dict[str, Any]) -> dict[str, Any] | None:
    """The properties that schemas name which all apply to the same object; None: some may not, or name others."""
    always, all_of_them = together(root, part), same_object(root, part)
    names = dict.fromkeys(name for each in always for name in each.get("properties", ()))
    further = {name for each in all_of_them for name in each.get("properties", ())} - names.keys()
    if further or any({"patternProperties", "additionalProperties"} & each.keys() for each in all_of_them):
        return None
    return {name: part.get("properties", {}).get(name, True) for name in names}


def loosen_counts(part: dict[str, Any]) -> None:
    """Drop limits to the number of properties that hold anyway."""
    named = part.get("properties")
    if isinstance(named, dict) and part.get("additionalProperties") is False and "patternProperties" not in part:
        if part.get("maxProperties", -1) >= len(named):
            del part["maxProperties"]
        if part.get("minProperties", float("inf")) <= len(set(texts(part.get("required")))):
            del part["minProperties"]
