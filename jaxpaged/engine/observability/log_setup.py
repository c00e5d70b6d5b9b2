"""What a process of ours writes to standard error about its work: a line of text, or of JSON, for each event.

Commands and the engine core's process set this up. A library does not: a program that imports jaxpaged gets its
loggers, called `jaxpaged....`, sees warnings and errors as Python shows them, and decides about the rest. Messages hold
no text of prompts or answers. This module knows no event.
"""

import copy
import datetime
import json
import logging
import sys
from typing import Any

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
ERASE_LINE = "\r\x1b[2K"
"""In a terminal a progress line may stand where the event goes."""


REPEATED = (
    "asyncio",
    "jaxpaged.engine.process.core_server",
    "jaxpaged.engine.observability.kv_event_publisher",
    "jaxpaged.entrypoints.http.transport.connections",
    "uvicorn.error",
)
"""Loggers whose lines a client of a socket can repeat as often as it likes."""
REPEAT_SECONDS = 60.0


class Seldom(logging.Filter):
    """Lets a message of the loggers in `REPEATED` pass once in `REPEAT_SECONDS`, then with how often it was not told.

    Messages are the same that have the same words and the same kind of exception, whatever values they tell.
    """

    def __init__(self) -> None:
        super().__init__()
        self._told: dict[tuple, tuple[float, int]] = {}  # when, and how often it was not since

    def filter(self, record: logging.LogRecord) -> bool | logging.LogRecord:
        if record.name not in REPEATED:
            return True
        key = (record.name, str(record.msg), record.exc_info and record.exc_info[0])
        when, untold = self._told.get(key, (float("-inf"), 0))
        if record.created - when < REPEAT_SECONDS:
            self._told[key] = when, untold + 1
            return False
        self._told[key] = record.created, 0
        if not untold:
            return True
        told = copy.copy(record)
        told.msg, told.args = f"{record.getMessage()} ({untold} more like this were not told)", ()
        return told


class StandardError(logging.Handler):
    """Writes to what `sys.stderr` is at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            erase = ERASE_LINE if sys.stderr.isatty() else ""
            sys.stderr.write(f"{erase}{self.format(record)}\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


class TextFormatter(logging.Formatter):
    """`2026-11-22T08:30:01.250+00:00 INFO jaxpaged.worker: message`; `process` stands before the logger's name."""

    def __init__(self, process: str = ""):
        super().__init__()
        self._process = f"{process}: " if process else ""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{time_of(record)} {record.levelname} {self._process}{record.name}: {record.getMessage()}"
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return line


class JsonFormatter(logging.Formatter):
    """An object a line: time, level, logger, process, message, and the fields that the event brings as `extra`."""

    def __init__(self, process: str = ""):
        super().__init__()
        self._process = {"process": process} if process else {}

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, Any] = {
            "time": time_of(record),
            "level": record.levelname.lower(),
            **self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        event |= {name: value for name, value in vars(record).items() if name not in STANDARD_FIELDS}
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event, default=str)


FORMATTERS = {"text": TextFormatter, "json": JsonFormatter}


def time_of(record: logging.LogRecord) -> str:
    return datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")


def set_up_logging(level: str | int, format: str = "text", process: str = "") -> None:
    """Write events of jaxpaged from `level` on, and warnings of everybody else, to standard error. May be repeated."""
    handler = StandardError()
    handler.setFormatter(FORMATTERS[format](process))
    handler.addFilter(Seldom())
    root = logging.getLogger()
    for other in [each for each in root.handlers if isinstance(each, StandardError)]:
        root.removeHandler(other)
    root.addHandler(handler)
    logging.getLogger("jaxpaged").setLevel(level.upper() if isinstance(level, str) else level)


def format_in_use() -> str:
    """The format that this process was set up with; "text" where nobody did."""
    formatters = [each.formatter for each in logging.getLogger().handlers if isinstance(each, StandardError)]
    return "json" if any(isinstance(each, JsonFormatter) for each in formatters) else "text"
