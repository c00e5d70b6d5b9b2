"""GLM-4, which normalises what goes into a block and what comes out, and GLM-4.5, whose later layers have experts.

GLM-4 rotates neighbours of a head together, GLM-4.5 halves, both the first half of a head only. Sources: arXiv
2406.12793, 2508.06471.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from jaxpaged.layers.mlp import Mlp
from jaxpaged.models import gemma2, llama
from jaxpaged.models.config import DecoderConfig, ExpertsConfig, HfFields
from jaxpaged.models.decoder import Decoder, decoder_specs, fused_mlp, pre_norm_config
from jaxpaged.models.expert_specs import CORRECTION, check_experts, feed_forward_specs, sigmoid_router

DEFAULTS = {"partial_rotary_factor": 0.5}
"""Fields that config.json may leave out."""

NORMS = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}
"""Name in `Layer` -> name in the checkpoint."""


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """GLM-4's config.json. `attention_bias` is on query, key and value."""
    fields = HfFields({**DEFAULTS, "head_dim": 128, **hf})
    return pre_norm_config(
        fields,
        [None] * fields.count("num_hidden_layers"),
        norm_eps=1.5625e-07,
        qkv_bias=fields.flag("attention_bias", True),
        interleaved_rope=True,
    )


def glm4_feed_forward(config: DecoderConfig, name: str, layer: int) -> Mlp:
    return fused_mlp(config, f"{name}.mlp")


def moe_config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """GLM-4.5's config.json. Experts begin at layer `first_k_dense_replace`."""
    fields = HfFields({**DEFAULTS, **hf})
    num_layers, width = fields.count("num_hidden_layers"), fields.count("moe_intermediate_size", 1408)
    experts = ExpertsConfig(
        num_experts=fields.count("n_routed_experts", 128),
        width=width,
        router=sigmoid_router(fields),
        layers=tuple(range(fields.index("first_k_dense_replace", 1), num_layers)),
        shared_width=width * fields.index("n_shared_experts", 1),
    )
    return pre_norm_config(
        fields,
        [None] * num_layers,
        norm_eps=1e-5,
        qkv_bias=fields.flag("attention_bias", False),
        qk_norm=fields.flag("use_qk_norm", False),
        num_mtp_layers=fields.index("num_nextn_predict_layers", 0),
        experts=check_experts(experts),
    )


moe_feed_forward = partial(feed_forward_specs, shared="shared_experts", correction=CORRECTION)


def moe_specs(config: DecoderConfig, num_model_shards: int) -> Decoder:
    """Norms on query and key heads are there if config.json says so."""
    return decoder_specs(config, num_model_shards, qk_norm=config.qk_norm, feed_forward=moe_feed_forward)


GLM4 = replace(
    gemma2.GEMMA2,
    architectures=("Glm4ForCausalLM",),
    config_from_hf=config_from_hf,
    param_specs=partial(decoder_specs, norms=NORMS, feed_forward=glm4_feed_forward),
)
GLM4_MOE = replace(
    llama.LLAMA, architectures=("Glm4MoeForCausalLM",), config_from_hf=moe_config_from_hf, param_specs=moe_specs
)
