"""scripts/bench_kernel.py: every op is listed, every case is timed or reported, and yardsticks do the same work."""

import importlib
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention.cases import SERVING_STEPS, TINY_STEPS
from pallas_kernels.testing import dense_attention

SCRIPTS = Path(__file__).parents[2] / "scripts"
STEP = {step.name: step for step in (*SERVING_STEPS, *TINY_STEPS)}


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("bench_kernel")


def run(script, monkeypatch, *arguments):
    """The exit status."""
    monkeypatch.setattr(sys, "argv", ["bench_kernel.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        script.main()
    return int(left.value.code)


@pytest.fixture
def no_clock(script, monkeypatch):
    """Nothing runs: compiling and timing are the library's, and have their own tests."""
    monkeypatch.setattr(script, "measured_bandwidth", lambda num_bytes: 1e9)
    monkeypatch.setattr(script, "measured_matmul", lambda size, dtype: 1e12)
    monkeypatch.setattr(script, "attention_chain", lambda step, backend: None)
    monkeypatch.setattr(script, "seconds_per_call", lambda chain: 0.5)
    monkeypatch.setattr(script, "yardsticks", lambda platform: {"other": lambda step: lambda: 1.0})


def test_every_op_is_listed_with_its_backends_and_why_some_cannot_run_here(script):
    lines = list(script.known_ops("cpu"))
    assert "ragged_paged_attention" in lines
    assert any(line.split() == ["reference", "runs", "here"] for line in lines)
    assert any(line.startswith("  gpu ") and "not here: it needs an NVIDIA GPU" in line for line in lines)


def test_each_case_has_a_row_for_ours_and_one_for_each_yardstick(script, no_clock, monkeypatch, tmp_path, capsys):
    table, data = tmp_path / "table.md", tmp_path / "table.json"
    assert run(script, monkeypatch, "--markdown", table, "--json", data) == 0
    report = json.loads(data.read_text(encoding="utf-8"))
    assert [(row["case"], row["what"]) for row in report["rows"]] == [
        (step.name, what) for step in TINY_STEPS for what in ("reference", "other")
    ]
    ours, other = report["rows"][:2]
    assert ours["milliseconds"] == 500
    assert ours["bandwidth_share"] == pytest.approx(TINY_STEPS[0].step_bytes / 0.5 / 1e9)
    assert ours["matmul_share"] == pytest.approx(TINY_STEPS[0].flops / 0.5 / 1e12)
    assert (ours["times_ours"], other["times_ours"]) == (1.0, 2.0)
    text = table.read_text(encoding="utf-8")
    assert jax.devices()[0].device_kind in text
    assert report["date"] in text
    assert sum(line.startswith("| ") for line in text.splitlines()) == 2 + 2 * len(TINY_STEPS)
    assert TINY_STEPS[0].name in capsys.readouterr().out


def test_a_case_of_ours_that_fails_is_reported_and_the_exit_status_says_so(script, no_clock, monkeypatch, tmp_path):
    def fails(step, backend):
        raise ValueError("no such tile\nand more")

    monkeypatch.setattr(script, "attention_chain", fails)
    assert run(script, monkeypatch, "--json", tmp_path / "x.json", "--cases", "decode, 4") == 1
    ours, other = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))["rows"]
    assert ours["error"] == "ValueError: no such tile"
    assert other["milliseconds"] == 1000


def test_cases_are_not_begun_when_time_is_up_and_that_is_an_error(script, no_clock, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "TIME_LIMIT_S", -1)
    assert run(script, monkeypatch, "--json", tmp_path / "x.json") == 1
    rows = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))["rows"]
    assert [row["case"] for row in rows] == [step.name for step in TINY_STEPS]
    assert all("not begun" in row["error"] for row in rows)


def test_dense_yardsticks_attend_as_ours_does(script):
    yardsticks = sys.modules["kernel_yardsticks"]
    for name in ("decode, 4 x 64", "prefill, 64"):
        chain = yardsticks.dense_jax(STEP[name], "xla")
        out_RQNH = np.asarray(chain.function(chain.state, *chain.operands))
        for row, (q_QNH, k_PKH, v_PKH) in enumerate(zip(chain.state, *chain.operands)):
            should_QNH = dense_attention(q_QNH, k_PKH, v_PKH, scale=STEP[name].shape.head_dim ** -0.5)
            np.testing.assert_allclose(out_RQNH[row], should_QNH, atol=1e-5)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_the_kernels_of_jax_are_called_as_they_want_to_be(script, monkeypatch, platform):
    yardsticks = sys.modules["kernel_yardsticks"]
    monkeypatch.setattr(yardsticks, "filled_arrays", lambda structs: structs)
    tuned = "jax.experimental.pallas.ops.tpu.ragged_paged_attention.tuned_block_sizes"
    monkeypatch.setattr(f"{tuned}.get_tpu_version", lambda: 5)
    make = {"gpu": yardsticks.paged_jax_gpu, "tpu": yardsticks.paged_jax_tpu}[platform]
    chain = make(STEP["decode, 64 x 2,048"])
    out = jax.eval_shape(chain.function, chain.state, *chain.operands)
    assert (out.shape, out.dtype) == (chain.state.shape, chain.state.dtype)
    assert make(STEP["decode, int8 cache"]) is None


def test_yardsticks_leave_out_what_they_cannot_do(script):
    yardsticks = sys.modules["kernel_yardsticks"]
    can = {name for name, step in STEP.items() if yardsticks.is_rectangular(step)}
    assert {"decode, 64 x 2,048", "prefill, 8,192", "prefill, 16 x 512"} <= can
    assert not can & {"decode, long tail", "prefill, 2,048 after 6,144", "decode, int8 cache",
                      "64 decodes and a chunk of 1,024"}  # fmt: skip
    assert yardsticks.paged_jax_gpu(STEP["prefill, 64"]) is None
    assert yardsticks.dense_jax(STEP["decode, window"], "xla") is None
