"""Granite 3: Llama's layers, in which embeddings, scores, the outputs of blocks and logits are scaled."""

from dataclasses import replace
from typing import Any

from jaxpaged.models import llama
from jaxpaged.models.config import DecoderConfig, HfFields
from jaxpaged.models.decoder import pre_norm_config


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Granite's config.json. `logits_scaling` divides the logits; `attention_bias` is on all four projections."""
    fields = HfFields(hf)
    has_bias, query_scale = fields.flag("attention_bias", False), fields.number("attention_multiplier", 1.0)
    config = pre_norm_config(
        fields,
        [None] * fields.count("num_hidden_layers"),
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        embed_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logit_scale=1 / fields.number("logits_scaling", 1.0),
    )
    return replace(config, query_scale=query_scale)


GRANITE = replace(llama.LLAMA, architectures=("GraniteForCausalLM",), config_from_hf=config_from_hf)
