"""What shape an answer must have: `StructuredOutputsParams`, one field of `SamplingParams`. Names are vLLM's.

Here is only what the words alone can show to be wrong; whether a grammar can be compiled is found out elsewhere.
This module knows no grammar library.
"""

import json
from typing import Any

import msgspec

from jaxpaged.errors import RequestError, SuggestsNames, did_you_mean, shown
from jaxpaged.sampling_params.structural_tags import read_structural_tag

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
MAX_DEPTH = 64
"""Nesting of a JSON schema."""
MAX_TAG_DEPTH = MAX_DEPTH + 16
"""Nesting of a structural tag, the schemas in it included."""
MAX_BYTES = 2**18
"""Of a schema, a regular expression, a grammar, or all choices together."""
MAX_CHOICES = 4096


class Thinking(msgspec.Struct, array_like=True, frozen=True):
    """Free text that comes before an answer, up to the marker `end`.

    `is_open`: the model thinks already when it begins to answer. If not, it may begin with the marker `start`, or not
    think at all.
    """

    start: str
    end: str
    is_open: bool


class StructuredOutputsParams(
    msgspec.Struct, metaclass=SuggestsNames, array_like=True, kw_only=True, frozen=True, repr_omit_defaults=True
):
    """Exactly one of the first six. Raises RequestError, with `parameter` naming the field, for what cannot be.

    json: a JSON schema, as a dict or as its text; the answer is JSON that it allows. As in vLLM, an object that names
        properties has no others, unless `"additionalProperties"` says so.
    regex: the whole answer matches it (Rust's syntax: no look-around, no back references).
    choice: the answer is one of these texts.
    grammar: a context-free grammar, in Lark's or GBNF's notation; its first rule is "start" or "root".
    json_object: True: the answer is some JSON object.
    structural_tag: free text in which some parts have a shape, as a dict or as its text; see `structural_tags`.
    disable_any_whitespace: JSON without white space between its parts.
    disable_additional_properties: objects that name no property have none either, where the schema does not say.
    whitespace_pattern: a regular expression for the white space between the parts of JSON.
    thinking: what may come before the answer, for those who know how the model writes it; no field of requests.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    thinking: Thinking | None = None

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "StructuredOutputsParams":
        """Build from names and values, such as a JSON object. Unknown names raise RequestError."""
        public = [name for name in cls.__struct_fields__ if name != "thinking"]
        for name in values:
            if name not in public:
                near = did_you_mean(str(name), public)
                raise refusal(f"has the unknown field {name!r}.{near or ' Leave it out.'}")
        return cls(**values)

    @property
    def kind(self) -> str:
        """Which of the six it is."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise refusal(f"gives {' and '.join(given) or 'nothing'}; give exactly one of {', '.join(KINDS)}.")
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise refusal(f"{name} is {shown(getattr(self, name))}; it must be true or false.")
        if self.json_object not in (None, True):
            raise refusal(f"json_object is {shown(self.json_object)}; it must be true, or be left out.")
        for name in ("regex", "grammar", "whitespace_pattern"):
            check_text(name, getattr(self, name))
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise refusal("gives whitespace_pattern and disable_any_whitespace; leave one of them out.")
        if self.json is not None:
            check_schema(self.json)
        if self.structural_tag is not None:
            check_structural_tag(self.structural_tag)
        if self.choice is not None:
            check_choice(self.choice)


def refusal(what: str) -> RequestError:
    return RequestError(f"structured_outputs {what}", "structured_outputs")


def check_text(name: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, str) or not value:
        raise refusal(f"{name} is {shown(value)}; it must be a text, and not empty.")
    check_size(name, value)


def check_size(name: str, text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise refusal(f"{name} is not valid Unicode: it holds half of a surrogate pair.") from error
    if size > MAX_BYTES:
        raise refusal(f"{name} has {size} bytes; at most {MAX_BYTES} are possible.")


def check_choice(value: Any) -> None:
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) and text for text in value):
        raise refusal(f"choice is {shown(value)}; it must be a list of texts, none of them empty.")
    if not 1 <= len(value) <= MAX_CHOICES:
        raise refusal(f"choice has {len(value)} texts; 1 to {MAX_CHOICES} are possible.")
    check_size("choice", "".join(value))


def check_schema(value: Any) -> None:
    checked_object("json", "a JSON schema", value, MAX_DEPTH)


def check_structural_tag(value: Any) -> None:
    tag = checked_object("structural_tag", "a structural tag", value, MAX_TAG_DEPTH)
    try:
        read_structural_tag(tag)
    except ValueError as error:
        raise refusal(f"structural_tag is no structural tag: {error}.") from error


def checked_object(name: str, what: str, value: Any, max_depth: int) -> dict[str, Any]:
    """A copy of a JSON object, or of one given as its text: of limited size and nesting."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)
        check_size(name, text)
        found = json.loads(text)
        if "\\u" in text:  # as an escape, half of a surrogate pair is ASCII
            check_size(name, json.dumps(found, ensure_ascii=False))
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, RequestError):
            raise
        raise refusal(f"{name} is not {what}: {error}.") from error
    if not isinstance(found, dict):
        raise refusal(f"{name} is {text[:40]!r}; {what} is a JSON object.")
    if (depth := depth_of(found)) > max_depth:
        raise refusal(f"{name} is nested {depth} deep; at most {max_depth} are possible.")
    return found


def depth_of(value: Any) -> int:
    """How deep objects and lists lie in each other."""
    deepest, pending = 0, [(value, 1)]
    while pending:
        item, depth = pending.pop()
        if isinstance(item, dict | list):
            deepest = max(deepest, depth)
            inner = item.values() if isinstance(item, dict) else item
            pending += [(child, depth + 1) for child in inner]
    return deepest
