"""scripts/count_step.py: what it says of programs, and that no count grows.

`counts.json` has the counts of two small models on an H100 and of one on a v6e: of a further layer, and of a program.
A count that grows by more than 3 % fails. `python -m tests.scripts.test_count_step` writes them anew, with the
extras `aot-gpu` or `aot-tpu` those of a GPU or a TPU.
"""

import importlib
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from jaxpaged.engine.build import read_model
from jaxpaged.messages import ProgramKey
from jaxpaged.tools.planning.targets import parse_target
from pallas_kernels import gpu_targets, tpu_targets
from tests.models.checkpoints import write_checkpoint
from tests.scripts.conftest import SCRIPTS

COUNTS = Path(__file__).with_name("counts.json")
MOST = 1.03
OPTIONS = {
    "max_num_seqs": 64,
    "token_buckets": (8, 64),
    "max_model_len": 64,
    "block_size": 16,
    "dtype": "bfloat16",
    "num_gpu_blocks_override": 200,
}
SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_heads": 8, "num_kv_heads": 2, "head_dim": 128}
SIZES |= {"vocab_size": 32768, "dtype": "bfloat16"}
ON_GPU = {
    "llama": ["decode:8", "decode:64", "forward:64", "sample_full:64"],
    "lfm2": ["decode:8", "forward:64"],
}
NEIGHBOURS = {"llama": ["decode_full:8", "forward:8", "forward_shared:64", "sample:64", "sample_masked:64"]}
"""Programs for a GPU whose layers, or whose draws, are those of programs that are counted in each run."""
ON_TPU = {"llama": ["decode:64", "forward:64", "sample_full:64"]}
AOT_GPU = [
    pytest.mark.aot_gpu,
    pytest.mark.skipif(gpu_targets.why_not() is not None, reason=str(gpu_targets.why_not())),
]
AOT_TPU = [
    pytest.mark.aot_tpu,
    pytest.mark.skipif(tpu_targets.why_not() is not None, reason=str(tpu_targets.why_not())),
]


def script():
    return importlib.import_module("count_step")


def counting(name, target, folder):
    """Of a small model with four layers like its first, and before them the first one that attends if that is of
    another kind."""
    model, decoder = read_model(write_checkpoint(name, folder / "model"))
    first, *_ = decoder.layers
    attending = [each for each in decoder.layers if each.mixer != first.mixer][:1]
    layers = (*attending, *[first] * 4)
    decoder = replace(decoder, num_layers=len(layers), layers=layers, **SIZES)
    return script().Counting(model, decoder, parse_target(target), folder, **OPTIONS)


def counted(name, target, programs, folder, depths):
    """Program -> {"layer": counts, "program": counts of the larger depth}."""
    own, found = counting(name, target, folder), {}
    for word in programs:
        kind, size = word.split(":")
        program, layer, _ = own.program(ProgramKey(kind, int(size)), depths)
        found[word] = {"layer": nonzero(layer), "program": nonzero(program.counts)}
    return found


def nonzero(counts):
    return {name: round(value, 3) for name, value in sorted(counts.items()) if value}


def grown(found, stored):
    """What is more than it was, in words."""
    for word, sides in found.items():
        for side, counts in sides.items():
            for name, value in counts.items():
                was = stored.get(word, {}).get(side, {}).get(name, 0)
                if value > MOST * was and value - was > 0.5:
                    yield f"{word}, {side}: {name} was {was}, and is {value}"


def check(name, target, programs, folder, depths):
    stored = json.loads(COUNTS.read_text(encoding="utf-8"))[f"{name} on {target}"]
    if stored["jax"] != jax.__version__:
        pytest.skip(f"the counts are of jax {stored['jax']}, and this is {jax.__version__}")
    found = counted(name, target, programs, folder, depths)
    assert found.keys() <= stored["programs"].keys(), "write the counts of other programs with this file's command"
    assert list(grown(found, stored["programs"])) == []
    return found


