"""Qwen 2 and 2.5: Llama's layers with biases on query, key and value (arXiv 2407.10671)."""

from dataclasses import replace
from typing import Any

from jaxpaged.models import llama
from jaxpaged.models.config import DecoderConfig, HfFields, layer_windows
from jaxpaged.models.decoder import pre_norm_config


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Qwen2's config.json."""
    fields = HfFields(hf)
    return pre_norm_config(fields, qwen_windows(fields), qkv_bias=True)


def qwen_windows(fields: HfFields) -> tuple[int | None, ...]:
    """Windows from layer `max_window_layers` on, if they are switched on at all."""
    window = fields.count_or_none("sliding_window", 4096)
    first = fields.index("max_window_layers", 28)
    if not fields.flag("use_sliding_window", False):
        window = None
    return layer_windows(fields, window, sliding=lambda i: i >= first)


QWEN2 = replace(llama.LLAMA, architectures=("Qwen2ForCausalLM",), config_from_hf=config_from_hf)
