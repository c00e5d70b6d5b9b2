"""Text that breaks at words where the screen ends, also while it is still being written.

This module knows widths of characters, not streams of terminals.
"""

import re
import textwrap
import unicodedata
from collections.abc import Callable

TAB = 8
PIECE = re.compile(r"\n|[^\S\n]+|[^\s\u2e80-\U0010ffff]+|.", re.DOTALL)
"""A line's end, space, a word, or a character of a script in which lines may break anywhere."""


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
