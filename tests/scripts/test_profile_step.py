"""scripts/profile_step.py: what a profile and a program's text say, and a run of the whole."""

import collections
import importlib
import subprocess
import sys

import pytest

from tests.scripts.conftest import SCRIPTS


@pytest.fixture(scope="module")
def script():
    return importlib.import_module("profile_step")


def test_what_an_operation_calls_is_taken_from_its_time_and_a_call_that_was_interrupted_counts_as_others(script):
    times = [("loop", 0, 100), ("inner", 10, 30), ("inmost", 15, 5), ("inner", 50, 25), ("next", 100, 900)]
    times += [("inner", 1000, 25), ("next", 1100, 10), ("next", 1200, 10)]
    costs = collections.defaultdict(list)
    script.add_own_times([script.Event(name, "m", *time) for name, *time in reversed(times)], costs)
    assert {name: sorted(calls) for (_, name), calls in costs.items()} == {
        "loop": [45],
        "inner": [25, 25, 25],
        "inmost": [5],
        "next": [10, 10, 900],
    }
    lines = list(script.table(costs, {"m": {"inner": "norms"}}, steps=1, ops=1))
    assert lines[0].split()[-2:] == ["0.2", "us"] and len(lines) == 5
    assert "48.4%" in lines[2] and "m: inner" in lines[-1] and "norms" in lines[-1]


@pytest.mark.slow
@pytest.mark.exhaustive  # 20 s
def test_the_script_runs_to_its_end():
    command = [sys.executable, str(SCRIPTS / "profile_step.py"), "--rows", "1", "--steps", "4", "--context", "8"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=400).stdout
    assert "1 rows: " in printed and "attention" in printed and "products" in printed and "sampling" in printed
