"""Qwen 3: Llama's layers with norms on query and key heads (arXiv 2505.09388)."""

from dataclasses import replace
from functools import partial
from typing import Any

from jaxpaged.models import llama
from jaxpaged.models.config import DecoderConfig, HfFields
from jaxpaged.models.decoder import decoder_specs, pre_norm_config
from jaxpaged.models.qwen2 import qwen_windows


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Qwen3's config.json. Heads are 128 wide when nothing is said; `attention_bias` is on all four projections."""
    fields = HfFields({"head_dim": 128, **hf})
    has_bias = fields.flag("attention_bias", False)
    return pre_norm_config(fields, qwen_windows(fields), qkv_bias=has_bias, o_bias=has_bias)


QWEN3 = replace(
    llama.LLAMA,
    architectures=("Qwen3ForCausalLM",),
    config_from_hf=config_from_hf,
    param_specs=partial(decoder_specs, qk_norm=True),
)
