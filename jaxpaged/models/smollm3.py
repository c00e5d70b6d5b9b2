"""SmolLM 3: Llama's layers, of which every fourth does not rotate."""

from dataclasses import replace
from typing import Any

from jaxpaged.models import llama
from jaxpaged.models.config import DecoderConfig, HfFields, layer_windows, without_rotation
from jaxpaged.models.decoder import pre_norm_config


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """SmolLM3's config.json. `no_rope_layers` has a 1 for each layer that rotates, and a 0 for the others."""
    fields = HfFields({"tie_word_embeddings": True, "rope_theta": 2_000_000.0, **hf})
    has_bias, num_layers = fields.flag("attention_bias", False), fields.count("num_hidden_layers")
    every = fields.count("no_rope_layer_interval", 4)
    defaults = [int((i + 1) % every != 0) for i in range(num_layers)]
    rotates = fields.of_layers("no_rope_layers", (0, 1), defaults)
    window = fields.count_or_none("sliding_window")
    if not fields.flag("use_sliding_window", False):
        window = None
    windows = layer_windows(fields, window, sliding=lambda i: not rotates[i])
    has_mlp_bias = fields.flag("mlp_bias", False)
    config = pre_norm_config(fields, windows, qkv_bias=has_bias, o_bias=has_bias, mlp_bias=has_mlp_bias)
    return without_rotation(config, {i for i in range(num_layers) if not rotates[i]})


SMOLLM3 = replace(llama.LLAMA, architectures=("SmolLM3ForCausalLM",), config_from_hf=config_from_hf)
