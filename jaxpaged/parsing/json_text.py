"""JSON values and call objects inside a text: where they end, and what they say.

A value is copied as the model wrote it, without building it, so its size and its nesting cost nothing but their text.
Brackets are counted and strings are followed; whether all between them is valid JSON is for the caller's client to
see, as with OpenAI's own models.
"""

import json
import re
from collections.abc import Callable

from jaxpaged.parsing.output import Output
from jaxpaged.parsing.source import WHITESPACE, Markers, Sink, Source, Steps

NESTED = Markers('"', "{", "}", "[", "]")
IN_STRING = Markers('"', "\\")
SCALAR = re.compile(rf'[^,:"{{}}\[\]{WHITESPACE}]*')
DEPTH = {'"': 0, "{": 1, "[": 1, "}": -1, "]": -1}

ARGUMENT_KEYS = ("arguments", "parameters")
TOOL_NAME = re.compile(r"[\w.:/-]{1,256}")
"""What can be a tool's name where no quotes bound it; OpenAI takes 64 characters."""


def copy_value(source: Source, sink: Sink) -> Steps[bool]:
    """Give a JSON value to `sink`. False when there is none, or when the text ends inside it."""
    first = yield from source.peek()
    if first == '"':
        return (yield from copy_string(source, sink))
    if first and first in "{[":
        return (yield from copy_nested(source, sink))
    scalar = yield from source.run(SCALAR)
    sink(scalar)
    return bool(scalar)


def copy_nested(source: Source, sink: Sink) -> Steps[bool]:
    """An object or an array, up to the bracket that closes it."""
    depth = 0
    while found := (yield from source.until(NESTED, sink)):
        depth += DEPTH[found]
        sink(found)
        if found == '"' and not (yield from copy_rest_of_string(source, sink)):
            return False
        if not depth:
            return True
    return False


def copy_string(source: Source, sink: Sink) -> Steps[bool]:
    """A JSON string with its quotes."""
    sink((yield from source.take()))
    return (yield from copy_rest_of_string(source, sink))


def copy_rest_of_string(source: Source, sink: Sink) -> Steps[bool]:
    while found := (yield from source.until(IN_STRING, sink)):
        sink(found)
        if found == '"':
            return True
        sink((yield from source.take()))
    return False


def read_string(source: Source) -> Steps[str | None]:
    """What a JSON string says; None when there is none."""
    pieces: list[str] = []
    if not (yield from source.at('"')) or not (yield from copy_string(source, pieces.append)):
        return None
    return decoded("".join(pieces), str)


def decoded(text: str, kind: type) -> object | None:
    """The value of a JSON text, if it is of a kind; None otherwise."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, kind) else None


# ---- call objects: {"name": ..., "arguments": {...}}


class CallObject:
    """One call while its object is read. The keys may come in any order; those that we do not know are passed over.

    The call begins once its name and the beginning of its arguments are there. `accepts` says whether a name can be
    a tool's.
    """

    def __init__(self, source: Source, out: Output, accepts: Callable[[str], bool]):
        self.source, self.out, self.accepts = source, out, accepts
        self.name: str | None = None
        self.begun = False
        self._early: list[str] = []  # arguments that came before the name

    def read(self) -> Steps[bool]:
        """Read the object, beginning at its brace. False: it is none, or no call; nothing was put out."""
        source = self.source
        if not (yield from source.skip("{")):
            return False
        while True:
            if (yield from source.skip_after_space("}")):
                return True
            key = yield from read_string(source)
            if key is None or not (yield from source.skip_after_space(":")):
                return False
            yield from source.spaces()
            if not (yield from self._value(key)):
                return False
            if not (yield from source.skip_after_space(",")) and not (yield from source.at("}")):
                return False

    def _value(self, key: str) -> Steps[bool]:
        if key == "name" and self.name is None:
            name = yield from read_string(self.source)
            if not name or not self.accepts(name):
                return False
            self.name = name
            self._begin_with_early_arguments()
            return True
        if key in ARGUMENT_KEYS and not self.begun and not self._early:
            return (yield from self._arguments())
        return (yield from copy_value(self.source, lambda text: None))

    def _arguments(self) -> Steps[bool]:
        first = yield from self.source.peek()
        if first == "{" and self.name is not None:
            self._begin()
            return (yield from copy_value(self.source, self.out.arguments))
        pieces: list[str] = []
        whole = yield from copy_value(self.source, pieces.append)
        text = "".join(pieces)
        # Some models write the arguments as a string that holds JSON, and some null for none.
        inner = decoded(text, str) if first == '"' else None
        self._early = ["{}" if text == "null" else inner if inner is not None else text]
        self._begin_with_early_arguments()
        return whole

    def _begin_with_early_arguments(self) -> None:
        if self.name is not None and self._early:
            self._begin()
            for text in self._early:
                self.out.arguments(text)

    def _begin(self) -> None:
        self.begun = True
        self.source.kept()
        self.out.begin_call(self.name)


def read_call(
    source: Source, out: Output, *, needs_arguments: bool = False, accepts: Callable[[str], bool] = lambda name: True
) -> Steps[bool]:
    """Read one call object, while the source keeps what is read. False: it was no call, and is still kept."""
    call = CallObject(source, out, accepts)
    whole = yield from call.read()
    if not call.begun:
        if not whole or call.name is None or needs_arguments:
            return False
        source.kept()
        out.begin_call(call.name)
    if whole:
        out.end_call()
    return True
