"""What config.json of LFM2 means, in the spellings of published models."""

import pytest

from jaxpaged.errors import CheckpointError
from jaxpaged.kv_cache_spec import group_layers
from jaxpaged.models.config import SHORT_CONV
from jaxpaged.models.registry import model_for

LFM2_1_2B = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0,
    "block_use_swiglu": True,
    "block_use_xavier_init": True,
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "conv_dim_out": 2048,
    "conv_use_xavier_init": True,
    "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_pos_enc": True,
    "vocab_size": 65536,
}


def read(**changes):
    hf = {**LFM2_1_2B, **changes}
    return model_for(hf).config_from_hf(hf)


def test_sizes_are_those_of_transformers():
    config = read()
    assert config.intermediate_size == 8192 and config.head_dim == 64 and config.tie_embeddings
    assert [i for i, layer in enumerate(config.layers) if layer.mixer != SHORT_CONV] == [2, 5, 8, 10, 12, 14]
    assert read(block_ffn_dim_multiplier=1.3, block_ff_dim=10000).intermediate_size == 8704
    assert read(block_auto_adjust_ff_dim=False).intermediate_size == 12288
    assert not read(tie_embedding=False).tie_embeddings


def test_a_state_is_two_inputs_a_channel_and_has_a_pool_of_its_own():
    config = read()
    specs = model_for(LFM2_1_2B).attention_specs(config, 16, 2, 1)
    attention, states = group_layers(specs)
    assert len(attention.layer_idxs) == 6 and len(states.layer_idxs) == 10
    assert states.spec.block_bytes == states.spec.row_bytes == 2 * 2048 * 2
    assert states.spec.with_drafts(3).row_bytes == 5 * 2048 * 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"full_attn_idxs": [16]}, "full_attn_idxs is .16.; it must be a list of layers, of which there are 16"),
        ({"layer_types": ["conv"] * 15}, "layer_types is .* must have 16 entries"),
        ({"layer_types": ["conv"] * 16}, "no layer of layer_types has attention"),
        ({"conv_L_cache": 0}, "conv_L_cache is 0; it must be a positive"),
        ({"conv_groups": 2}, "conv_groups is 2. Nothing is known of this field"),
    ],
)
def test_what_no_published_model_has_is_refused_by_name(changes, words):
    with pytest.raises(CheckpointError, match=words):
        read(**changes)
