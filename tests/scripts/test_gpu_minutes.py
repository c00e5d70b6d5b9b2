"""The script for a lent GPU goes through its motions here, and says what failed in place of stopping."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu_minutes.py"


def run(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=500)


@pytest.mark.exhaustive
def test_the_sampler_is_measured_both_ways_and_draws_the_same(tmp_path):
    done = run("--out", tmp_path, "--model", "tiny", "--parts", "sampler")
    assert done.returncode == 0, done.stderr
    report = (tmp_path / "report.md").read_text().partition("## sampler, kernels")[0]
    rows = [line for line in report.splitlines() if line.startswith("| 2 ")]
    assert len(rows) == 4 and all(row.endswith("| 1 |") for row in rows), report


@pytest.mark.exhaustive
def test_an_engine_with_all_changes_undone_gives_every_token(tmp_path):
    changes = (
        "a kernel finds the sampler's limits",
        "no launches for spans that nobody shares",
        "decodes are dispatched step by step",
        "runs from the first decode on",
        "weights with the same inputs are joined",
        "our kernel multiplies few rows where it is faster",
    )
    done = run("--out", tmp_path / "speed.json", "--model", "tiny", "--measure", "speed", "--undo", *changes)
    assert done.returncode == 0, done.stderr
    lines = json.loads((tmp_path / "speed.json").read_text())
    assert [line["load"] for line in lines[1:]] == [[3, 24, 1], [1, 8, 24], [3, 12, 24], [3, 12, 24]]


def test_a_measurement_that_fails_is_told_in_the_report_and_the_next_one_is_made(tmp_path):
    done = run("--out", tmp_path, "--model", "nobody's", "--parts", "speed", "--minutes", "0.05")
    assert done.returncode == 0
    report = (tmp_path / "report.md").read_text()
    assert "## speed, as it is" in report and ("failed with exit status" in report or "took too long" in report)


def test_all_tests_that_a_gpu_is_to_run_exist():
    in_script = re.findall(r'"(tests/[^"]+)"', SCRIPT.read_text())
    command = re.search(r"    kernels=.*?(?=\n  fi)", (ROOT / "scripts" / "test").read_text(), re.DOTALL)[0]
    shown = subprocess.run(
        ["bash", "-c", f'{command}\nprintf "%s\\n" "$@"'], capture_output=True, text=True, check=True
    )
    named = [*in_script, *shown.stdout.split()]
    assert len(named) > 30 and [path for path in named if not (ROOT / path).exists()] == []
