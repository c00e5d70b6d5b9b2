"""Qwen 2 and Qwen 3 with experts: the layers of the dense models (arXiv 2407.10671, 2505.09388).

Qwen 2 also has an expert that all tokens share, weighed by a gate.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from jaxpaged.layers.experts import RouterConfig
from jaxpaged.models import llama
from jaxpaged.models.config import DecoderConfig, ExpertsConfig, HfFields
from jaxpaged.models.decoder import decoder_specs, pre_norm_config
from jaxpaged.models.expert_specs import check_experts, feed_forward_specs, no_windows, sparse_layers


def qwen2_config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Qwen2-MoE's config.json."""
    fields = HfFields(hf)
    shared_width = fields.count("shared_expert_intermediate_size", 5632)
    experts = replace(experts_config(fields, 60, 4, 1408), shared_width=shared_width)
    return pre_norm_config(
        fields, no_windows(fields), qkv_bias=fields.flag("qkv_bias", True), experts=check_experts(experts)
    )


def qwen3_config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Qwen3-MoE's config.json. `attention_bias` is on all four projections."""
    fields = HfFields(hf)
    has_bias = fields.flag("attention_bias", False)
    experts = experts_config(fields, 128, 8, 768)
    return pre_norm_config(
        fields, no_windows(fields), qkv_bias=has_bias, o_bias=has_bias, experts=check_experts(experts)
    )


def experts_config(fields: HfFields, num_experts: int, per_token: int, width: int) -> ExpertsConfig:
    """What both call alike; the numbers are their defaults."""
    is_normalised = fields.flag("norm_topk_prob", False)
    other_name = fields.count("num_local_experts", num_experts)  # that of newer versions of transformers
    return ExpertsConfig(
        num_experts=fields.count("num_experts", other_name),
        width=fields.count("moe_intermediate_size", width),
        router=RouterConfig(fields.count("num_experts_per_tok", per_token), is_normalised=is_normalised),
        layers=sparse_layers(fields),
    )


with_shared = partial(feed_forward_specs, shared="shared_expert", shared_gate="shared_expert_gate")

QWEN2_MOE = replace(
    llama.LLAMA,
    architectures=("Qwen2MoeForCausalLM",),
    config_from_hf=qwen2_config_from_hf,
    param_specs=partial(decoder_specs, feed_forward=with_shared),
)
QWEN3_MOE = replace(
    llama.LLAMA,
    architectures=("Qwen3MoeForCausalLM",),
    config_from_hf=qwen3_config_from_hf,
    param_specs=partial(decoder_specs, qk_norm=True, feed_forward=feed_forward_specs),
)
