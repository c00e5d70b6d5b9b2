"""What a person sees around the text: progress, colours, one-line messages. Nothing of it reaches a file or a pipe.

This module knows streams, not engines.
"""

import os
import sys
import threading
from typing import TextIO

from jaxpaged.entrypoints.cli.word_wrap import fitted

ERASE_LINE = "\r\x1b[2K"
STYLES = {"bold": "1", "dim": "2", "red": "31"}
CONTROLS = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)], "\ufffd") | {ord("\n"): "\n", ord("\t"): "\t"}


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