@pytest.mark.parametrize(
    ("name", "programs"),
    [
        *(pytest.param(name, programs, id=name, marks=AOT_GPU) for name, programs in ON_GPU.items()),
        *(
            pytest.param(name, programs, id=f"{name}, neighbours", marks=[*AOT_GPU, pytest.mark.exhaustive])
            for name, programs in NEIGHBOURS.items()
        ),
    ],
)
def test_no_count_grows_on_a_gpu_and_no_step_waits_for_the_host(name, programs, tmp_path):
    found = check(name, "h100", programs, tmp_path, GPU_DEPTHS[name])
    for word, sides in found.items():
        assert "loops the host reads" not in sides["program"] and "host_waits (seen)" not in sides["program"], word
        assert sides["program"]["graphs (seen)"] == 1 and "singly (seen)" not in sides["program"], word


@pytest.mark.parametrize("name", [pytest.param(name, marks=AOT_TPU) for name in ON_TPU])
def test_no_count_grows_on_a_tpu(name, tmp_path):
    check(name, "v6e:1x1", ON_TPU[name], tmp_path, TPU_DEPTHS)


GPU_DEPTHS, TPU_DEPTHS = {"llama": (2, 4), "lfm2": (2, 4)}, (2, 2)


def test_a_count_may_grow_by_three_hundredths_and_no_more():
    stored = {"forward:8": {"program": {"launches": 100, "bytes": 1000.0}}}
    of = lambda launches, bytes: {"forward:8": {"program": {"launches": launches, "bytes": bytes}}}
    assert not list(grown(of(103, 900.0), stored))
    assert list(grown(of(104, 900.0), stored)) == ["forward:8, program: launches was 100, and is 104"]
    assert len(list(grown({**of(100, 1100.0), "sample:8": {"program": {"launches": 1}}}, stored))) == 2


def test_layers_repeat_from_the_depth_at_which_all_kinds_are_there(tmp_path):
    _, decoder = read_model(write_checkpoint("llama", tmp_path))
    first = decoder.layers[0]
    other = replace(first, window=7)
    depths = lambda *layers: script().depths_of(replace(decoder, num_layers=len(layers), layers=layers))
    assert depths(*[first] * 8) == (2, 3)
    assert depths(*[first, other] * 4) == (2, 4)
    assert depths(other, other, other, *[first] * 5) == (3, 4)
    assert depths(first) == (1, 1)


def test_the_least_of_a_program_is_that_of_the_last_stage_where_there_are_several(tmp_path):
    target, key = parse_target("v6e:2x2", compile=False), ProgramKey("decode", 8)
    model, decoder = read_model(write_checkpoint("deepseek_v3", tmp_path / "model"))
    of = lambda stages: script().Counting(
        model,
        decoder,
        target,
        tmp_path,
        **OPTIONS,
        tensor_parallel_size=2,
        pipeline_parallel_size=stages,
        attention_backend="reference",
    )
    whole, last = of(1).minimum(key, 64), of(2).minimum(key, 64)
    assert (last.kv_written, last.logits) == (whole.kv_written / 3, whole.logits), "one of three layers"
    assert 0 < last.activations < whole.activations / 2


def write():
    """The counts of what compiles here."""
    sys.path.insert(0, str(SCRIPTS))
    stored = json.loads(COUNTS.read_text(encoding="utf-8")) if COUNTS.exists() else {}
    on_gpu = {name: [*programs, *NEIGHBOURS.get(name, [])] for name, programs in ON_GPU.items()}
    cases = [("h100", name, on_gpu[name], GPU_DEPTHS[name]) for name in on_gpu if gpu_targets.why_not() is None]
    cases += [("v6e:1x1", name, ON_TPU[name], TPU_DEPTHS) for name in ON_TPU if tpu_targets.why_not() is None]
    for target, name, programs, depths in cases:
        with tempfile.TemporaryDirectory() as folder:
            found = counted(name, target, programs, Path(folder), depths)
        stored[f"{name} on {target}"] = {"jax": jax.__version__, "programs": found}
    COUNTS.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
