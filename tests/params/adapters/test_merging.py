"""`jaxpaged merge`: what a merged checkpoint holds, and which bases are refused. Logits: test_golden.py."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpaged.entrypoints.cli import main
from jaxpaged.params.adapters.targets import targets_of
from tests.models.adapted import GOLDEN, changed, read, specs_of, write_base
from tests.models.checkpoints import make_tensors
from tests.models.seeing_checkpoints import write_seeing_checkpoint
from tests.params.adapters.test_reading import parts_of, write

NAME = "model.layers.1.self_attn.q_proj.weight"


def test_weights_are_the_base_and_the_adapter_in_float64_and_the_others_are_the_bases(tmp_path):
    """In several files, in the base's type."""
    base = write_base("llama", tmp_path / "base")
    tensors = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in make_tensors("llama").items()}
    (base / "model.safetensors").unlink()
    index = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in set(index.values()):
        save_file({name: tensors[name] for name in tensors if index[name] == file}, base / file)
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert main(["merge", str(base), str(GOLDEN / "plain"), "-o", str(tmp_path / "out")]) == 0
    written = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert written == index
    found = {name: load_file(tmp_path / "out" / file)[name] for name, file in written.items()}
    adapter, targets = read(GOLDEN / "plain", base), targets_of(specs_of(base)[0])
    by_name = {f"{targets[path].module}.weight": (weights, targets[path]) for path, weights in adapter.weights.items()}
    assert len(by_name) == 8
    for name, tensor in tensors.items():
        expected = tensor
        if name in by_name:
            weights, target = by_name[name]
            shape = [*weights.b.shape[:-1], *weights.a.shape[1:]]
            expected = changed(tensor.reshape(shape), weights, target).reshape(tensor.shape).astype(ml_dtypes.bfloat16)
            assert not np.array_equal(expected, tensor)
        assert found[name].dtype == ml_dtypes.bfloat16
        difference = np.abs(found[name].astype(np.float32) - expected.astype(np.float32))
        assert difference.max() <= np.abs(expected.astype(np.float32)).max() * 2**-8  # a last bit of the rounding


def test_any_module_may_be_there_as_a_whole(tmp_path):
    config, tensors = parts_of("plain")
    config["modules_to_save"] = ["norm", "lm_head"]
    whole = {"norm": np.full(48, 3, "f"), "lm_head": np.full((211, 48), 0.5, "f")}
    tensors["base_model.model.model.norm.weight"] = whole["norm"]
    tensors["base_model.model.lm_head.weight"] = whole["lm_head"]
    base, adapter = write_base("llama", tmp_path / "base"), write(tmp_path / "adapter", config, tensors)
    assert main(["merge", str(base), str(adapter), "-o", str(tmp_path / "out")]) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    np.testing.assert_array_equal(found["model.norm.weight"], whole["norm"])
    np.testing.assert_array_equal(found["lm_head.weight"], whole["lm_head"])
    assert not np.array_equal(found[NAME], make_tensors("llama")[NAME])


TOWER_MODULES = {
    "qwen3_vl": (
        ("model.", "visual.blocks.1.attn.qkv"),
        ("model.", "visual.merger.linear_fc2"),
        ("model.language_model.", "layers.0.mlp.up_proj"),
    ),
    "gemma3_seeing": (
        ("model.vision_tower.vision_model.", "encoder.layers.1.mlp.fc1"),
        ("model.language_model.", "layers.2.self_attn.v_proj"),
    ),
}
"""Beginnings and ends of modules' names; the checkpoint may have another beginning."""


@pytest.mark.parametrize("name", TOWER_MODULES)
def test_towers_and_connectors_are_adapted_too(name, tmp_path):
    base = write_seeing_checkpoint(name, tmp_path / "base")
    tensors, rng = load_file(base / "model.safetensors"), np.random.default_rng(0)
    stored = {
        beginning + end: next(key for key in tensors if key.endswith(f"{end}.weight"))
        for beginning, end in TOWER_MODULES[name]
    }
    config, of_adapter, expected = parts_of("plain")[0], {}, {}
    for module, key in stored.items():
        outputs, inputs = tensors[key].shape
        a, b = rng.standard_normal((4, inputs), np.float32), rng.standard_normal((outputs, 4), np.float32)
        of_adapter |= {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
        expected[key] = tensors[key] + 1.5 * b @ a
    adapter = write(tmp_path / "adapter", config, of_adapter)
    assert main(["merge", str(base), str(adapter), "-o", str(tmp_path / "out")]) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    for key, tensor in tensors.items():
        np.testing.assert_allclose(found[key], expected.get(key, tensor), rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base("llama", tmp_path_factory.mktemp("base"))


def error_of(capsys, *arguments):
    assert main(["merge", *map(str, arguments)]) in (1, 2)
    return capsys.readouterr().err


def test_bases_in_other_forms_are_refused(base, tmp_path, capsys):
    rounded, orbax, out = tmp_path / "rounded", tmp_path / "orbax", tmp_path / "out"
    assert main(["convert", str(base), "-o", str(rounded), "--scheme", "W8A8"]) == 0
    assert main(["convert", str(base), "-o", str(orbax)]) == 0
    capsys.readouterr()
    assert "is quantised" in error_of(capsys, rounded, GOLDEN / "plain", "-o", out)
    assert "Name the folder that it was made of" in error_of(capsys, orbax, GOLDEN / "plain", "-o", out)
    assert not out.exists()


def test_an_adapter_of_another_model_and_a_full_folder_write_nothing(base, tmp_path, capsys):
    out = tmp_path / "out"
    assert "has shape" in error_of(capsys, base, GOLDEN / "rslora_patterns", "-o", out)
    assert not out.exists()
    (out / "inside").mkdir(parents=True)
    assert "not empty" in error_of(capsys, base, GOLDEN / "plain", "-o", out)
    assert "there is no folder" in error_of(capsys, base, tmp_path / "no where", "-o", tmp_path / "other")


def test_numbers_that_the_bases_type_cannot_hold_are_an_error(tmp_path, capsys):
    base = write_base("llama", tmp_path / "base")
    tensors = {name: tensor.astype(np.float16) for name, tensor in make_tensors("llama").items()}
    save_file(tensors, base / "model.safetensors")
    config, of_adapter = parts_of("plain")
    of_adapter["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"] *= 1e7
    adapter = write(tmp_path / "adapter", config, of_adapter)
    words = error_of(capsys, base, adapter, "-o", tmp_path / "out")
    assert NAME in words and "F16 cannot hold" in words
