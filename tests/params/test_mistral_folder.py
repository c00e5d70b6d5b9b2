"""A folder in Mistral's own format is the same model as the checkpoint in Hugging Face's."""

import json
import re

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpaged.engine.build import read_model
from jaxpaged.errors import CheckpointError
from jaxpaged.models.config import load_hf_config
from jaxpaged.models.registry import model_for
from jaxpaged.params.checkpoint import entries_of_folder
from jaxpaged.params.hub import DESCRIPTION_FILES, resolve_model_folder
from jaxpaged.params.orbax_format import copy_side_files
from tests.models.checkpoints import CONFIGS, make_tensors, write_checkpoint
from tests.models.quantised_checkpoints import MODELS, read, write_quantised
from tests.params.gguf_folder.gguf_checkpoints import turned
from tests.params.test_orbax_format import load_model

NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attention.w{part}" for part in "qkvo"},
    **{f"mlp.{part}_proj": f"feed_forward.w{i}" for part, i in (("gate", 1), ("down", 2), ("up", 3))},
    "block_sparse_moe": "feed_forward",
    "model.layers": "layers",
    "weight_scale_inv": "qscale_weight",
    "activation_scale": "qscale_act",
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "beta": 4.0, "alpha": 0.5, "apply_scale": False}
LARGER = {
    "mistral_full": {"sliding_window": None},
    "mistral_window": {"sliding_window": 11},
    "mixtral": {"moe": {"num_experts": 5, "num_experts_per_tok": 2}},
    "ministral3": {
        "rope_theta": 300.0,
        "yarn": YARN,
        "llama_4_scaling": {"original_max_position_embeddings": 16, "beta": 0.7},
        "q_lora_rank": None,
    },
}
"""Name of a checkpoint -> what its params.json has besides sizes."""


def params_of(hf):
    """params.json of a model."""
    sizes = {
        "dim": "hidden_size",
        "n_layers": "num_hidden_layers",
        "hidden_dim": "intermediate_size",
        "n_heads": "num_attention_heads",
        "n_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "vocab_size": "vocab_size",
        "norm_eps": "rms_norm_eps",
        "max_position_embeddings": "max_position_embeddings",
        "rope_theta": "rope_theta",
    }
    own = {ours: hf[theirs] for ours, theirs in sizes.items() if theirs in hf}
    return {**own, "tied_embeddings": hf["tie_word_embeddings"], "dtype": "float32"}


def write_native(folder, hf, tensors, num_files=1, **more):
    folder.mkdir()
    (folder / "params.json").write_text(json.dumps({**params_of(hf), **more}))
    own = {}
    for name, tensor in tensors.items():
        heads = {"q": hf["num_attention_heads"], "k": hf["num_key_value_heads"]}
        if found := re.search(r"\.([qk])_proj\.weight$", name):
            tensor = np.ascontiguousarray(turned(tensor, heads[found[1]]))
        for theirs, ours in NAMES.items():
            name = re.sub(rf"(^|\.){re.escape(theirs)}(?=\.|$)", rf"\1{ours}", name)
        own[name] = tensor
    for i in range(num_files):
        end = f"-0000{i + 1}-of-0000{num_files}" if num_files > 1 else ""
        save_file({name: own[name] for name in [*own][i::num_files]}, folder / f"consolidated{end}.safetensors")
    return folder


def loaded(folder):
    hf = load_hf_config(folder)
    _, config, params = load_model(model_for(hf), hf, folder)
    return config, params


def same(folder, other):
    (config, params), (expected, expected_params) = loaded(folder), loaded(other)
    jax.tree.map(np.testing.assert_array_equal, params, expected_params)
    return config, expected


@pytest.mark.parametrize("name", LARGER)
def test_a_folder_is_the_same_model_as_the_checkpoint(name, tmp_path):
    native = write_native(tmp_path / "native", CONFIGS[name], make_tensors(name), num_files=2, **LARGER[name])
    config, expected = same(native, write_checkpoint(name, tmp_path / "checkpoint"))
    assert config == expected


def test_weights_in_eight_bits_have_their_scales(tmp_path):
    folder = write_quantised(tmp_path / "hf", "fp8 of a tensor")
    hf, tensors = MODELS["llama"], read(folder / "model.safetensors")
    stored = {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}
    config, _ = same(write_native(tmp_path / "native", hf, tensors, quantization=stored), folder)
    assert config.quantization.method == "FP8"


@pytest.fixture
def native(tmp_path):
    """A folder of a Mistral."""
    return write_native(tmp_path / "native", CONFIGS["mistral_full"], make_tensors("mistral_full"))


def test_where_both_formats_are_there_config_json_counts(native):
    write_checkpoint("mistral_full", native)
    assert load_hf_config(native) == CONFIGS["mistral_full"]
    assert all(entry.path.name == "model.safetensors" for entry in entries_of_folder(native).values())


def test_what_is_made_of_a_folder_has_a_config_json(native, tmp_path):
    (tmp_path / "out").mkdir()
    copy_side_files(native, tmp_path / "out", dict)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]
    assert load_hf_config(tmp_path / "out") == load_hf_config(native)


