"""What a server waits for: one line of a terminal, or lines of the log at intervals."""

import asyncio
import io
import logging
import sys

from jaxpaged.entrypoints.cli import serve
from jaxpaged.entrypoints.cli.serve import StartReport
from jaxpaged.entrypoints.terminal import ERASE_LINE


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_in_a_terminal_one_line_is_rewritten_and_taken_away(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(serve, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", Terminal())
    report, reasons = StartReport(), ["2 of 3 programs.", None]
    report.update("weights", 1, 4)
    asyncio.run(report.until_ready(lambda: reasons.pop(0)))
    report.update("programs", 3, 3)
    lines = ["loading: weights 25%", "not ready yet: 2 of 3 programs.", ""]
    assert sys.stderr.getvalue() == "".join(ERASE_LINE + line for line in lines)


def test_elsewhere_the_log_has_a_line_now_and_then(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "jaxpaged")
    now = [100.0]
    monkeypatch.setattr(serve.time, "monotonic", lambda: now[0])
    report = StartReport()
    for second in range(12):
        now[0] = 100.0 + second
        report.update("weights", second, 20)
    assert caplog.messages == ["after 5 s: loading: weights 25%", "after 10 s: loading: weights 50%"]
