"""`jaxpaged plugins`: what is found, from where, what it adds, and what is wrong with it."""

import importlib.metadata
import json
import sys

import pytest

from jaxpaged.entrypoints.cli import main

MODULE = """
from jaxpaged import Plugin

class Logger:
    pass

def nothing(source, out):
    yield

def PLUGIN():
    return Plugin(tool_parsers={"b": nothing, "a": nothing})

def broken():
    raise OSError("no licence")
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "shown_plugins.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield str(tmp_path / "shown_plugins.py")
    sys.modules.pop("shown_plugins", None)


def install(monkeypatch, **entries):
    kinds = {"general": "jaxpaged.general_plugins", "logger": "jaxpaged.stat_logger_plugins"}
    kinds["endpoint"] = "jaxpaged.endpoint_plugins"
    found = [importlib.metadata.EntryPoint(name, f"shown_plugins:{at}", kinds[k]) for name, (k, at) in entries.items()]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda: found)
    monkeypatch.setattr("jaxpaged.plugins.sources.may_be_installed", lambda: bool(found))


def test_it_says_what_is_there_and_what_it_adds(monkeypatch, capsys, module):
    install(monkeypatch, mine=("general", "PLUGIN"), log=("logger", "Logger"), door=("endpoint", "nothing"))
    assert main(["plugins", "--json"]) == 0
    rows = {row["name"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert rows["mine"]["adds"] == {"tool_parsers": ["a", "b"]} and rows["mine"]["place"] == "shown_plugins:PLUGIN"
    assert rows["log"]["adds"] == {"stat_loggers": ["log"]}
    assert not rows["door"]["loads"] and "adds" not in rows["door"]
    assert main(["plugins", "--plugins", "door"]) == 0
    shown = capsys.readouterr().out
    assert "endpoints: door" in shown and "mine  jaxpaged.general_plugins, " in shown
    assert main(["plugins", "--plugins", "", "--plugin", module, module]) == 0
    assert f"{module}\n  tool parsers: a, b" in capsys.readouterr().out


def test_what_would_stop_an_engine_is_said(monkeypatch, capsys):
    install(monkeypatch, mine=("general", "PLUGIN"), bad=("general", "broken"))
    assert main(["plugins"]) == 1
    captured = capsys.readouterr()
    assert "tool parsers: a, b" in captured.out and "OSError: no licence" in captured.out
    assert "the plugin bad" in captured.err
    assert main(["plugins", "--plugins", "nobody"]) == 2
    assert "which no installed package has" in capsys.readouterr().err


def test_without_any_it_says_so(monkeypatch, capsys):
    install(monkeypatch)
    assert main(["plugins"]) == 0
    assert capsys.readouterr().out == "no plugins are installed, and none is named\n"
