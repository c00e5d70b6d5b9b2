"""Mistral Small 4: DeepSeek-V3's latent attention and experts, with a softmax for a router and queries that grow.

The experts of a block are one tensor. Sources: arXiv 2412.19437 (the layers), 2501.19399 (the growth), config.json.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from jaxpaged.layers.experts import Experts, RouterConfig
from jaxpaged.layers.mlp import Mlp
from jaxpaged.models import deepseek
from jaxpaged.models.config import DecoderConfig, HfFields
from jaxpaged.models.decoder import decoder_specs, mlp_with_bias
from jaxpaged.models.deepseek import attention_specs_of_layer, latent_config, own_fields
from jaxpaged.models.expert_specs import shared_mlp, stacked_expert_specs
from jaxpaged.models.rope_config import growth_of_queries, rope_fields, with_rope
from jaxpaged.models.wrapped import text_part

DEFAULTS = {
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 36,
}
"""Fields that config.json may leave out."""
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""What config.json means where it says nothing of positions."""


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Mistral 4's config.json. The part of a head that is rotated is given twice, as a size and as a share of it."""
    given = {**DEFAULTS, **hf}
    rope = rope_fields(HfFields(with_rope(given, ROPE)))
    rope.pop("partial_rotary_factor", None)
    given = {name: value for name, value in given.items() if name not in ("rope_scaling", "partial_rotary_factor")}
    fields = own_fields({**given, "rope_parameters": rope})
    router = RouterConfig(
        fields.count("num_experts_per_tok", 4),
        is_normalised=fields.flag("norm_topk_prob", True),
        num_groups=fields.count("n_group", 1),
        groups_per_token=fields.count("topk_group", 1),
        scale=fields.number("routed_scaling_factor", 1.0),
    )
    growth = growth_of_queries(fields)
    return latent_config(fields, router, shared=1, first=0, experts=128, query_growth=growth)


def wrapped_config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Of the part of config.json that describes the language model, where another part describes a tower."""
    return config_from_hf(text_part(hf))


def feed_forward(config: DecoderConfig, name: str, layer: int) -> Mlp | Experts:
    """Specs of the block of a layer."""
    assert config.experts is not None
    if layer not in config.sparse_layers:
        return mlp_with_bias(config, f"{name}.mlp")
    shared = shared_mlp(f"{name}.mlp.shared_experts") if config.experts.shared_width else None
    return stacked_expert_specs(f"{name}.mlp", shared=shared, transposed=False)


MISTRAL4 = replace(
    deepseek.DEEPSEEK_V3,
    architectures=("Mistral4ForCausalLM",),
    config_from_hf=config_from_hf,
    param_specs=partial(decoder_specs, mixer=attention_specs_of_layer, feed_forward=feed_forward),
)
WRAPPED_MISTRAL4 = replace(
    MISTRAL4, architectures=("Mistral3ForConditionalGeneration",), config_from_hf=wrapped_config_from_hf
)
"""In the form of Mistral Small 3.1, of which only the language model is served."""
