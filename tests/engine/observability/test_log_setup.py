"""Lines of text and of JSON, and a library that leaves logging to who imports it."""

import json
import logging
import re
import subprocess
import sys

import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.engine.observability.log_setup import LEVELS, format_in_use, set_up_logging
from jaxpaged.engine.process.core_supervisor import CoreSupervisor

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00"


def fail():
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        logging.getLogger("jaxpaged.x").exception("it %s", "failed")


def test_text_has_time_level_process_and_logger(capsys):
    set_up_logging("info", process="engine core")
    logging.getLogger("jaxpaged.x").info("%d requests", 3, extra={"request_id": "r"})
    logging.getLogger("jaxpaged.x").debug("too fine")
    logging.getLogger("elsewhere").info("not ours")
    logging.getLogger("elsewhere").warning("theirs")
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(f"{TIME} INFO engine core: jaxpaged.x: 3 requests", first)
    assert re.fullmatch(f"{TIME} WARNING engine core: elsewhere: theirs", second)
    fail()
    assert capsys.readouterr().err.endswith("ZeroDivisionError\n")


def test_json_is_an_object_a_line_with_the_events_own_fields(capsys):
    set_up_logging("debug", "json")
    logging.getLogger("jaxpaged.x").debug("two\nlines", extra={"request_id": "r", "duration": 1.5})
    fail()
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert re.fullmatch(TIME, first.pop("time"))
    assert first == {
        "level": "debug",
        "logger": "jaxpaged.x",
        "message": "two\nlines",
        "request_id": "r",
        "duration": 1.5,
    }
    assert "ZeroDivisionError" in second["exception"] and second["level"] == "error"


@pytest.mark.parametrize("level", LEVELS)
def test_setting_up_again_replaces_what_was_set_up(level, capsys):
    set_up_logging("debug", "json")
    set_up_logging(level)
    assert format_in_use() == "text"
    for each in LEVELS:
        getattr(logging.getLogger("jaxpaged.x"), each)(each)
    assert [line.split()[-1] for line in capsys.readouterr().err.splitlines()] == list(LEVELS[LEVELS.index(level) :])


def test_the_core_process_logs_like_the_one_that_starts_it(capfd):
    set_up_logging("debug", "json")
    supervisor = CoreSupervisor(
        EngineConfig(),
        step_timeout=60.0,
        max_restarts=0,
        factory="tests.engine.observability.test_log_setup:build_and_say",
    )
    supervisor.begin()
    supervisor.wait_until_serving()
    supervisor.close()
    events = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    said = {event["message"]: event.get("process") for event in events}
    assert said["a word of it"] == "engine core" and said["the engine core is serving"] is None


def build_and_say(*arguments):
    from tests.engine.fake_core import build

    logging.getLogger("jaxpaged.x").debug("a word of it")
    return build(*arguments)


def test_a_library_sets_up_nothing():
    program = (
        "import logging; from jaxpaged import LLM, AsyncLLM, SamplingParams; import jaxpaged.entrypoints.http.app\n"
        "loggers = [logging.getLogger(), *(logging.getLogger(name) for name in logging.root.manager.loggerDict "
        "if name.startswith('jaxpaged'))]\n"
        "assert not any(logger.handlers for logger in loggers)\n"
        "assert not any(logger.level for logger in loggers[1:])\n"
        "logging.getLogger('jaxpaged.x').info('nothing'); logging.getLogger('jaxpaged.x').warning('something')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "something\n")


def test_what_strangers_can_make_it_say_is_said_once_a_minute_and_counted(capsys, monkeypatch):
    """Before, every piece of garbage on a port was a line."""
    set_up_logging("info")
    ports, ours, now = logging.getLogger("uvicorn.error"), logging.getLogger("jaxpaged.x"), [1000.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    monkeypatch.setattr("time.time_ns", lambda: int(now[0] * 1e9))
    for number in range(500):
        ports.warning("Invalid HTTP request received.")
        logging.getLogger("jaxpaged.engine.process.core_server").warning("dropped a message of kind %r", number)
        ours.warning("whatever it is")
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        ports.exception("Invalid HTTP request received.")
    now[0] += 61
    ports.warning("Invalid HTTP request received.")
    lines = [line.partition(" ")[2] for line in capsys.readouterr().err.splitlines() if " ours" not in line]
    assert [line for line in lines if "Invalid" in line] == [
        "WARNING uvicorn.error: Invalid HTTP request received.",
        "ERROR uvicorn.error: Invalid HTTP request received.",
        "WARNING uvicorn.error: Invalid HTTP request received. (499 more like this were not told)",
    ]
    assert [line for line in lines if "dropped" in line] == [
        "WARNING jaxpaged.engine.process.core_server: dropped a message of kind 0"
    ]
    assert sum("whatever" in line for line in lines) == 500
