"""While an answer waits for programs, a terminal says so."""

import io
import sys
import time

import pytest

from jaxpaged.entrypoints.cli import local_answers
from jaxpaged.entrypoints.cli.local_answers import CompileNotice
from jaxpaged.entrypoints.terminal import ERASE_LINE


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(local_answers, "SECONDS", 0.01)


def watched(monkeypatch, ready, until):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with CompileNotice(lambda: {"ordinary_programs_ready": ready, "ordinary_programs": 7}) as notice:
        deadline = time.monotonic() + 30
        while not until(terminal.getvalue()) and time.monotonic() < deadline:
            time.sleep(0.01)
        notice.end()
        said = terminal.getvalue()
        time.sleep(0.05)
    assert terminal.getvalue() == said, "it goes on after its end"
    return said


def test_programs_that_are_missing_are_told_until_the_answer_begins(monkeypatch):
    said = watched(monkeypatch, 2, lambda shown: "compiling: 2 of 7 programs are ready" in shown)
    assert said.endswith(ERASE_LINE)


def test_nothing_is_told_where_nothing_is_missing(monkeypatch):
    begun = time.monotonic()
    assert watched(monkeypatch, 7, lambda shown: time.monotonic() - begun > 0.1).replace(ERASE_LINE, "") == ""


def test_nothing_is_told_where_there_is_no_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with CompileNotice(lambda: pytest.fail("nobody sees it")):
        time.sleep(0.05)
    assert sys.stderr.getvalue() == ""
