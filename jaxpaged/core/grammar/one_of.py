"""Rewrites `oneOf` as `anyOf`. A grammar takes any of several alternatives, so no output may fit two of them.

Alternatives of objects that do not exclude each other by themselves are changed until they do: each must have the
property that tells them apart, or lack one that the other requires. Alternatives are compared as the request has them:
a closed object has no further properties in the output, but another alternative may allow them. This module compiles
nothing.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from jaxpaged.core.grammar.closed_schema import texts, together
from jaxpaged.core.grammar.plain_schema import NOTES, TYPES, is_same, kind_of, require, without
from jaxpaged.sampling_params.json_schema import subschemas

MAX_DEPTH = 8
"""Of properties in properties, by which objects are told apart."""
MOST_STEPS = 20_000
"""Comparisons of two schemas, for one `oneOf`."""
BOUNDS = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "number": ("minimum", "maximum"),
    "integer": ("minimum", "maximum"),
}


def settle(root: dict[str, Any], closed: Collection[int]) -> set[int]:
    """Replace every `oneOf` that can be, in place. `closed`: the identities of the schemas that are to be closed; of
    these come back the ones that may be: not those in a `oneOf` that stays."""
    kept = set(closed)
    while True:
        parts = [part for part in subschemas(root) if isinstance(part.get("oneOf"), list)]
        settled = [told_apart(root, part, kept) for part in parts]
        unsure = [part for part, alternatives in zip(parts, settled) if alternatives is None]
        within = {id(each) for part in unsure for one in part["oneOf"] for each in subschemas(root, (), one)}
        if not within & kept:
            break
        kept -= within
    for part, alternatives in zip(parts, settled):
        if alternatives is not None:
            del part["oneOf"]
            require(part, {"anyOf": alternatives})
    return kept


def told_apart(root: dict[str, Any], part: dict[str, Any], closed: Collection[int]) -> list[Any] | None:
    """Alternatives of which no two fit the same value; None: that cannot be shown."""
    steps = iter(range(MOST_STEPS))
    views = [View(root, [part, each], closed, steps) for each in part["oneOf"]]
    if (tag := tag_of(views)) is not None:
        return [{"allOf": [each, {"type": "object", "required": [tag]}]} for each in part["oneOf"]]
    alternatives = []
    for number, view in enumerate(views):
        more: list[Any] = [{"type": "object"}] if view.means_objects else []
        for place, other in enumerate(views):
            kinds = view.common_kinds(other) if place != number else ()
            if not kinds:
                continue
            difference = view.difference(other) if kinds == {"object"} else None
            if difference is None and not (kinds == {"object"} and only_requires(part["oneOf"][place])):
                return None
            more.append(False if difference is None else difference)
        alternatives.append({"allOf": [part["oneOf"][number], *more]} if more else part["oneOf"][number])
    return alternatives


def tag_of(views: list["View"]) -> str | None:
    """A property that has listed texts in all alternatives, and others in each; None: there is none."""
    if not views or not all(view.kinds == {"object"} or view.means_objects for view in views):
        return None
    for name in views[0].named:
        listed = [view.property(name).values if name in view.named else None for view in views]
        values = [value for each in listed for value in each or ()]
        if all(listed) and all(isinstance(value, str) for value in values) and len(values) == len(set(values)):
            return name
    return None


def only_requires(schema: Any) -> bool:
    """Whether all that a schema does is to name properties that must be there."""
    return isinstance(schema, dict) and schema.keys() - NOTES == {"required"}


class View:
    """What schemas that apply together allow, as far as that is easily seen: perhaps less is allowed, never more."""

    def __init__(
        self,
        root: dict[str, Any],
        schemas: Iterable[Any],
        closed: Collection[int],
        steps: Iterator[int],
        depth: int = 0,
    ):
        self._root, self._closed, self._steps, self._depth = root, closed, steps, depth
        schemas = list(schemas)
        self.parts = [part for each in schemas for part in together(root, each)]
        self.required = {name for part in self.parts for name in texts(part.get("required"))}
        listed = [[part["const"]] if "const" in part else part.get("enum") for part in self.parts]
        self.values = min((each for each in listed if isinstance(each, list)), key=len, default=None)
        self.kinds = set() if any(each is False for each in schemas) else self._kinds()

    def _kinds(self) -> set[str]:
        """Of values: whole numbers are "integer", others "number"."""
        kinds = {*TYPES, "integer"}
        for part in self.parts:
            if "type" in part:
                named = {part["type"]} if isinstance(part["type"], str) else set(texts(part["type"]))
                kinds &= named | ({"integer"} if "number" in named else set())
        return kinds if self.values is None else kinds & set(map(fine_kind_of, self.values))

    @property
    def means_objects(self) -> bool:
        """Whether a schema that speaks of properties names no type: then nothing else than objects is written."""
        names_type = any({"type", "enum", "const"} & part.keys() for part in self.parts)
        return not names_type and any({"properties", "required"} & part.keys() for part in self.parts)

    def common_kinds(self, other: "View") -> set[str]:
        """The kinds of values that are written by this schema and may be allowed by the other one, too.

        Raises ValueError after many questions about the same `oneOf`.
        """
        if next(self._steps, None) is None:
            raise ValueError(
                "it has a oneOf with too many alternatives to tell them apart. Use anyOf, or require a property with "
                "another const in each"
            )
        common = ({"object"} if self.means_objects else self.kinds) & other.kinds
        if self.values is not None and other.values is not None:
            shared = [value for value in self.values if any(is_same(value, each) for each in other.values)]
            common &= set(map(fine_kind_of, shared))
        return {kind for kind in common if not self._differs(other, kind)}

    def difference(self, other: "View") -> dict[str, Any] | None:
        """What to ask of objects of this schema so that they do not fit the other one; None: nothing does it. It is the
        property that tells the two apart, or to leave out one that the other requires."""
        for name in self.named:
            if name in other.named and not self.property(name).common_kinds(other.property(name)):
                return {"required": [name]}
        unwanted = sorted(other.required - self.required)
        return without(unwanted[0]) if unwanted else None

    @property
    def named(self) -> list[str]:
        return [name for part in self.parts for name in part.get("properties", ())]

    def _differs(self, other: "View", kind: str) -> bool:
        if kind == "object":
            return self._objects_differ(other)
        if kind not in BOUNDS:
            return False
        least, most = BOUNDS[kind]
        return self._bound(least, max) > other._bound(most, min) or other._bound(least, max) > self._bound(most, min)

    def _bound(self, keyword: str, choose: Callable[..., float]) -> float:
        values = [part.get(keyword) for part in self.parts]
        numbers = [each for each in values if isinstance(each, int | float) and not isinstance(each, bool)]
        return choose(numbers, default=float("-inf") if choose is max else float("inf"))

    def _objects_differ(self, other: "View") -> bool:
        if self._forbids(other.required, self._closed) or other._forbids(self.required, ()):
            return True
        names = self.required | other.required if self._depth < MAX_DEPTH else ()
        return any(not self.property(name).common_kinds(other.property(name)) for name in names)

    def _forbids(self, names: Collection[str], closed: Collection[int]) -> bool:
        """Whether an object cannot have all these properties."""
        for part in self.parts:
            is_closed = part.get("additionalProperties") is False or id(part) in closed
            if is_closed and "patternProperties" not in part and not set(names) <= part.get("properties", {}).keys():
                return True
        return False

    def property(self, name: str) -> "View":
        schemas = [part["properties"][name] for part in self.parts if name in part.get("properties", ())]
        return View(self._root, schemas, self._closed, self._steps, self._depth + 1)


def fine_kind_of(value: Any) -> str:
    kind = kind_of(value)
    return "integer" if kind == "number" and float(value).is_integer() else kind
