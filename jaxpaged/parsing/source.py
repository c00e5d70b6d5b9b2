"""Text that comes in pieces, read by generators that yield whenever they need more of it.

A format is then written as if the whole text were there (`found = yield from source.until(...)`), and the result
cannot depend on where the text was cut: every decision waits until the text itself has settled it. What is held back
is never longer than a marker, so reading takes time linear in the text. This module knows no format.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A generator that yields when it needs more text, and returns a T."""
Sink = Callable[[str], object]

WHITESPACE = " \t\r\n"
SPACES = re.compile(f"[{WHITESPACE}]*")


class Markers:
    """Texts to look for. None may contain another: which one comes first would depend on what has arrived."""

    def __init__(self, *markers: str):
        for marker in markers:
            inside = [other for other in markers if other != marker and other in marker]
            assert marker and not inside, f"marker {marker!r} is empty, or contains {inside}"
        self.markers = markers
        self.first_characters = {marker[0] for marker in markers}
        self.longest = max(map(len, markers), default=0)
        self.pattern = re.compile("|".join(map(re.escape, markers))) if markers else re.compile(r"(?!)")

    def num_held(self, text: str, start: int) -> int:
        """Characters at the end of `text[start:]` that may be the beginning of a marker."""
        for at in range(max(start, len(text) - self.longest + 1), len(text)):
            if text[at] in self.first_characters and any(marker.startswith(text[at:]) for marker in self.markers):
                return len(text) - at
        return 0


NO_MARKERS = Markers()


class Source:
    """The text so far. What was read since `keep` can be had again with `kept`, for when it turns out to be no call."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._kept: list[str] | None = None
        self.closed = False

    def feed(self, text: str) -> None:
        assert not self.closed, "text came after the end"
        self._text, self._at = self._text[self._at :] + text, 0

    def close(self) -> None:
        """No more text will come."""
        self.closed = True

    # ---- what was read

    def keep(self, before: str = "") -> None:
        """Remember what is read from now on, after the text `before`."""
        self._kept = [before]

    def kept(self) -> str:
        """What was read since `keep`, which ends here."""
        text, self._kept = "".join(self._kept or ()), None
        return text

    def unread(self, text: str) -> None:
        """Put back what was read last. It must not have been kept."""
        self._at -= len(text)
        assert self._kept is None and self._text.startswith(text, self._at), f"{text!r} was not read last"

    def _read(self, end: int) -> str:
        text, self._at = self._text[self._at : end], end
        if self._kept is not None:
            self._kept.append(text)
        return text

    # ---- reading

    def peek(self) -> Steps[str]:
        """The next character, "" at the end; it is not read."""
        while self._at == len(self._text) and not self.closed:
            yield
        return self._text[self._at : self._at + 1]

    def take(self) -> Steps[str]:
        """The next character, "" at the end."""
        yield from self.peek()
        return self._read(min(self._at + 1, len(self._text)))

    def at(self, marker: str) -> Steps[bool]:
        """Whether a marker comes next. It waits only while what is there is the beginning of one."""
        while True:
            here = self._text[self._at : self._at + len(marker)]
            if here == marker:
                return True
            if self.closed or not marker.startswith(here):
                return False
            yield

    def skip(self, marker: str) -> Steps[bool]:
        """Read a marker, if it comes next."""
        found = yield from self.at(marker)
        if found:
            self._read(self._at + len(marker))
        return found

    def skip_after_space(self, marker: str) -> Steps[bool]:
        """Read white space and a marker; the white space is read even if the marker does not follow."""
        yield from self.spaces()
        return (yield from self.skip(marker))

    def spaces(self) -> Steps[str]:
        """Read white space."""
        return (yield from self.run(SPACES))

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read as much as matches; the pattern must be `[...]*`, a repetition of one class of characters."""
        pieces = []
        while True:
            pieces.append(self._read(pattern.match(self._text, self._at).end()))
            if self._at < len(self._text) or self.closed:
                return "".join(pieces)
            yield

    def until(self, markers: Markers, sink: Sink, *, is_whole: bool = True) -> Steps[str | None]:
        """Read up to a marker and the marker too; what comes before it goes to `sink`. None: the text ended.

        A text that ends with the beginning of a marker was text if it `is_whole`; otherwise that beginning is left out.
        """
        while True:
            match = markers.pattern.search(self._text, self._at)
            end = match.start() if match else len(self._text)
            if not match and not (self.closed and is_whole):
                end -= markers.num_held(self._text, self._at)
            if end > self._at:
                sink(self._read(end))
            if match:
                return self._read(match.end())
            if self.closed:
                self._read(len(self._text))
                return None
            yield

    def text_until(self, markers: Markers) -> Steps[tuple[str, str | None]]:
        """(What comes before a marker, the marker or None)."""
        pieces: list[str] = []
        found = yield from self.until(markers, pieces.append)
        return "".join(pieces), found

    def rest(self, sink: Sink) -> Steps[None]:
        """Everything that is still to come."""
        yield from self.until(NO_MARKERS, sink)
