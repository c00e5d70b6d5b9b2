"""scripts/bench_kernel.py: every op is listed, every case is timed or reported, and what failed shows."""

import importlib
import json
import sys

import jax
import pytest
from kernel_bench.subjects import NAMES, Subject

SUBJECTS = [
    Subject(op, name, 10**6, flops, lambda name: "best" if name == "auto" else name, lambda backend: None, dict)
    for op, name, flops in (("top_k", "few", 0), ("top_k", "many", 0), ("quantized_matmul", "int8", 10**9))
]


@pytest.fixture
def script(monkeypatch):
    return importlib.import_module("bench_kernel")


def run(script, monkeypatch, *arguments):
    """The exit status."""
    monkeypatch.setattr(sys, "argv", ["bench_kernel.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        script.main()
    return int(left.value.code)


@pytest.fixture
def no_clock(script, monkeypatch):
    """Nothing runs: ours takes half a second, and "slow" 1."""
    monkeypatch.setattr(script, "measured_bandwidth", lambda num_bytes: 1e9)
    monkeypatch.setattr(script, "measured_matmul", lambda size, dtype: 1e12)
    monkeypatch.setattr(script, "seconds_of", lambda measurable, target_s: measurable)
    others = {"slow": lambda: 1.0, "no": lambda: None}
    replace(script, monkeypatch, chain=lambda backend: 0.5, yardsticks=lambda: others)


def replace(script, monkeypatch, **parts):
    """Let the benchmark find `SUBJECTS` with these parts."""
    subjects = [Subject(**(vars(subject) | parts)) for subject in SUBJECTS]
    monkeypatch.setattr(script, "subjects", lambda ops, sizes, platform: [x for x in subjects if x.op in ops])


def test_every_op_is_listed_with_its_backends_and_why_some_cannot_run_here(script):
    lines = list(script.known_ops("cpu"))
    assert {line for line in lines if not line.startswith(" ")} == {
        *NAMES,
        "few_rows_matmul",
        "int4_matmul",
        "rms_norm",
        "sort_by_group",
    }
    assert any(line.split() == ["reference", "runs", "here"] for line in lines)
    assert any(line.startswith("  gpu ") and "not here: it needs an NVIDIA GPU" in line for line in lines)


def test_each_case_has_a_row_for_ours_and_one_for_each_yardstick_that_can(script, no_clock, monkeypatch, tmp_path):
    table, data = tmp_path / "table.md", tmp_path / "table.json"
    assert run(script, monkeypatch, "--markdown", table, "--json", data) == 0
    report = json.loads(data.read_text(encoding="utf-8"))
    assert [(row["case"], row["what"]) for row in report["rows"]] == [
        (case, what) for what in ("best", "slow") for case in ("few", "many", "int8")
    ]
    ours, other = report["rows"][2], report["rows"][5]
    assert ours["milliseconds"] == 500
    assert ours["bandwidth_share"] == pytest.approx(1e6 / 0.5 / 1e9)
    assert ours["matmul_share"] == pytest.approx(1e9 / 0.5 / 1e12)
    assert (ours["times_ours"], other["times_ours"]) == (1.0, 2.0)
    text = table.read_text(encoding="utf-8")
    assert jax.devices()[0].device_kind in text
    assert report["date"] in text
    rows = [line.split(" | ")[:2] for line in text.splitlines() if line.startswith(("| ", "## "))]
    top = [["| case", "what"], ["| ---", "---"]]
    of = {case: [[f"| {case}", "best"], [f"| {case}", "slow"]] for case in ("few", "many", "int8")}
    assert rows == [["## top_k"], *top, *of["few"], *of["many"], ["## quantized_matmul"], *top, *of["int8"]]


def test_ops_cases_and_backends_can_be_chosen(script, no_clock, monkeypatch, tmp_path):
    arguments = ("--op", "top_k", "--cases", "man", "in", "--backend", "odd", "--no-yardsticks")
    assert run(script, monkeypatch, "--json", tmp_path / "x.json", *arguments) == 0
    rows = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))["rows"]
    assert [(row["case"], row["what"]) for row in rows] == [("many", "odd")]


def fails(*_):
    raise ValueError("no such tile\nand more")


def test_a_case_of_ours_that_fails_is_reported_and_the_exit_status_says_so(script, no_clock, monkeypatch, tmp_path):
    replace(script, monkeypatch, chain=fails, yardsticks=lambda: {"slow": lambda: 1.0})
    assert run(script, monkeypatch, "--json", tmp_path / "x.json", "--cases", "int8") == 1
    ours, other = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))["rows"]
    assert ours["error"] == "ValueError: no such tile"
    assert (other["milliseconds"], other["times_ours"]) == (1000, None)


def test_a_backend_that_cannot_is_reported_and_no_yardstick_is_held_against_it(script, no_clock, monkeypatch, tmp_path):
    replace(script, monkeypatch, choose=fails)
    assert run(script, monkeypatch, "--json", tmp_path / "x.json", "--cases", "int8", "--backend", "gpu") == 1
    (row,) = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))["rows"]
    assert (row["what"], row["error"]) == ("gpu", "ValueError: no such tile")


def test_a_yardstick_that_fails_is_reported_only(script, no_clock, monkeypatch, tmp_path):
    replace(script, monkeypatch, chain=lambda backend: 0.5, yardsticks=lambda: {"broken": fails})
    assert run(script, monkeypatch, "--json", tmp_path / "x.json", "--cases", "int8") == 0
    rows = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))["rows"]
    assert rows[1]["error"] == "ValueError: no such tile"


def test_cases_are_not_begun_when_time_is_up_and_that_is_an_error(script, no_clock, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "TIME_LIMIT_S", -1)
    assert run(script, monkeypatch, "--json", tmp_path / "x.json") == 1
    report = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    assert [row["case"] for row in report["rows"]] == ["few", "many", "int8"]
    assert all("not begun" in row["error"] for row in report["rows"])


def test_yardsticks_come_last_and_are_left_out_when_time_is_up(script, no_clock, monkeypatch, tmp_path):
    ticks = iter([0, 0, 0, 0, 0, *[1000] * 20])  # the start, three cases, and one yardstick
    monkeypatch.setattr(script.time, "monotonic", lambda: next(ticks))
    assert run(script, monkeypatch, "--json", tmp_path / "x.json") == 0
    report = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    assert [row["what"] for row in report["rows"]] == ["best", "best", "best", "slow"]
    assert report["notes"][-1] == "not begun after 420 s: quantized_matmul, int8, no"
