"""`jaxpaged plan` as a person types it, for targets that need no compiler."""

import json
import shutil

import pytest

from jaxpaged.entrypoints.cli import FAILURE, USAGE, main
from jaxpaged.params.hub import EMBEDDED_FOLDER
from jaxpaged.tools.pictures import canvas


def test_a_plan_needs_only_the_description_of_the_model(tmp_path, capsys):
    shutil.copy(EMBEDDED_FOLDER / "config.json", tmp_path)
    assert main(["plan", str(tmp_path), "--target", "h100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["model"] == str(tmp_path) and found["programs"] == []


def test_options_of_the_engine_change_the_plan(capsys):
    blocks = []
    for options in ([], ["--gpu-memory-utilization", "0.5"]):
        assert main(["plan", "demo", "--target", "v5e:1x1", "--no-compile", "--json", *options]) == 0
        blocks.append(json.loads(capsys.readouterr().out)["num_blocks"])
    assert blocks[1] < blocks[0]


@pytest.mark.parametrize(("given", "size"), [([], 4), (["-tp", "1"], 1), (["-tp", "2"], 2)])
def test_a_model_is_split_as_it_is_asked_for_and_else_as_far_as_it_can_be(given, size, capsys):
    assert main(["plan", "demo", "--target", "v6e-8", "--no-compile", "--json", *given]) == 0
    assert json.loads(capsys.readouterr().out)["tensor_parallel_size"] == size


def test_what_does_not_fit_ends_with_a_failure_and_advice(capsys):
    assert main(["plan", "demo", "--target", "l4", "--num-gpu-blocks-override", "2"]) == FAILURE
    assert "IT DOES NOT FIT" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["demo", "--target", "v9"], "unknown target"),
        (["demo", "--model", "other", "--target", "h100"], "two models"),
        (["demo", "--target", "h100", "--save", "x", "--no-compile"], "--save needs compiled programs"),
        (["demo", "--target", "h100", "--bundle", "x"], "--bundle x"),
        (["demo", "--target", "h100", "--chart", "x.txt"], ".txt"),
        (["/nowhere/at/all", "--target", "h100"], "/nowhere/at/all"),
        (["demo", "--target", "h100", "--kv-sizes", "1G"], "--kv-sizes says how"),
        (["demo", "--target", "h100", "--kv-trace", "/no/such"], "cannot read the trace"),
        (["demo", "--target", "h100", "--kv-trace", "x", "--kv-bandwidth", "0"], "--kv-bandwidth is 0"),
    ],
)
def test_wrong_usage_is_one_line(arguments, words, capsys):
    assert main(["plan", *arguments]) in (USAGE, FAILURE)
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_a_picture_of_the_memory_is_written(tmp_path, capsys):
    path = tmp_path / "memory.png"
    assert main(["plan", "demo", "--target", "h100", "--chart", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def written_trace(folder):
    path = folder / "trace.jsonl"
    lines = [{"input_length": 1500, "hash_ids": [n % 40, 100 + n % 40, 200 + n]} for n in range(120)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


def test_a_trace_says_what_tiers_would_bring(tmp_path, capsys, monkeypatch):
    drawn, write = [], canvas.write_figure
    monkeypatch.setattr(canvas, "write_figure", lambda figure, path: drawn.append(figure) or write(figure, path))
    chart, options = tmp_path / "tiers.png", ["--num-gpu-blocks-override", "1500", "--max-model-len", "2048"]
    command = ["plan", "demo", "--target", "h100", "--kv-trace", str(written_trace(tmp_path)), *options]
    assert main([*command, "--kv-sizes", "8M,1G", "--kv-bandwidth", "9000G", "--kv-chart", str(chart), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["kv_trace"]
    none, few, many = found["tiers"]
    assert none["loaded_tokens"] == 0 and few["loaded_tokens"] < many["loaded_tokens"]
    assert many["hit_rate"] > 0.4 and many["saved_seconds"] > 0 and found["token_bytes"] > 100
    assert chart.read_bytes().startswith(b"\x89PNG")
    markers = [line for axes in drawn[0].axes for line in axes.lines if line.get_marker() in ("o", "s")]
    assert len(markers) == 2 and not any(line.get_clip_on() for line in markers), "markers at 0 are cut"
    assert main([*command, "--kv-bandwidth", "1k"]) == 0
    said = capsys.readouterr().out
    assert "does not pay" in said and "GB/s computing is sooner" in said


def test_saving_for_a_target_without_a_compiler_is_refused(tmp_path, capsys):
    assert main(["plan", "demo", "--target", "h100", "--save", str(tmp_path / "bundle")]) == USAGE
    assert "nothing was compiled" in capsys.readouterr().err
