"""Values that are nearly JSON, with keys in no quotes or strings in foreign ones, turned into JSON while they are read.

Nothing is evaluated: a value is what its first character says, nesting is limited, and what does not fit is refused.
This module knows no format; it is told how strings and words are written.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxpaged.parsing.source import WHITESPACE, Markers, Sink, Source, Steps

MAX_DEPTH = 64
BARE = re.compile(rf"[^,:={{}}()\[\]{WHITESPACE}\"']*")
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|\n|.)", re.DOTALL)
PLAIN_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\n": ""}

Quotes = Mapping[str, Callable[[str], str] | None]
"""Quote -> what turns the text between two of them into the string meant; None: it is the text, without escapes."""


@dataclass
class LooseValues:
    """Reads from `source` and gives JSON to `sink`. All methods answer False for what is no value.

    `words`: bare words that are values, with their JSON. `any_word`: others are strings; else they are refused.
    """

    source: Source
    sink: Sink
    quotes: Quotes
    words: Mapping[str, str]
    any_word: bool

    def value(self, depth: int = 0) -> Steps[bool]:
        first = yield from self.source.peek()
        if first and first in "{[(":
            return depth < MAX_DEPTH and (yield from self._nested(depth + 1))
        for quote in self.quotes:
            if (yield from self.source.skip(quote)):
                return (yield from self._string(quote))
        return self._put_bare((yield from self.source.run(BARE)))

    def members(self, close: str, colon: str, depth: int = 0) -> Steps[bool]:
        """`key colon value, ...` up to and with `close`; becomes an object."""
        source, separator = self.source, "{"
        while True:
            if (yield from source.skip_after_space(close)):
                self.sink("{}" if separator == "{" else "}")
                return True
            self.sink(separator)
            separator = ", "
            if not (yield from self._key()) or not (yield from source.skip_after_space(colon)):
                return False
            self.sink(": ")
            yield from source.spaces()
            if not (yield from self.value(depth)):
                return False
            if not (yield from source.skip_after_space(",")) and not (yield from source.at(close)):
                return False

    def _nested(self, depth: int) -> Steps[bool]:
        bracket = yield from self.source.take()
        if bracket == "{":
            return (yield from self.members("}", ":", depth))
        close, separator = "]" if bracket == "[" else ")", ""
        self.sink("[")
        while not (yield from self.source.skip_after_space(close)):
            self.sink(separator)
            separator = ", "
            if not (yield from self.value(depth)):
                return False
            if not (yield from self.source.skip_after_space(",")) and not (yield from self.source.at(close)):
                return False
        self.sink("]")
        return True

    def _key(self) -> Steps[bool]:
        for quote in self.quotes:
            if (yield from self.source.skip(quote)):
                return (yield from self._string(quote))
        key = yield from self.source.run(BARE)
        self.sink(json.dumps(key, ensure_ascii=False))
        return bool(key)

    def _string(self, quote: str) -> Steps[bool]:
        """A string whose first quote was read. Without escapes it is passed on as it comes."""
        unescape = self.quotes[quote]
        self.sink('"')
        if unescape is None:
            found = yield from self.source.until(Markers(quote), lambda text: self.sink(json_inside(text)))
        else:
            pieces: list[str] = []
            ends = Markers(quote, "\\")
            while (found := (yield from self.source.until(ends, pieces.append))) == "\\":
                pieces.append("\\" + (yield from self.source.take()))
            if found:
                self.sink(json_inside(unescape("".join(pieces))))
        if found:
            self.sink('"')
        return found is not None

    def _put_bare(self, text: str) -> bool:
        known = self.words.get(text) or json_number(text) or (json.dumps(text, ensure_ascii=False) if text else None)
        if known is None or (known[0] == '"' and not self.any_word):
            return False
        self.sink(known)
        return True


def json_inside(text: str) -> str:
    """A text as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def json_number(text: str) -> str | None:
    """The JSON of a number as Python or JSON write it; None when it is no number."""
    if NUMBER.fullmatch(text):
        return text
    if not text or len(text) > 64 or not (text[0] in "+-." or text[0].isdecimal()):
        return None
    for read in (lambda: int(text, 0), lambda: float(text)):
        try:
            number = read()
        except ValueError:
            continue
        return str(number) if math.isfinite(number) else None
    return None


def unescape_json(text: str) -> str:
    """The string that JSON escapes stand for; text that is no JSON string stays as it is."""
    try:
        return json.loads(f'"{text}"', strict=False)
    except ValueError:
        return text


def unescape_python(text: str) -> str:
    """The string that Python's escapes stand for. Unknown ones stay, as in Python."""

    def meaning(match: re.Match[str]) -> str:
        body = match[0][1:]
        if body in PLAIN_ESCAPES or body in "\\'\"":
            return PLAIN_ESCAPES.get(body, body)
        if body[0] in "xuU" and len(body) > 1:
            code = int(body[1:], 16)
            return chr(code) if code <= 0x10FFFF else match[0]
        return chr(int(body, 8)) if body[0] in "01234567" else match[0]

    return ESCAPE.sub(meaning, text)
