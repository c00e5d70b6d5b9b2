"""Seed-OSS: Llama's layers with biases on query, key and value."""

from dataclasses import replace
from typing import Any

from jaxpaged.models import llama
from jaxpaged.models.config import DecoderConfig, HfFields
from jaxpaged.models.decoder import pre_norm_config


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Seed-OSS's config.json. Heads are 128 wide when nothing is said."""
    fields = HfFields({"head_dim": 128, **hf})
    return pre_norm_config(
        fields,
        [None] * fields.count("num_hidden_layers"),
        qkv_bias=fields.flag("attention_bias", True),
        o_bias=fields.flag("attention_out_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )


SEED_OSS = replace(llama.LLAMA, architectures=("SeedOssForCausalLM",), config_from_hf=config_from_hf)
