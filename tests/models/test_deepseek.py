"""What DeepSeek's checkpoints say and hold beyond what goldens show: published descriptions, layers that predict
further tokens, and weights of 8 bits with a scale for every block."""

import logging
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpaged.distributed.mesh import make_mesh
from jaxpaged.errors import CheckpointError
from jaxpaged.kv_cache_spec import LatentSpec
from jaxpaged.models.config import facts_text
from jaxpaged.models.registry import model_for
from jaxpaged.params.checkpoint import load_params
from jaxpaged.params.quantized import is_quantized
from jaxpaged.params.schemes.fp8 import Float8
from tests.models.checkpoints import DEEPSEEK_V2, DEEPSEEK_V3, prompt_of, write_checkpoint
from tests.models.paged import PagedModel
from tests.models.test_quantized import written_out

YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
PUBLISHED_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
KIMI_K2 = {
    **PUBLISHED_V3,
    "model_type": "kimi_k2",
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "vocab_size": 163840,
    "rope_scaling": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
}
BLOCK = (16, 8)
QUANTIZATION = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}


def parse(hf):
    return model_for(hf).config_from_hf(hf)


def test_published_descriptions_are_understood():
    v3, kimi = parse(PUBLISHED_V3), parse(KIMI_K2)
    assert v3.sparse_layers == tuple(range(3, 61))
    assert kimi.sparse_layers == tuple(range(1, 61))
    assert v3.query_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert kimi.experts.num_experts == 384
    assert (v3.max_position_embeddings, kimi.max_position_embeddings) == (163840, 131072)
    assert v3.layers[0].rope.attention_factor == 1.0
    assert (v3.quantization.default, v3.num_mtp_layers) == (Float8((128, 128)), 1)
    assert "weight_block=(128, 128)" in facts_text(v3)  # as pages on disks were first named
    # 576 numbers a token and layer, however many devices split the 128 heads.
    assert model_for(PUBLISHED_V3).attention_specs(v3, 64, 2, 64) == [LatentSpec(64, 576, 2, latent_dim=512)] * 61


def test_experts_are_in_every_nth_layer_behind_the_dense_ones():
    hf = {**DEEPSEEK_V3, "num_hidden_layers": 8, "first_k_dense_replace": 3, "moe_layer_freq": 2}
    assert parse(hf).sparse_layers == (4, 6)


@pytest.mark.parametrize(
    ("hf", "message"),
    [
        ({**DEEPSEEK_V2, "norm_topk_prob": True}, "norm_topk_prob is true"),
        ({**DEEPSEEK_V2, "topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        ({**DEEPSEEK_V3, "scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({**DEEPSEEK_V3, "num_experts_per_tok": 9}, "the groups of a token have 8"),
        ({**DEEPSEEK_V3, "qk_rope_head_dim": 7, "qk_nope_head_dim": 9}, "rotates 7 of head_dim 7"),
        ({**DEEPSEEK_V3, "quantization_config": {"quant_method": "hqq"}}, "quantised with HQQ"),
        (
            {**DEEPSEEK_V3, "quantization_config": {**QUANTIZATION, "weight_block_size": [128]}},
            r"weight_block_size is \[128\]; it must be two positive whole numbers",
        ),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(hf, message):
    with pytest.raises(CheckpointError, match=message):
        parse(hf)


def load(folder, hf):
    model = model_for(hf)
    config = model.config_from_hf(hf)
    return load_params(model.param_specs(config, 2), config, folder, make_mesh(2), jnp.float32)


def test_layers_that_predict_further_tokens_are_left_out_and_named(tmp_path, caplog):
    write_checkpoint("deepseek_v3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "model.layers.3.eh_proj.weight": np.zeros((3, 3))}, tmp_path / "model.safetensors")
    with caplog.at_level(logging.INFO):
        load(tmp_path, {**DEEPSEEK_V3, "num_nextn_predict_layers": 1})
    assert "layers that predict further tokens (model.layers.3.)" in caplog.text
    with pytest.raises(CheckpointError, match=r"layers\.3\.eh_proj"):
        load(tmp_path, DEEPSEEK_V3)


def in_blocks(weight):
    """(8-bit values, scales of blocks, what both stand for), computed block by block."""
    rows, columns = BLOCK
    values, exact = np.zeros(weight.shape, ml_dtypes.float8_e4m3fn), np.zeros_like(weight)
    scales = np.zeros((-(-weight.shape[0] // rows), -(-weight.shape[1] // columns)), np.float32)
    for i, j in np.ndindex(scales.shape):
        here = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        scales[i, j] = np.abs(weight[here]).max() / 448
        values[here] = (weight[here] / scales[i, j]).astype(values.dtype)
        exact[here] = values[here].astype(np.float32) * scales[i, j]
    return values, scales, exact


def write_in_blocks(folder):
    """The checkpoint with its projections in blocks of 8 bits -> what loads of it and of their exact values hold."""
    write_checkpoint("deepseek_v3", folder)
    tensors, exact = load_file(folder / "model.safetensors"), {}
    for name, weight in list(tensors.items()):
        exact[name] = weight
        if name.endswith("_proj.weight") or "kv_a_proj" in name:
            tensors[name], tensors[f"{name}_scale_inv"], exact[name] = in_blocks(weight)
    (folder / "exact").mkdir()
    save_file(exact, folder / "exact" / "model.safetensors")
    save_file(tensors, folder / "model.safetensors")
    return tensors


def test_weights_with_a_scale_for_every_block_are_their_values_times_the_scales(tmp_path):
    write_in_blocks(tmp_path)
    params = load(tmp_path, {**DEEPSEEK_V3, "quantization_config": QUANTIZATION})
    jax.tree.map(np.testing.assert_array_equal, params, load(tmp_path / "exact", DEEPSEEK_V3))


def test_scales_that_do_not_belong_to_their_weights_are_refused(tmp_path):
    tensors, hf = write_in_blocks(tmp_path), {**DEEPSEEK_V3, "quantization_config": QUANTIZATION}
    name = "model.layers.1.self_attn.o_proj.weight"
    with pytest.raises(CheckpointError, match="weight_scale_inv has shape .*blocks of 16 x 16"):
        load(tmp_path, {**hf, "quantization_config": {**QUANTIZATION, "weight_block_size": [16, 16]}})
    with pytest.raises(CheckpointError, match="are not part of the model"):
        load(tmp_path, DEEPSEEK_V3)
    listed = {**QUANTIZATION, "ignored_layers": ["model.layers.0.self_attn.o_proj"]}
    with pytest.raises(CheckpointError, match=r"not say that .*0.self_attn.o_proj is quantised, but .* holds"):
        load(tmp_path, {**hf, "quantization_config": listed})
    del tensors[f"{name}_scale_inv"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name}_scale is missing"):
        load(tmp_path, hf)


def test_latents_meet_weights_of_8_bits(tmp_path):
    write_checkpoint("deepseek_v3", tmp_path)
    rounded, exact = PagedModel(tmp_path, 2, quantization="int8"), PagedModel(tmp_path)
    exact.params = jax.tree.map(written_out, PagedModel(tmp_path, quantization="int8").params, is_leaf=is_quantized)
    assert is_quantized(rounded.params.layers[0].self_attn.k_up.weight)
    expected, logits = (model.logits(prompt_of("deepseek_v3")[:16]) for model in (exact, rounded))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-3 * np.abs(expected).max())