def test_a_folder_of_the_hub_is_described_without_its_weights(native, tmp_path):
    repository = tmp_path / "models--somebody--something"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots").mkdir()
    native.rename(repository / "snapshots" / ("0" * 40))
    found = resolve_model_folder("somebody/something", download_dir=str(tmp_path), wanted=DESCRIPTION_FILES)
    assert load_hf_config(found)["architectures"] == ["MistralForCausalLM"]


def test_windows_may_be_a_list_that_comes_again(native):
    change(native, sliding_window=[None, "9"])
    with pytest.raises(CheckpointError, match=r"sliding_window is \[None, '9'\]; it must be a number"):
        load_hf_config(native)
    change(native, sliding_window=[9, None, None])
    found = load_hf_config(native)
    assert (found["sliding_window"], found["layer_types"]) == (9, ["sliding_attention", "full_attention"])


WRONG = {
    "dim is '48'; it must be a whole number from 1": {"dim": "48"},
    "n_layers is 0; it must be": {"n_layers": 0},
    "n_layers is 1000000000; it must be .* to 10,000": {"n_layers": 10**9, "sliding_window": [None, 4]},
    "n_kv_heads is True; it must be": {"n_kv_heads": True},
    "lacks vocab_size": {"vocab_size": None},
    "something is 3; nothing is known of this field": {"something": 3},
    "also reads images or audio .vision_encoder.": {"vision_encoder": {"hidden_size": 8}},
    "yarn is 4; it must be an object": {"yarn": 4},
    "yarn is .*; beta is missing": {"yarn": {"factor": 2.0, "original_max_position_embeddings": 8, "alpha": 1}},
    "yarn.gamma is 1; nothing is known": {"yarn": {**YARN, "gamma": 1}},
    "llama_4_scaling is .*; it must have beta, and the 16 tokens of yarn": {
        "yarn": YARN,
        "llama_4_scaling": {"original_max_position_embeddings": 8, "beta": 1.0},
    },
    "moe.num_experts_per_tok is None; it must be a whole number": {"moe": {"num_experts": 4}},
    "moe.num_experts is '4'; it must be a whole number": {"moe": {"num_experts": "4", "num_experts_per_tok": 2}},
    "moe.num_shared_experts is 1; nothing is known": {"moe": {"num_experts": 4, "num_shared_experts": 1}},
    "kv_lora_rank is 512; nothing is known": {"kv_lora_rank": 512},
    "only qformat_weight fp8_e4m3 is read": {"quantization": {"qformat_weight": "fp4"}},
    "quantization.config_groups is .*; nothing is known": {"quantization": {"config_groups": {"a": 1}}},
}


def change(folder, **changes):
    params = json.loads((folder / "params.json").read_text())
    (folder / "params.json").write_text(json.dumps({**params, **changes}))


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_field_is_an_error_that_names_it(words, native):
    change(native, **WRONG[words])
    with pytest.raises(CheckpointError, match=rf"params.json.* {words}|params.json {words}"):
        load_hf_config(native)


OF_MODEL = {
    "params.json: norm_eps is 0; it must be a positive number": {"norm_eps": 0},
    "params.json: tied_embeddings is 'yes'; it must be": {"tied_embeddings": "yes"},
    "params.json: activation is 'relu'; supported: silu": {"activation": "relu"},
    "params.json: n_heads is 8, no multiple of n_kv_heads, 3": {"n_kv_heads": 3},
    "params.json: yarn.beta is -1; it must be a positive": {"yarn": {**YARN, "beta": -1}},
    "params.json: moe.num_experts_per_tok is 9, but there are 4": {"moe": {"num_experts": 4, "num_experts_per_tok": 9}},
    "max_seq_len is 0; it must be a whole number": {"max_position_embeddings": None, "max_seq_len": 0},
}


@pytest.mark.parametrize("words", OF_MODEL)
def test_what_does_not_fit_a_model_is_named_as_the_file_names_it(words, native):
    change(native, **OF_MODEL[words])
    with pytest.raises(CheckpointError, match=words) as caught:
        read_model(native)
    assert "config.json" not in str(caught.value).replace("with config.json", "")


@pytest.mark.parametrize(
    ("content", "words"), [("[]", "holds a list, not a JSON object"), ("{", "cannot be read as JSON"), ("{}", "lacks")]
)
def test_a_damaged_description_is_an_error(content, words, native):
    (native / "params.json").write_text(content)
    with pytest.raises(CheckpointError, match=words):
        load_hf_config(native)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"layers.0.attention.wz.weight": (4, 4)}, "layers.0.attention.wz.weight, which is no part"),
        ({"vision_encoder.norm.weight": (4,)}, "vision_encoder.norm.weight, which is no part"),
        ({"layers.0.attention.wq.weight": (6, 4)}, r"\(6, 4\), whose rows are not those of the 8 heads"),
        ({"norm.weight": (4,)}, "tensors are missing"),
    ],
)
def test_tensors_that_do_not_fit_are_an_error(tensors, words, native):
    zeros = {name: np.zeros(shape, np.float32) for name, shape in tensors.items()}
    save_file(zeros, native / "consolidated.safetensors")
    with pytest.raises(CheckpointError, match=words):
        loaded(native)


def test_a_description_without_weights_says_what_is_missing(native):
    (native / "consolidated.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds params.json, but no consolidated\*.safetensors"):
        loaded(native)
