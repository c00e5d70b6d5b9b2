"""A GGUF file of a model is the same model as its checkpoint: equal descriptions, and equal parameters."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

from jaxpaged.errors import CheckpointError
from jaxpaged.layers.rope import inverse_frequencies
from jaxpaged.models.config import load_hf_config
from jaxpaged.models.registry import model_for
from jaxpaged.params.gguf_folder.folder import make_folder
from tests.params.formats.gguf.writer import write_gguf
from tests.params.gguf_folder.gguf_checkpoints import (
    config_of,
    facts_of,
    tensors_of,
    tensors_of_checkpoint,
    write_gguf_checkpoint,
    write_hf_checkpoint,
)
from tests.params.test_orbax_format import load_model

NAMES = [
    "llama",
    "llama_mqa_bias_tied",
    "llama_linear",
    "llama_yarn",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen2_moe",
    "qwen3_moe",
    "gemma2",
    "gemma3",
    "phi3",
    "phi3_partial",
    "phi3_longrope_long",
    "olmo2",
    "granite",
    "smollm3",
    "glm4",
    "cohere",
    "cohere2",
    "seed_oss",
    "exaone4",
    "exaone4_full",
    "olmo3",
    "arcee",
    "apertus",
    "ernie4_5",
    "ernie4_5_moe",
    "minimax_m2",
    "glm4_moe",
    "gpt_oss",
    "lfm2",
    "lfm2_moe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "ministral3",
    "mistral4",
    "llama4",
    "hy_v3",
    "mimo_v2",
    "gemma4",
    "gemma4_moe",
    "laguna",
    "laguna_per_number",
]
OTHERWISE_SAID = ("quantization", "dtype", "eos_token_ids", "bos_token_id")
"""Fields that say the same of the checkpoint and of the file in other words, or nothing that is computed with."""
SAME = {"Glm4MoeLiteForCausalLM": "DeepseekV3ForCausalLM"}
"""An architecture that files call by the name of another one, whose layers it has."""


def loaded(folder):
    hf = load_hf_config(folder)
    _, config, params = load_model(model_for(hf, language_model_only=True), hf, folder)
    return config, params


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_the_same_model_as_the_checkpoint(name, tmp_path):
    folder = make_folder(write_gguf_checkpoint(name, tmp_path / f"{name}.gguf"), tmp_path / "cache")
    config, params = loaded(folder)
    expected, expected_params = loaded(write_hf_checkpoint(name, tmp_path / "checkpoint"))
    for field in dataclasses.fields(expected):
        if field.name not in OTHERWISE_SAID:
            found, wanted = getattr(config, field.name), getattr(expected, field.name)
            wanted = SAME.get(wanted, wanted) if field.name == "architecture" else wanted
            assert found == wanted, f"{field.name}: {found} and not {wanted}"
    lost = 1e-6 if config.offset_norms else 0  # Gemma's norms, to which 1 was added in float32
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=lost), params, expected_params)


def fused_heads(tensors):
    """With queries, keys and values of a layer in one matrix, one behind the other."""
    made, parts = {}, {}
    for name, tensor in tensors.items():
        layer, _, own = name.rpartition(".attn_")
        if own in ("q.weight", "k.weight", "v.weight"):
            parts.setdefault(layer, {})[own[0]] = tensor
        else:
            made[name] = tensor
    fused = {f"{layer}.attn_qkv.weight": np.concatenate([own[part] for part in "qkv"]) for layer, own in parts.items()}
    return {**made, **fused}


def test_newer_files_of_mimo_have_queries_keys_and_values_in_one_matrix(tmp_path):
    hf, apart = config_of("mimo_v2"), tensors_of(config_of("mimo_v2"), tensors_of_checkpoint("mimo_v2"))
    tensors = fused_heads(apart)
    assert "blk.0.attn_qkv.weight" in tensors and "blk.0.attn_q.weight" not in tensors
    found = loaded(make_folder(write_gguf(tmp_path / "a.gguf", facts_of(hf), tensors), tmp_path / "cache"))
    expected = loaded(make_folder(write_gguf(tmp_path / "b.gguf", facts_of(hf), apart), tmp_path / "cache"))
    assert found[0].layers == expected[0].layers
    jax.tree.map(np.testing.assert_array_equal, found[1], expected[1])
    torn = {**tensors, "blk.0.attn_qkv.weight": tensors["blk.0.attn_qkv.weight"][:-1]}
    with pytest.raises(CheckpointError, match="attn_qkv.weight has the shape .* which is not that of"):
        make_folder(write_gguf(tmp_path / "c.gguf", facts_of(hf), torn), tmp_path / "cache")


def test_factors_of_single_frequencies_are_those_of_llama_3(tmp_path):
    folder = make_folder(write_gguf_checkpoint("llama3", tmp_path / "a.gguf"), tmp_path / "cache")
    found, expected = (
        model_for(hf).config_from_hf(hf).layers[0].rope for hf in (load_hf_config(folder), config_of("llama3"))
    )
    assert found.attention_factor == expected.attention_factor == 1.0
    np.testing.assert_allclose(inverse_frequencies(found, 64), inverse_frequencies(expected, 64), rtol=1e-6)


def test_windows_may_be_listed_layer_by_layer(tmp_path):
    listed = {"gemma3.attention.sliding_window_pattern": np.array([1, 1, 0], np.int32)}
    folder = make_folder(write_gguf_checkpoint("gemma3", tmp_path / "a.gguf", listed), tmp_path / "cache")
    hf = load_hf_config(folder)
    assert [layer.window for layer in model_for(hf).config_from_hf(hf).layers] == [10, 10, None]


@pytest.mark.parametrize(("name", "seeing"), [("qwen2", "qwen2vl"), ("qwen3", "qwen3vl"), ("qwen3_moe", "qwen3vlmoe")])
def test_files_of_models_that_see_hold_their_language_model(name, seeing, tmp_path):
    hf = config_of(name)
    own = [(fact.partition(".")[2], value) for fact, value in facts_of(hf).items() if not fact.startswith("general.")]
    facts = {f"{seeing}.{fact}": value for fact, value in own}
    facts |= {"general.architecture": seeing, f"{seeing}.rope.dimension_sections": [2, 2, 4, 0]}
    facts |= {f"{seeing}.n_deepstack_layers": 3}
    path = write_gguf(tmp_path / "a.gguf", facts, tensors_of(hf, tensors_of_checkpoint(name)))
    config, params = loaded(make_folder(path, tmp_path / "cache"))
    expected, expected_params = loaded(write_hf_checkpoint(name, tmp_path / "checkpoint"))
    assert config.layers == expected.layers and config.experts == expected.experts
    jax.tree.map(np.testing.assert_array_equal, params, expected_params)
