"""What a structural tag may say: text in which some parts are free and others have a shape. Names are vLLM's.

    {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<call"], "tags": [...]}}

is the form of today, {"structures": [{"begin", "schema", "end"}], "triggers": [...]} that of before. Both become a tree
of the classes here. This module knows no grammar.
"""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec

Text = Annotated[str, msgspec.Meta(min_length=1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=10_000)]


class Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """One kind of format; its name is in the field "type"."""


class ConstString(Node, frozen=True, tag="const_string"):
    """This text."""

    value: Text


class JsonSchema(Node, frozen=True, tag="json_schema"):
    """JSON that a schema allows."""

    json_schema: dict[str, Any] | bool
    style: Literal["json"] = "json"


class Regex(Node, frozen=True, tag="regex"):
    """What a regular expression matches."""

    pattern: Text


class Grammar(Node, frozen=True, tag="grammar"):
    """What a context-free grammar allows."""

    grammar: Text


class AnyText(Node, frozen=True, tag="any_text"):
    """Free text, up to the end of the tag that it stands in, or of the answer."""


class Sequence(Node, frozen=True, tag="sequence"):
    """One after the other."""

    elements: Annotated[list["Format"], msgspec.Meta(min_length=1)]


class Or(Node, frozen=True, tag="or"):
    """One of several. Which it is must show at once: where a fixed text and JSON begin alike, the fixed text counts."""

    elements: Annotated[list["Format"], msgspec.Meta(min_length=1)]


class Optional(Node, frozen=True, tag="optional"):
    """Once or not at all."""

    content: "Format"


class Plus(Node, frozen=True, tag="plus"):
    """Once or several times."""

    content: "Format"


class Star(Node, frozen=True, tag="star"):
    """Any number of times."""

    content: "Format"


class Repeat(Node, frozen=True, tag="repeat"):
    """At least `min` times, and at most `max` times unless that is -1."""

    min: Count
    max: Annotated[int, msgspec.Meta(ge=-1, le=10_000)]
    content: "Format"


class Tag(Node, frozen=True, tag="tag"):
    """Something between two texts. With several ends one of them closes the tag, with an empty one nothing does."""

    begin: Text
    content: "Format"
    end: str | Annotated[list[Text], msgspec.Meta(min_length=1)]

    @property
    def ends(self) -> tuple[str, ...]:
        """The texts that close it; none: it is over where its content is."""
        return tuple(self.end) if isinstance(self.end, list) else (self.end,) if self.end else ()


class TriggeredTags(Node, frozen=True, tag="triggered_tags"):
    """Free text with tags in it. Whoever writes a trigger must go on with a tag that begins with it.

    at_least_one: a tag comes first. stop_after_first: nothing comes after a tag.
    """

    triggers: Annotated[list[Text], msgspec.Meta(min_length=1)]
    tags: Annotated[list[Tag], msgspec.Meta(min_length=1)]
    at_least_one: bool = False
    stop_after_first: bool = False


class TagsWithSeparator(Node, frozen=True, tag="tags_with_separator"):
    """Nothing but tags, with the same text between each two."""

    tags: Annotated[list[Tag], msgspec.Meta(min_length=1)]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Format = (
    ConstString
    | JsonSchema
    | Regex
    | Grammar
    | AnyText
    | Sequence
    | Or
    | Optional
    | Plus
    | Star
    | Repeat
    | Tag
    | TriggeredTags
    | TagsWithSeparator
)


class StructuralTag(msgspec.Struct, forbid_unknown_fields=True):
    """The form of today."""

    type: Literal["structural_tag"]
    format: Format


class Structure(msgspec.Struct, forbid_unknown_fields=True):
    """A tag of the form of before. A schema may be given as its text."""

    begin: Text
    end: str
    schema: dict[str, Any] | str = {}

    def as_tag(self) -> Tag:
        schema = json.loads(self.schema) if isinstance(self.schema, str) else self.schema
        if not isinstance(schema, dict | bool):
            raise ValueError(f"schema is {schema!r}; a JSON schema is a JSON object")
        return Tag(self.begin, JsonSchema(schema), self.end)


class Structures(msgspec.Struct, forbid_unknown_fields=True):
    """The form of before."""

    type: Literal["structural_tag"]
    structures: Annotated[list[Structure], msgspec.Meta(min_length=1)]
    triggers: Annotated[list[Text], msgspec.Meta(min_length=1)]


for form in (StructuralTag, Structures):
    msgspec.json.Decoder(form)  # msgspec knows them from here on: threads must not make it learn a type at once


def read_structural_tag(value: dict[str, Any]) -> Format:
    """The format that an object of either form describes. Raises ValueError, saying where, when it describes none."""
    if "structures" in value:
        old = msgspec.convert(value, Structures)
        tag: Format = TriggeredTags(old.triggers, [each.as_tag() for each in old.structures])
    else:
        tag = msgspec.convert(value, StructuralTag).format
    check_format(tag)
    return tag


def check_format(tag: Format) -> None:
    """Raise ValueError for free text that nothing ends, and for tags that are not triggered."""
    match tag:
        case TriggeredTags(triggers, tags):
            for each in tags:
                if sum(map(each.begin.startswith, triggers)) != 1:
                    raise ValueError(f"exactly one of triggers must begin the tag {each.begin!r}")
                check_closed(each)
        case TagsWithSeparator(tags):
            for each in tags:
                check_closed(each)
        case Sequence(elements):
            for element in elements[:-1]:
                check_closed(element)
        case Optional(content) | Plus(content) | Star(content) | Repeat(content=content):
            check_closed(content)
        case Tag(end=end) if isinstance(end, list) and len(set(end)) < len(end):
            raise ValueError(f"end is {end!r}, where a text comes twice")
    if isinstance(tag, Repeat) and 0 <= tag.max < max(tag.min, 1):
        raise ValueError(f"max is {tag.max}; it must be at least 1, and at least min, which is {tag.min}")
    for child in children(tag):
        check_format(child)


def check_closed(tag: Format) -> None:
    if is_open(tag):
        kind = type(tag).__struct_config__.tag
        raise ValueError(f"{kind} holds free text, after which something follows: put it in a tag that has an end")


def children(tag: Format) -> Iterator[Format]:
    """The formats that a format is made of."""
    match tag:
        case Sequence(elements) | Or(elements):
            yield from elements
        case TriggeredTags(tags=tags) | TagsWithSeparator(tags):
            yield from tags
        case Optional(content) | Plus(content) | Star(content) | Repeat(content=content) | Tag(content=content):
            yield content


def is_open(tag: Format) -> bool:
    """Whether a format goes on until something outside of it ends it."""
    match tag:
        case AnyText():
            return True
        case TriggeredTags():
            return not (tag.at_least_one and tag.stop_after_first)
        case Sequence(elements):
            return is_open(elements[-1])
        case Or(elements):
            return any(map(is_open, elements))
        case Tag(content=content):
            return not tag.ends and is_open(content)
    return False
