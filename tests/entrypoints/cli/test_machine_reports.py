"""`jaxpaged collect-env` and `jaxpaged models`: reports about this machine, from files, and without secrets."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpaged.entrypoints.cli import machine, main, models
from jaxpaged.models.known import KNOWN
from jaxpaged.tools import collect_env

ROOT = Path(__file__).parents[3]


def test_the_report_names_versions_and_settings_and_no_secret(monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_precious")
    monkeypatch.setenv("HF_HUB_SOME_TOKEN", "precious")
    monkeypatch.setenv("XLA_FLAGS", "--xla_something=1")
    monkeypatch.setenv("MY_OWN", "precious")
    assert main(["collect-env", "--no-devices"]) == 0
    shown = capsys.readouterr().out
    assert "--xla_something=1" in shown and "precious" not in shown and "HF_TOKEN" in shown
    assert "jax " in shown and "memory" in shown


def test_the_report_can_be_read_by_programs(capsys):
    assert main(["collect-env", "--no-devices", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["packages"]["jax"][0].isdigit() and "llvmlite" in report["packages"]
    assert report["machine"]["memory"].endswith("iB")


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import json; print(json.dumps(['cpu:0 cpu']))", "cpu:0 cpu"),
        ("raise SystemExit('no driver')", "status 1: no driver"),
        ("import os; os.abort()", "jax ended with status -6"),
        ("import time; time.sleep(60)", "did not find its devices within 1 s"),
    ],
)
def test_devices_that_hang_or_crash_are_a_line_of_the_report(monkeypatch, program, said):
    monkeypatch.setattr(collect_env, "DEVICES", program)
    monkeypatch.setattr(collect_env, "DEVICE_SECONDS", 1.0 if "sleep" in program else 60.0)
    assert said in collect_env.devices()


@pytest.mark.parametrize("command", [["models"], ["models", "--supported"], ["collect-env", "--no-devices"]])
def test_neither_imports_jax_or_asks_the_network(command, tmp_path):
    program = f"""
import socket, sys
socket.socket.connect = None
from jaxpaged.entrypoints.cli import main
assert main({command!r}) == 0
assert not {{"jax", "transformers"}} & sys.modules.keys()
"""
    environment = {**os.environ, "HF_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, check=True, capture_output=True)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of the hub's form, and a host with 1000 bytes of memory."""

    def add(name, files):
        folder = tmp_path / f"models--{name.replace('/', '--')}"
        snapshot = folder / "snapshots" / "abc123"
        snapshot.mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("abc123")
        for file, content in files.items():
            (snapshot / file).write_text(content if isinstance(content, str) else json.dumps(content))

    monkeypatch.setattr(models, "gpus", list)
    monkeypatch.setattr(models, "num_tpu_chips", int)
    monkeypatch.setattr(models, "host_memory_bytes", lambda: 1000)
    add(
        "org/small",
        {
            "config.json": {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096},
            "model.safetensors": "x" * 900,
        },
    )
    add("org/large", {"config.json": {"architectures": ["LlamaForCausalLM"]}, "model.safetensors": "x" * 901})
    index = {"weight_map": {"p": "a.safetensors", "q": "b.safetensors"}}
    add(
        "org/torn",
        {
            "config.json": {"architectures": ["Qwen3ForCausalLM"]},
            "a.safetensors": "x",
            "model.safetensors.index.json": index,
        },
    )
    add("org/torch", {"config.json": {"architectures": ["LlamaForCausalLM"]}, "pytorch_model.bin": "x"})
    add("org/bare", {"README.md": "x"})
    add("org/odd", {"config.json": [1]})
    sizes = dict.fromkeys(("dim", "n_layers", "hidden_dim", "n_heads", "vocab_size"), 8)
    params = {**sizes, "norm_eps": 1e-5, "max_seq_len": 512}
    add("org/native", {"params.json": params, "consolidated.safetensors": "x" * 800})
    add("org/native-eyes", {"params.json": {**params, "vision_encoder": {"dim": 8}}, "consolidated.safetensors": "x"})
    return tmp_path


