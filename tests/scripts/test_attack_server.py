"""scripts/attack_server.py tells what must not be, and a small run ends with its server. No time is judged."""

import subprocess
import sys
from collections import Counter

import attack_server
import pytest
from attack_server import ATTACKS, Row, problems


def row(name="a", statuses=("400",), others=("200",), **measured):
    return Row(name, Counter(statuses), Counter(others), **measured)


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (row(statuses=["400", "500"]), "a: a request got 500"),
        (row(others=["200", "500"]), "a: others got 500"),
        (row(others=["late"]), "a: others got late"),
        (row(health=0.2), "a: /health took 200 ms"),
        (row(normal=1.5), "a: a normal client waited 1500 ms"),
        (row(after=1900.0), "memory is 1900 MiB at the end; it was 96"),
    ],
)
def test_what_must_not_be_is_told(bad, told):
    assert told in problems([row("b"), bad], 96.0, judge_times=True)


def test_refusals_are_no_problem_and_times_are_judged_only_where_they_mean_something():
    refusals = ["400", "413", "429", "503", "closed", "late"]
    good = row(statuses=refusals, health=0.09, normal=0.9, before=96.0, after=200.0)
    assert problems([good], 96.0, judge_times=True) == []
    assert problems([row(health=9.0, normal=9.0)], 96.0, judge_times=False) == []


def test_every_attack_has_a_fixed_number_of_requests():
    for make in ATTACKS.values():
        assert len(make(0.01)) == len(make(0.02)) <= 32


@pytest.mark.exhaustive
def test_a_small_part_runs_to_its_end_and_stops_its_server(monkeypatch, capsys):
    started, start = [], subprocess.Popen

    def recorded(*arguments, **options):
        started.append(start(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", recorded)
    words = ["attack_server.py", "--quick", "--no-times", "--only", "none", "nonsense"]
    monkeypatch.setattr(sys, "argv", words)
    assert attack_server.main() == 0, capsys.readouterr().out
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table] == ["attack", "none", "nonsense", "nothing"]
    assert "400:" in table[2]
    assert [process.poll() is not None for process in started] == [True]
