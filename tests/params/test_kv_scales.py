"""Scales of cached keys and values: every spelling of checkpoints, files of their own, and what is neither."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpaged.errors import CheckpointError, ConfigError
from jaxpaged.params.checkpoint import entries_of_folder, kv_scales_of
from jaxpaged.params.kv_scales import named_type, read_scales_file, rescaled, scales_file
from tests.models.checkpoints import write_checkpoint

LAYER = "model.layers.1."
K, V, HEADS = np.float32(0.25), np.float32(0.5), np.array([0.25, 2.0], np.float32)
SPELLINGS = {
    "of attention": ({"self_attn.k_scale": K, "self_attn.v_scale": V}, K, V),
    "of its kernel": ({"self_attn.attn.k_scale": K[None], "self_attn.attn.v_scale": V[None]}, K, V),
    "of projections": ({"self_attn.k_proj.k_scale": K, "self_attn.v_proj.v_scale": V}, K, V),
    "of one projection": ({"self_attn.qkv_proj.k_scale": K, "self_attn.qkv_proj.v_scale": V}, K, V),
    "of outputs": ({"self_attn.k_proj.output_scale": K, "self_attn.v_proj.output_scale": V}, K, V),
    "of both": ({"self_attn.kv_scale": K}, K, K),
    "by head": ({"self_attn.k_scale": HEADS[:, None, None], "self_attn.v_scale": V}, HEADS, V),
    "of keys only": ({"self_attn.k_scale": K, "self_attn.q_scale": V}, K, np.float32(1)),
}


def with_tensors(folder, tensors, layer=LAYER):
    """A tiny checkpoint with more tensors."""
    file = write_checkpoint("llama", folder) / "model.safetensors"
    more = {f"{layer}{name}": np.asarray(value) for name, value in tensors.items()}
    save_file({**load_file(file), **more}, file)
    return folder


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_of_a_checkpoint_is_read_and_no_weight_is_missed(spelling, tmp_path):
    plain = set(entries_of_folder(write_checkpoint("llama", tmp_path)))
    tensors, k, v = SPELLINGS[spelling]
    folder = with_tensors(tmp_path, tensors)
    found = kv_scales_of(folder, {0: 2, 1: 2})
    assert [*found] == [1]
    np.testing.assert_array_equal(found[1][0], k)
    np.testing.assert_array_equal(found[1][1], v)
    assert set(entries_of_folder(folder)) == plain


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.float32(0), "k_scale has the scale 0; scales must be finite numbers above 0"),
        (np.float32("nan"), "has the scale nan"),
        (np.array([1, np.inf], np.float32), "has the scale inf"),
        (np.float32(-1), "has the scale -1"),
        (np.ones(3, np.float32), "has 3 scales; there must be 1, or one for each of 2 kv heads"),
    ],
)
def test_scales_that_nothing_can_be_multiplied_with_are_refused_by_their_tensor(value, message, tmp_path):
    folder = with_tensors(tmp_path, {"self_attn.k_scale": value})
    with pytest.raises(CheckpointError, match=message):
        kv_scales_of(folder, {0: 2, 1: 2})


def test_two_scales_of_one_thing_must_be_equal(tmp_path):
    folder = with_tensors(tmp_path, {"self_attn.k_scale": K, "self_attn.k_proj.k_scale": V})
    with pytest.raises(CheckpointError, match="is another scale of what has one already"):
        kv_scales_of(folder, {0: 2, 1: 2})


def read(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return read_scales_file(path, num_layers=4, heads=dict.fromkeys(range(4), 4))


def test_a_file_says_again_what_was_written(tmp_path):
    scales = {
        0: (np.arange(1, 5, dtype=np.float32) / 7, np.float32(0.1).reshape(())),
        3: (K.reshape(()), V.reshape(())),
    }
    dtype, found = read(tmp_path / "x", scales_file("llama", "int8", scales))
    assert dtype == "int8" and found.keys() == scales.keys()
    for layer, pair in scales.items():
        for is_, should_be in zip(found[layer], pair, strict=True):
            np.testing.assert_array_equal(is_, should_be)


def test_files_of_vllm_have_a_scale_for_each_rank_and_layer(tmp_path):
    ranks = {"0": {"0": 0.5, "1": 2}, "1": {"0": 0.25, "1": {"k": [1, 3], "v": 4}}}
    said = {"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": ranks}}
    _, found = read(tmp_path / "x", said)
    assert [each.tolist() for each in found[0]] == [[0.5, 0.5, 0.25, 0.25]] * 2
    assert [each.tolist() for each in found[1]] == [[2, 2, 1, 3], [2, 2, 4, 4]]


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"0": {"0": "x"}}, "is no number"),
        ({"0": {"0": True}}, "is no number"),
        ({"0": {"0": 0}}, "layer 0 has the scale 0"),
        ({"0": {"0": 1e400}}, "layer 0 has the scale inf"),
        ({"0": {"0": [1, 2, 3]}}, "layer 0 has 3 scales"),
        ({"0": {"0": {"k": 1}}}, "KeyError: 'v'"),
        ({"0": {"4": 1}}, "has scales of layer 4, but the model has 4 layers"),
        ({"0": {}}, "different layers, or none"),
        ({"0": {"0": 1}, "1": {"0": 1, "1": 1}}, "different layers, or none"),
        ({"1": {"0": 1}}, "KeyError: '0'"),
        ({str(i): {"0": 1} for i in range(3)}, "has scales of 3 ranks, which 4 kv heads do not fit"),
        ([], "holds no scales"),
    ],
)
def test_files_that_hold_no_scales_are_refused_with_the_reason(scaling, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / "x", {"kv_cache": {"scaling_factor": scaling}})


def test_files_that_are_no_json_or_not_there_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no scales.*calibrate"):
        read(tmp_path / "x", "[" * 10_000)
    with pytest.raises(ConfigError, match="cannot read kv_cache_scales .*No such file"):
        read_scales_file(tmp_path / "y", 4, {})


def test_scales_found_for_one_type_let_another_end_at_the_same_number():
    (k, _) = rescaled({0: (K, V)}, 448.0, 127.0)[0]
    assert np.isclose(k * 127, K * 448)


def test_a_checkpoint_names_the_type_that_it_was_made_for(tmp_path):
    named = lambda **config: named_type({"quantization_config": config}, None)
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    assert named(quant_method="compressed-tensors", kv_cache_scheme=scheme) == "fp8_e4m3"
    assert named(kv_cache_scheme={**scheme, "type": "int"}) == "int8"
    assert named(kv_cache_scheme={**scheme, "dynamic": True}) == "fp8_per_token_head"
    assert named(quant_method="modelopt", kv_cache_quant_algo="FP8") == "fp8_e4m3"
    assert named(kv_cache_scheme=None) == named(kv_cache_scheme={**scheme, "num_bits": 4}) == named_type({}, None) == ""
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"kv_cache_quant_algo": "FP8"}}')
    assert named_type({}, tmp_path) == "fp8_e4m3"
