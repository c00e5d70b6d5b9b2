"""MiniMax-M2 and Tencent's Hy3: grouped queries with normalised heads, and a router of sigmoids with a correction.

M2 normalises all heads as one and rotates a part of each; all of its blocks are of experts. Hy3 normalises every head,
and has experts for all tokens besides, and dense blocks first. Sources: MiniMax-M2 and Hy3's published config.json and
definitions.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from jaxpaged.layers.experts import SIGMOID, Experts, RouterConfig
from jaxpaged.models import llama
from jaxpaged.models.config import DecoderConfig, ExpertsConfig, HfFields
from jaxpaged.models.decoder import decoder_specs, pre_norm_config
from jaxpaged.models.expert_specs import check_experts, expert_specs, feed_forward_specs, layers_by_type

EXPECTED = {
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "shared_intermediate_size": 0,
}
"""Fields of MiniMax-M2 that only have one value -> that value."""

UNUSED = {"shared_moe_mode", "mtp_transformer_layers", "use_mtp"} | {
    f"layernorm_{block}_{factor}"
    for block in ("full_attention", "linear_attention", "mlp")
    for factor in ("alpha", "beta")
}
"""Fields of MiniMax-M2 that are left of an older model, and of layers that predict further tokens."""


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """MiniMax-M2's config.json. A head's first `rotary_dim` numbers are rotated."""
    given = {"rope_theta": 5_000_000.0, "head_dim": 128, **hf}
    if "rotary_dim" in hf:
        sizes = HfFields(given)
        given["partial_rotary_factor"] = sizes.count("rotary_dim") / sizes.count("head_dim")
    fields = HfFields(given)
    fields.expect(EXPECTED, of="MiniMax-M2")
    fields.read |= {*UNUSED, "rotary_dim"}
    num_layers = fields.count("num_hidden_layers")
    fields.of_layers("attn_type_list", (1,), [1] * num_layers)  # all layers attend to everything
    experts = ExpertsConfig(
        num_experts=fields.count("num_local_experts", 256),
        width=fields.count("intermediate_size"),
        router=RouterConfig(fields.count("num_experts_per_tok", 8), SIGMOID, is_normalised=True),
        layers=tuple(range(num_layers)),
    )
    return pre_norm_config(
        fields,
        [None] * num_layers,
        num_mtp_layers=fields.index("num_mtp_modules", 0),
        experts=check_experts(experts),
    )


def hy_config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Hy3's config.json. `attention_bias` is on all four projections."""
    fields = HfFields({"rope_theta": 11_158_840.0, **hf})
    num_layers, width = fields.count("num_hidden_layers"), fields.count("moe_intermediate_size", 1536)
    fields.read |= {"enable_moe_fp32_combine", "enable_attention_fp32_softmax", "enable_lm_head_fp32"}
    has_bias = fields.flag("attention_bias", False)
    experts = ExpertsConfig(
        num_experts=fields.count("num_experts", 192),
        width=width,
        router=RouterConfig(
            fields.count("num_experts_per_tok", 8),
            SIGMOID,
            is_normalised=True,
            scale=fields.number("router_scaling_factor", 2.826),
        ),
        layers=layers_by_type(fields, range(fields.index("first_k_dense_replace", 1), num_layers)),
        shared_width=width * fields.index("num_shared_experts", 1),
    )
    return pre_norm_config(
        fields,
        [None] * num_layers,
        norm_eps=1e-5,
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        num_mtp_layers=fields.index("num_nextn_predict_layers", 0),
        experts=check_experts(experts),
    )


def feed_forward(config: DecoderConfig, name: str, layer: int) -> Experts:
    """Specs of M2's block, in Mixtral's names."""
    return expert_specs(config, f"{name}.block_sparse_moe", ("w1", "w3", "w2"), correction="e_score_correction_bias")


hy_feed_forward = partial(feed_forward_specs, shared="shared_mlp", router="router.gate", correction="expert_bias")

MINIMAX_M2 = replace(
    llama.LLAMA,
    architectures=("MiniMaxM2ForCausalLM",),
    config_from_hf=config_from_hf,
    param_specs=partial(decoder_specs, whole_qk_norm=True, feed_forward=feed_forward),
)
HY_V3 = replace(
    llama.LLAMA,
    architectures=("HYV3ForCausalLM",),
    config_from_hf=hy_config_from_hf,
    param_specs=partial(decoder_specs, qk_norm=True, feed_forward=hy_feed_forward),
)