def test_models_of_the_cache_are_listed_with_what_fits(cache, capsys):
    assert main(["models", "--download-dir", str(cache), "--json"]) == 0
    listed = {model["name"]: model for model in map(json.loads, capsys.readouterr().out.splitlines())}
    assert next(iter(listed)) == "demo" and not listed["demo"]["fits"], "of 1000 bytes"
    assert listed["demo-vision"]["weights_bytes"] > listed["demo"]["weights_bytes"], "text and tower"
    assert listed["org/small"] == {
        "name": "org/small",
        "architecture": "LlamaForCausalLM",
        "max_model_len": 4096,
        "weights_bytes": 900,
        "fits": True,
        "remark": "",
    }
    assert not listed["org/large"]["fits"]
    native = listed["org/native"]
    assert (native["architecture"], native["max_model_len"]) == ("MistralForCausalLM", 512)
    assert (native["weights_bytes"], native["fits"], native["remark"]) == (800, True, "")
    remarks = {name: listed[f"org/{name}"]["remark"] for name in ("torn", "torch", "bare", "odd", "native-eyes")}
    assert remarks == {
        "torn": "1 files of weights missing",
        "torch": "no safetensors",
        "bare": "no config.json",
        "odd": "no config.json",
        "native-eyes": "params.json not known",
    }


def test_the_list_for_people_has_a_line_a_model(cache, capsys):
    assert main(["models", "--download-dir", str(cache)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 11 and "too large" in next(line for line in lines if "org/large" in line)
    assert "fits" in next(line for line in lines if "org/small" in line)


def test_without_a_cache_there_are_the_embedded_models(tmp_path, capsys):
    assert main(["models", "--download-dir", str(tmp_path / "none")]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["demo", "demo-vision"]


def test_what_is_supported_is_a_table_for_people_and_objects_for_programs(capsys):
    assert main(["models", "--supported"]) == 0
    shown = capsys.readouterr().out
    lines = {line.split()[0]: line for line in shown.splitlines() if line}
    assert lines["Qwen3ForCausalLM"].split() == ["Qwen3ForCausalLM", "text", "qwen3", "Qwen", "3"]
    assert "text, pictures" in lines["Qwen3VLForConditionalGeneration"]
    assert "text *" in lines["Llama4ForConditionalGeneration"]
    assert "text *   text, with --language-model-only" in shown and "awq" in lines["weights"]
    assert main(["models", "--supported", "--json"]) == 0
    found = {each["architecture"]: each for each in map(json.loads, capsys.readouterr().out.splitlines())}
    assert found.keys() == {known.architecture for known in KNOWN}
    assert found["GptOssForCausalLM"] == {
        "architecture": "GptOssForCausalLM",
        "models": ["GPT-OSS"],
        "reads": ["text"],
        "language_model_only": False,
        "serves": ["generate", "embed", "classify"],
        "weights": ["safetensors", "fp8", "gptq", "awq", "compressed-tensors", "modelopt", "mxfp4", "gguf"],
        "gguf_architecture": "gpt-oss",
    }
    assert (
        found["LlamaForCausalLM"]["weights"][-1] == "gguf" and found["LlamaForCausalLM"]["gguf_architecture"] == "llama"
    )
    assert found["Gemma3ForConditionalGeneration"]["reads"] == ["text", "pictures"]
    assert found["Llama4ForConditionalGeneration"]["language_model_only"]


def test_a_cache_is_not_asked_what_is_supported(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["models", "--supported", "--download-dir", "/tmp"])
    assert ended.value.code == 2 and "not allowed with" in capsys.readouterr().err


def test_a_container_may_have_less_memory_than_its_machine(tmp_path, monkeypatch):
    whole = machine.host_memory_bytes()
    monkeypatch.setattr(machine, "CGROUP_LIMIT", tmp_path / "memory.max")
    for text, expected in (("4096\n", 4096), ("max\n", None), ("", None)):
        (tmp_path / "memory.max").write_text(text)
        assert machine.host_memory_bytes() == (expected or machine.host_memory_bytes())
    assert whole > 0


def test_gpus_are_those_that_the_driver_shows(monkeypatch):
    said = "NVIDIA H100, 81559\nNVIDIA A, with comma, 1024\nnonsense\n"
    monkeypatch.setattr(machine, "output_of", lambda *_: said)
    assert machine.gpus() == [("NVIDIA H100", 81559 * 2**20), ("NVIDIA A, with comma", 2**30)]
