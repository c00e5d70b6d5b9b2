"""The `jaxpaged` command as a process: version, unknown commands, and a reader that leaves."""

import subprocess
import sys
from pathlib import Path

import pytest

import jaxpaged
from jaxpaged.entrypoints.cli import main
from jaxpaged.errors import CapacityError, ConfigError, EngineError

ROOT = Path(__file__).parents[3]


def command(*arguments):
    line = [sys.executable, "-m", "jaxpaged", *arguments]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_python_dash_m_shows_the_version():
    assert command("--version").stdout == f"jaxpaged {jaxpaged.__version__}\n"


def test_an_unknown_command_is_wrong_usage():
    done = command("genrate")
    assert done.returncode == 2
    assert "generate" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_version_is_written_in_one_place():
    from importlib.metadata import PackageNotFoundError, version

    try:
        assert version("jaxpaged") == jaxpaged.__version__
    except PackageNotFoundError:
        pytest.skip("jaxpaged is not installed here")


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ConfigError("max_num_seqs is 0."), 2, "error: max_num_seqs is 0."),
        (CapacityError("too big."), 1, "error: too big."),
        (EngineError("stopped."), 1, "error: stopped."),
        (RuntimeError("two\nlines"), 1, "unexpected RuntimeError: two lines. Run it again with --debug"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_become_one_line_and_a_status(monkeypatch, capsys, error, status, said):
    from jaxpaged.entrypoints.cli import engine

    def fail(options, progress):
        raise error

    monkeypatch.setattr(engine, "open_engine", fail)
    assert main(["generate", "Hi"]) == status
    assert said in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_error():
    program = """
import sys
from jaxpaged.entrypoints.cli import generate, main
def write_much(args):
    for _ in range(100_000):
        print("x" * 100)
generate.run = write_much
sys.exit(main(["generate", "Hi"]))
"""
    done = subprocess.run(
        ["bash", "-c", '"$0" -c "$1" | head -n 1; exit "${PIPESTATUS[0]}"', sys.executable, program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "x" * 100 + "\n"
    assert done.stderr == ""
    assert done.returncode == 141
