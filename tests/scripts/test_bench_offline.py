"""The offline benchmark as a program: its arguments, and a small run. Its parts are tested in `offline_bench/`."""

import json

import bench_offline
import pytest


def test_an_8b_model_never_runs_by_default():
    assert "llama-8b" not in plan_models([])
    assert plan_models(["--models", "llama-8b"]) == ["llama-8b"]


def plan_models(words):
    return list(bench_offline.plan_of(bench_offline.parse_arguments(words)).workloads)


@pytest.mark.parametrize("words", ["--scale 0", "--scale 2", "--repeat 0", "--threads 0", "--at-a-time 0"])
def test_figures_out_of_range_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        bench_offline.parse_arguments(words.split())
    assert "must be" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.exhaustive  # 80 s
def test_a_small_run_goes_from_end_to_end(tmp_path, capsys):
    words = ["--models", "tiny", "--workloads", "single", "shared", "--peers", "none", "--repeat", "1"]
    flags = "--max-num-seqs 8 --max-num-batched-tokens 16"
    folders = ["--out", str(tmp_path / "out"), "--checkpoints-dir", str(tmp_path / "models")]
    assert bench_offline.main([*words, "--scale", "0.05", "--jaxpaged", flags, *folders]) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [run["error"] for run in results["runs"]] == [None]
    assert "* Failed" not in capsys.readouterr().out
    assert results["roofline"]
