"""Progress and colours appear in a terminal and nowhere else."""

import io

from jaxpaged.entrypoints.cli.terminal import ProgressLine, printable, styled


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
