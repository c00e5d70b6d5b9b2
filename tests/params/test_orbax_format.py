"""Checkpoints in orbax format: what was saved comes back on any mesh, and damage is one clear error."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.distributed.mesh import make_mesh
from jaxpaged.errors import CheckpointError, UsageError
from jaxpaged.models.config import dtype_of, load_hf_config
from jaxpaged.models.registry import model_for
from jaxpaged.params import orbax_format
from jaxpaged.params.checkpoint import load_params
from jaxpaged.params.orbax_format import ARRAYS, save_orbax
from tests.models.checkpoints import write_checkpoint
from tests.models.seeing_checkpoints import SEEING, write_seeing_checkpoint


def load(folder, num_shards=1, dtype=jnp.float32, **changes):
    hf = {**load_hf_config(folder), **changes}
    return load_model(model_for(hf), hf, folder, num_shards, dtype)


def load_model(model, hf, folder, num_shards=1, dtype=jnp.float32):
    config = model.config_from_hf(hf)
    specs = model.param_specs(config, num_shards)
    return specs, config, load_params(specs, config, folder, make_mesh(num_shards), dtype)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(a checkpoint with fused projections and two key heads, the same converted)."""
    source = write_checkpoint("phi3", tmp_path_factory.mktemp("source"))
    (source / "tokenizer.json").write_text("{}")
    out = tmp_path_factory.mktemp("converted") / "model"
    specs, config, params = load(source)
    save_orbax(specs, config, params, source, out)
    return source, out


@pytest.mark.parametrize("num_shards", [1, 8])
def test_a_converted_checkpoint_loads_like_its_source(folders, num_shards):
    source, converted = folders
    expected, found = load(source, num_shards)[2], load(converted, num_shards)[2]
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert jax.tree.map(lambda x: x.sharding, found) == jax.tree.map(lambda x: x.sharding, expected)


def test_a_checkpoint_is_read_in_parts_and_each_is_told(folders, monkeypatch):
    source, converted = folders
    specs, config, expected = load(source)
    told = []
    monkeypatch.setattr(orbax_format, "BYTES_AT_ONCE", max(array.nbytes for array in jax.tree.leaves(expected)))
    found = load_params(specs, config, converted, make_mesh(1), jnp.float32, lambda *counts: told.append(counts))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    num_bytes = sum(array.nbytes for array in jax.tree.leaves(expected))
    assert len(told) > 2 and told == sorted(set(told)) and told[-1] == (num_bytes, num_bytes)


def test_weights_are_cast_at_load(folders):
    source, converted = folders
    expected, found = load(source, 8, jnp.bfloat16)[2], load(converted, 8, jnp.bfloat16)[2]
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert found.lm_head.dtype == jnp.bfloat16


def test_the_folder_is_a_model_by_itself(folders):
    source, converted = folders
    assert json.loads((converted / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    assert (converted / "tokenizer.json").exists()
    assert not list(converted.glob("*.safetensors"))


def test_the_config_names_the_type_of_the_arrays(folders, tmp_path):
    source, _ = folders
    save_orbax(*load(source, dtype=jnp.bfloat16), source, tmp_path)
    assert dtype_of(load_hf_config(tmp_path)) == "bfloat16"


def test_a_folder_that_is_not_empty_is_left_alone(folders):
    source, converted = folders
    with pytest.raises(UsageError, match="not empty"):
        save_orbax(*load(source), source, converted)


def test_padded_parameters_are_not_saved(folders, tmp_path):
    source, _ = folders
    with pytest.raises(UsageError, match="tensor_parallel_size 1"):
        save_orbax(*load(source, 8), source, tmp_path / "out")


def test_a_config_of_another_shape_is_an_error(folders):
    with pytest.raises(CheckpointError, match=r"mlp.gate_proj.weight has shape \(80, 64\), but .* \(96, 64\)"):
        load(folders[1], intermediate_size=96)


def test_a_config_with_more_layers_is_an_error(folders):
    with pytest.raises(CheckpointError, match="layers.2.input_layernorm.weight is missing"):
        load(folders[1], num_hidden_layers=3)


def test_a_damaged_folder_is_an_error(folders, tmp_path):
    source, _ = folders
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    (tmp_path / ARRAYS).mkdir()
    with pytest.raises(CheckpointError, match="jaxpaged convert"):
        load(tmp_path)


def test_truncated_arrays_are_an_error(folders, tmp_path):
    shutil.copytree(folders[1], tmp_path / "model")
    for path in (tmp_path / "model" / ARRAYS).rglob("d/*"):
        path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="jaxpaged convert"):
        load(tmp_path / "model")


def test_a_model_that_sees_comes_back_with_its_tower_or_without(tmp_path):
    name = "gemma3_seeing"
    hf, source, out = SEEING[name], write_seeing_checkpoint(name, tmp_path / "source"), tmp_path / "out"
    load_with = lambda folder, only_text: load_model(model_for(hf, only_text), hf, folder)
    specs, config, params = load_with(source, False)
    save_orbax(specs, config, params, source, out)
    for only_text, expected in ((False, params), (True, params.decoder)):
        *_, again = load_with(out, only_text)
        assert jax.tree.structure(again) == jax.tree.structure(expected)
        jax.tree.map(np.testing.assert_array_equal, again, expected)
