"""`--timeline`, `--trace` and `--step-log` of `jaxpaged generate`."""

import json

import pytest

from jaxpaged.tools.pictures.step_log_file import read_step_log
from tests.entrypoints.cli.conftest import EchoEngine
from tests.tools.pictures.records import record, without_matplotlib


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    monkeypatch.setattr(EchoEngine, "step_records", lambda self: ([record(1), record(2, begin=10.0)], 0))


def test_the_files_are_written_when_the_command_ends(run, tmp_path):
    png, trace, log = tmp_path / "t.png", tmp_path / "t.json", tmp_path / "t.jsonl"
    finished = run("generate", "Hi", "--timeline", str(png), "--trace", str(trace), "--step-log", str(log))
    assert (finished.status, finished.err) == (0, "")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert json.loads(trace.read_text())["traceEvents"]
    assert len(read_step_log(log)[0]) == 2


@pytest.mark.parametrize("flag", ["--timeline", "--trace", "--step-log"])
def test_a_folder_that_is_not_there_is_found_before_the_model_is_loaded(run, tmp_path, flag):
    finished = run("generate", "Hi", flag, str(tmp_path / "nowhere" / "file.png"))
    assert finished.status == 2
    assert "there is no folder" in finished.err
    assert finished.engine.prompts == []
    (tmp_path / "folder.png").mkdir()
    finished = run("generate", "Hi", flag, str(tmp_path / "folder.png"))
    assert finished.status == 2 and "it is a folder" in finished.err and finished.engine.prompts == []


def test_without_matplotlib_a_timeline_is_refused_at_once(run, tmp_path, monkeypatch):
    with without_matplotlib(monkeypatch):
        finished = run("generate", "Hi", "--timeline", str(tmp_path / "t.png"))
    assert finished.status == 2
    assert "pip install" in finished.err
    assert finished.engine.prompts == []
