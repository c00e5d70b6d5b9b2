"""Progress and colours appear in a terminal and nowhere else."""

import io
import os
import pty
import struct

import pytest

from jaxpaged.entrypoints.terminal import ProgressLine, printable, styled


@pytest.fixture(autouse=True)
def ordinary_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_one_line_that_vanishes_and_then_stays_silent():
    terminal = Terminal()
    line = ProgressLine(terminal)
    line.update("weights", 1, 2)
    line.close()
    line.update("programs", 3, 4)
    assert terminal.getvalue() == "\r\x1b[2Kweights: 50%\r\x1b[2K"


def test_nothing_is_shown_where_there_is_no_terminal():
    stream = io.StringIO()
    line = ProgressLine(stream)
    line.update("weights", 1, 2)
    line.close()
    assert stream.getvalue() == ""
    assert styled("text", "bold", stream) == "text"


def test_what_a_model_writes_cannot_steer_the_terminal():
    assert printable("a\x1b[2J\tb\n\x9b", Terminal()) == "a\ufffd[2J\tb\n\ufffd"
    assert printable("a\x1b[2J", io.StringIO()) == "a\x1b[2J"


def test_colours_are_for_those_who_want_them(monkeypatch):
    assert styled("text", "bold", Terminal()) == "\x1b[1mtext\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "")
    assert styled("text", "red", Terminal()) == "\x1b[31mtext\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert styled("text", "bold", Terminal()) == "text"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert styled("text", "bold", Terminal()) == "text"


def test_a_terminal_that_cannot_erase_a_line_shows_no_progress(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal()
    line = ProgressLine(terminal)
    line.update("weights", 1, 2)
    line.close()
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("columns", [1, 5, 12, 13, 200])
def test_progress_never_goes_over_the_end_of_a_line(monkeypatch, columns):
    import fcntl
    import termios

    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 10, columns, 0, 0))
    with open(writer, "w", encoding="utf-8") as terminal:
        line = ProgressLine(terminal)
        line.update("weights", 1, 2)
        shown = os.read(reader, 1000).decode()
        line.close()
    os.close(reader)
    assert shown == "\r\x1b[2K" + "weights: 50%"[: columns - 1]
