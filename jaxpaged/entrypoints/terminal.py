"""What a person sees around the text: progress, colours, one-line messages, lines that break at words. None of the
first three reaches a file or a pipe.

This module knows streams, not engines.
"""

import os
import re
import sys
import textwrap
import threading
import unicodedata
from collections.abc import Callable
from typing import TextIO

ERASE_LINE = "\r\x1b[2K"
STYLES = {"bold": "1", "dim": "2", "red": "31"}
CONTROLS = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)], "\ufffd") | {ord("\n"): "\n", ord("\t"): "\t"}
TAB = 8
PIECE = re.compile(r"\n|[^\S\n]+|[^\s\u2e80-\U0010ffff]+|.", re.DOTALL)
"""A line's end, space, a word, or a character of a script in which lines may break anywhere."""


def styled(text: str, style: str, stream: TextIO) -> str:
    """The text in bold, dim or red if `stream` is a terminal that shows colours and whose user wants them."""
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if has_colors(stream) else text


def has_colors(stream: TextIO) -> bool:
    """A terminal, unless NO_COLOR is set (https://no-color.org) or it calls itself dumb."""
    return understands_escapes(stream) and not os.environ.get("NO_COLOR")


def understands_escapes(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def columns_of(stream: TextIO) -> int:
    """The width of the terminal; 80 where it does not say."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # no terminal, or none of the operating system's
        columns = 0
    return columns or 80


def printable(text: str, stream: TextIO) -> str:
    """What a model wrote must not steer the terminal: control characters are replaced, one for one."""
    return text.translate(CONTROLS) if stream.isatty() else text


def complain(command: str, message: str) -> None:
    """One line on standard error; in a terminal in red, and broken at words."""
    line = f"{command}: {message}"
    if sys.stderr.isatty():
        line = fitted(line, columns_of(sys.stderr))
    print(styled(line, "red", sys.stderr), file=sys.stderr, flush=True)


class ProgressLine:
    """One line on standard error that shows how far loading and compiling are; silent unless it is a terminal.

    It is cut to the width of the terminal: what goes over its end could not be erased. `update` fits
    `messages.Progress` and may be called by several threads. After `close` it stays silent: programs go on compiling
    while text is already being printed.
    """

    def __init__(self, stream: TextIO | None = None):
        self.stream = stream or sys.stderr
        self.open = understands_escapes(self.stream)
        self.lock = threading.Lock()

    def update(self, what: str, done: int, total: int) -> None:
        self.show(f"{what}: {done / max(total, 1):.0%}")

    def show(self, words: str) -> None:
        """Put words in place of what the line shows."""
        with self.lock:
            if self.open:
                self.stream.write(ERASE_LINE + words[: columns_of(self.stream) - 1])
                self.stream.flush()

    def close(self) -> None:
        with self.lock:
            if self.open:
                self.stream.write(ERASE_LINE)
                self.stream.flush()
            self.open = False


# ---- lines that break at words, also while they are still being written ----------------------------


class WordWrap:
    """Writes pieces of a text in lines of at most `columns`. A word is written once it is known where it ends.

    Without columns, as for a file, pieces are written as they come.
    """

    def __init__(self, write: Callable[[str], object], columns: int | None):
        self._write, self._columns = write, columns
        self._column = 0
        self._space = self._word = ""
        self._continues = False  # whether a word longer than a line was written in part

    def write(self, text: str) -> None:
        """Take a piece; all but its last word is written."""
        if self._columns is None:
            self._write(text)
            return
        *whole, last = PIECE.findall(self._word + text) or [""]
        self._word = ""
        for piece in whole:
            self._put(piece, self._columns)
        if last.isspace() or width_of(last) >= self._columns:
            self._put(last, self._columns)
            self._continues = not last.isspace()
        else:
            self._word = last

    def end(self) -> None:
        """Write what is left."""
        if self._word and self._columns is not None:
            self._put(self._word, self._columns)
        self._word = ""

    def _put(self, piece: str, columns: int) -> None:
        self._continues = self._continues and not piece.isspace() and not is_wide(piece)
        if piece == "\n":
            self._write("\n")
            self._column, self._space = 0, ""
        elif piece.isspace():
            self._space += piece
        else:
            space, self._space = self._space.expandtabs(TAB), ""
            if self._column and not self._continues and self._column + len(space) + width_of(piece) > columns:
                self._write("\n")
                self._column, space = 0, ""
            self._write(space + piece)
            self._column = (self._column + len(space) + width_of(piece) - 1) % columns + 1


def is_wide(piece: str) -> bool:
    """Whether it is a character before and behind which a line may end."""
    return piece >= "\u2e80"


def width_of(text: str) -> int:
    """Columns that a text takes."""
    return sum(2 if unicodedata.east_asian_width(each) in "WF" else not unicodedata.combining(each) for each in text)


def fitted(text: str, columns: int) -> str:
    """The lines of a text, broken at words. What follows two spaces inside a line is a column of its own."""
    return "\n".join(part for line in text.split("\n") for part in fitted_line(line, columns))


def fitted_line(line: str, columns: int) -> list[str]:
    if len(line) <= columns:
        return [line]
    second = re.match(r"\s*\S+(?: \S+)*  +(?=\S)", line)
    indent = second.end() if second else len(line) - len(line.lstrip())
    return textwrap.wrap(
        line, columns, subsequent_indent=" " * min(indent, columns // 2), break_long_words=False, break_on_hyphens=False
    )
