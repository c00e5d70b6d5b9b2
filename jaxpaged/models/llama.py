"""Llama 2 and 3, and Mistral: pre-norm layers; Mistral's attend to a window of tokens.

Source of the layer: arXiv 2302.13971; of the window: arXiv 2310.06825.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from jaxpaged.errors import CheckpointError
from jaxpaged.models.config import DecoderConfig, HfFields, layer_windows
from jaxpaged.models.decoder import (
    attention_specs,
    compute_logits,
    decoder_layer,
    decoder_specs,
    forward,
    head,
    pre_norm_config,
)
from jaxpaged.models.interface import Model


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Llama's config.json. `attention_bias` is on all four projections."""
    fields = HfFields(hf)
    has_bias = fields.flag("attention_bias", False)
    return pre_norm_config(
        fields,
        [None] * fields.count("num_hidden_layers"),
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


def mistral_config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Mistral's config.json. Every layer has the same window, 4096 when nothing is said, all tokens when null."""
    fields = HfFields(hf)
    window = fields.count_or_none("sliding_window", 4096)
    windows = layer_windows(fields, window, sliding=lambda i: True)
    if len(set(windows)) > 1:
        raise CheckpointError(
            "config.json: layer_types mixes windows and full attention, which Mistral's own definition does not have."
        )
    return pre_norm_config(fields, windows)


LLAMA = Model(
    architectures=("LlamaForCausalLM",),
    config_from_hf=config_from_hf,
    param_specs=decoder_specs,
    forward=partial(forward, decoder_layer),
    head=head,
    compute_logits=compute_logits,
    attention_specs=attention_specs,
)
MISTRAL = replace(LLAMA, architectures=("MistralForCausalLM",), config_from_hf=mistral_config_from_hf)
