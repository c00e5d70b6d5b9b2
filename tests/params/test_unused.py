"""Tensors that nothing reads: the index decides which of two is meant, and what says something else is an error."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpaged.distributed.mesh import make_mesh
from jaxpaged.errors import CheckpointError
from jaxpaged.models.eagle3 import config_from_hf
from jaxpaged.models.pooling import pooling_model
from jaxpaged.models.registry import model_for
from jaxpaged.params.checkpoint import INDEX, check_folder, entries_of_folder, load_params
from jaxpaged.params.unused import ROWS_AT_ONCE, same_values
from tests.models.checkpoints import CONFIGS, make_tensors, write_checkpoint
from tests.models.draft_heads import write_eagle3
from tests.params.test_checkpoint import describe, load, write_sharded

NORM = "model.norm.weight"
TIED = "llama_mqa_bias_tied"


def shards(folder):
    return sorted(folder.glob("*.safetensors"))


def add_tensors(path, **tensors):
    save_file(load_file(path) | tensors, path)


def edit_index(folder, edit):
    index = json.loads((folder / INDEX).read_text())
    edit(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def holder(folder, name):
    """(the shard in which the index has a tensor, the other one)."""
    file = json.loads((folder / INDEX).read_text())["weight_map"][name]
    return folder / file, next(path for path in shards(folder) if path.name != file)


@pytest.mark.parametrize("name", [NORM, "lm_head.weight", "model.layers.0.self_attn.q_proj.weight"])
def test_of_two_equal_tensors_the_one_of_the_index_is_read(name, tmp_path):
    folder = write_sharded("llama", tmp_path)
    own, other = holder(folder, name)
    add_tensors(other, **{name: make_tensors("llama")[name]})
    assert entries_of_folder(folder)[name].path == own
    jax.tree.map(
        np.testing.assert_array_equal, load("llama", folder), load("llama", write_checkpoint("llama", tmp_path / "one"))
    )


@pytest.mark.parametrize("name", [NORM, "lm_head.weight", "model.layers.0.self_attn.q_proj.weight"])
@pytest.mark.parametrize("form", ["values", "shape", "another spelling"])
def test_a_second_tensor_that_says_otherwise_is_an_error_that_names_both_files(name, form, tmp_path):
    folder, tensor = write_sharded("llama", tmp_path), make_tensors("llama")[name]
    own, other = holder(folder, name)
    spelled = f"language_model.{name}" if form == "another spelling" else name
    add_tensors(other, **{spelled: tensor[:-1] if form == "shape" else -tensor})
    if spelled != name:
        edit_index(folder, lambda index: index.update({spelled: other.name}))
    with pytest.raises(CheckpointError, match="mean the same weight and have other values") as error:
        load("llama", folder)
    assert all(word in str(error.value) for word in (str(own), str(other), spelled))


@pytest.mark.parametrize("equal", [True, False])
def test_one_file_may_not_spell_a_weight_in_two_ways(equal, tmp_path):
    folder = write_checkpoint("llama", tmp_path)
    add_tensors(folder / "model.safetensors", **{"norm.weight": make_tensors("llama")[NORM] * (1 if equal else 2)})
    if equal:
        load("llama", folder)
    else:
        with pytest.raises(CheckpointError, match=f"norm.weight .* {NORM}|{NORM} .* norm.weight"):
            load("llama", folder)


@pytest.mark.parametrize("name", [NORM, "model.layers.1.mlp.up_proj.weight"])
def test_the_index_and_the_files_name_the_same_tensors(name, tmp_path):
    folder = write_sharded("llama", tmp_path)
    own, other = holder(folder, name)
    edit_index(folder, lambda index: index.pop(name))
    with pytest.raises(CheckpointError, match=rf"{own.name} holds {name}, which {INDEX} does not name"):
        load("llama", folder)
    edit_index(folder, lambda index: index.update({name: other.name}))
    with pytest.raises(CheckpointError, match=f"says that {name} is in {other.name}, but it is not there"):
        load("llama", folder)


def test_a_name_is_once_in_a_header_and_in_an_index(tmp_path):
    folder = write_sharded("llama", tmp_path)
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(
        text.replace('{"weight_map": {', f'{{"weight_map": {{"{NORM}": "model-1-of-2.safetensors", ')
    )
    with pytest.raises(CheckpointError, match="no readable map"):
        load("llama", folder)
    (folder / INDEX).write_text(text)
    data = shards(folder)[0].read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].replace(
        b"{", b'{"lm_head.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},', 1
    )
    shards(folder)[0].write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    with pytest.raises(CheckpointError, match="'lm_head.weight' is there twice"):
        load("llama", folder)


# ---- what something else stands for


def with_head(folder, name, head):
    write_checkpoint(name, folder)
    add_tensors(folder / "model.safetensors", **{"lm_head.weight": head})
    return folder


@pytest.mark.parametrize("name", [TIED, "gemma3", "cohere", "qwen2"])
def test_a_tied_head_is_stored_again_or_is_an_error_that_says_how_it_is_kept(name, tmp_path):
    table = make_tensors(name)["model.embed_tokens.weight"]
    params = load(name, with_head(tmp_path / "same", name, table))
    assert params.lm_head is None
    for i, other in enumerate((table * 1.5, table[::-1].copy(), table[:-1], table.astype(np.float16))):
        folder = with_head(tmp_path / str(i), name, other)
        with pytest.raises(CheckpointError, match='"tie_word_embeddings": false') as error:
            load(name, folder)
        assert str(folder) in str(error.value) and "lm_head.weight" in str(error.value)
    folder = with_head(tmp_path / "rounded alike", name, table.astype(np.float16).astype(np.float32))
    add_tensors(folder / "model.safetensors", **{"model.embed_tokens.weight": table.astype(np.float16)})
    load(name, folder)


def test_stages_and_drafts_are_checked_too(tmp_path):
    folder = with_head(tmp_path, TIED, make_tensors(TIED)["model.embed_tokens.weight"] * 2)
    specs, config = describe(TIED)
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        check_folder(specs, config, folder)


def test_a_pooling_engine_needs_no_head(tmp_path):
    folder, hf = write_checkpoint("llama", tmp_path), CONFIGS["llama"]
    model = pooling_model(model_for(hf), "embed")
    config = model.config_from_hf(hf)
    load_params(model.param_specs(config, 1), config, folder, make_mesh(1), jnp.float32)


def test_what_belongs_to_another_model_is_not_passed_over(tmp_path):
    """A classifier in a model that generates, eyes in one of text only, layers that predict further in one without, and
    tables of a head that drafts."""
    foreign = {
        "score.weight": "llama",
        "vision_tower.patch.weight": "llama",
        "multi_modal_projector.weight": "gemma3",
        "model.mtp_layers.0.input_proj.weight": "qwen2",
        "t2d": "llama",
        "d2t": "llama",
        "model.layers.9.self_attn.rotary_emb.inv_freq": "llama",
    }
    for i, (tensor, name) in enumerate(foreign.items()):
        folder = write_checkpoint(name, tmp_path / str(i))
        add_tensors(folder / "model.safetensors", **{tensor: np.zeros((3, 48), np.float32)})
        with pytest.raises(CheckpointError, match=f"not part of the model .* {tensor}"):
            load(name, folder)


def test_the_eyes_of_a_model_are_left_out_and_that_is_said_once(tmp_path, caplog):
    hf = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": CONFIGS["gemma3"],
        "vision_config": {},
    }
    folder, model = write_checkpoint("gemma3", tmp_path), model_for(hf)
    add_tensors(folder / "model.safetensors", **{f"vision_tower.{i}.weight": np.zeros(3, np.float32) for i in range(3)})
    config = model.config_from_hf(hf)
    load_params(model.param_specs(config, 1), config, folder, make_mesh(1), jnp.float32)
    assert [record.message for record in caplog.records if "images" in record.message] == [
        "3 tensors that read images are left out: of this model only the text part is served"
    ]


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_kept_frequencies_are_those_of_config_json(name, dtype, tmp_path):
    expected = 5000.0 ** -(np.arange(0, 12, 2) / 12)
    folder = write_checkpoint("llama", tmp_path)
    add_tensors(folder / "model.safetensors", **{name: expected.astype(dtype)})
    load("llama", folder)
    for other in (10000.0 ** -(np.arange(0, 12, 2) / 12), expected[:-1], expected / 4):
        add_tensors(folder / "model.safetensors", **{name: other.astype(dtype)})
        with pytest.raises(CheckpointError, match=f"{name} are not the frequencies of rope_theta 5000 "):
            load("llama", folder)


def damage_head(folder, **changes):
    add_tensors(folder / "model.safetensors", **changes)
    model = model_for(CONFIGS["llama"])
    return config_from_hf(
        json.loads((folder / "config.json").read_text()), folder, model.config_from_hf(CONFIGS["llama"])
    )


def test_both_tables_of_a_head_name_the_tokens_that_it_knows(tmp_path):
    folder = write_eagle3(tmp_path)
    tables = load_file(folder / "model.safetensors")
    damage_head(folder)
    moved, missing = tables["d2t"].copy(), tables["t2d"].copy()
    moved[-1] += 1
    missing[np.flatnonzero(missing)[0]] = False
    for changes in ({"d2t": moved}, {"t2d": missing}, {"t2d": ~tables["t2d"]}, {"t2d": tables["t2d"][:-1]}):
        with pytest.raises(CheckpointError, match="d2t and t2d do not say of the same 150 tokens"):
            damage_head(folder, **{"d2t": tables["d2t"], "t2d": tables["t2d"]} | changes)
    whole = write_eagle3(tmp_path / "whole", draft_vocab_size=CONFIGS["llama"]["vocab_size"])
    damage_head(whole, d2t=np.zeros(211, np.int64), t2d=np.ones(211, bool))
    with pytest.raises(CheckpointError, match="d2t and t2d do not say of the same 211"):
        damage_head(whole, d2t=np.arange(211), t2d=np.ones(211, bool))


def test_values_are_compared_to_the_last_row_and_across_types(tmp_path):
    table = np.random.default_rng(0).normal(size=(ROWS_AT_ONCE + 3, 2)).astype(ml_dtypes.bfloat16)
    other, nan = table.copy(), np.full((2, 2), np.nan, np.float32)
    other[-1, -1] += 1
    tensors = {"a": table, "b": table.astype(np.float32), "c": other, "scalar": np.float32(3), "nan": nan, "same": nan}
    save_file({name: np.asarray(each) for name, each in tensors.items()}, tmp_path / "model.safetensors")
    at = entries_of_folder(tmp_path)
    assert (
        same_values(at["a"], at["b"]) and same_values(at["scalar"], at["scalar"]) and same_values(at["nan"], at["same"])
    )
    assert not same_values(at["a"], at["c"]) and not same_values(at["b"], at["c"])
    assert not same_values(at["a"], replace(at["b"], shape=(2, ROWS_AT_ONCE + 3)))
