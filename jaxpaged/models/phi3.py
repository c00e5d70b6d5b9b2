"""Phi-3 and Phi-4-mini: Llama's layers, fused projections in the checkpoint, partial rotary, longrope.

Source: arXiv 2404.14219; longrope: arXiv 2402.13753.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from jaxpaged.models import llama
from jaxpaged.models.config import DecoderConfig, HfFields
from jaxpaged.models.decoder import decoder_specs, pre_norm_config

OLD_ROPE_TYPES = {"su": "longrope", "yarn": "longrope"}
"""What early checkpoints of Phi-3 call longrope."""


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Phi-3's config.json. The trained length stands beside the rope fields, not among them."""
    fields = HfFields({"original_max_position_embeddings": 4096, **hf})
    window = fields.count_or_none("sliding_window")
    windows = [window] * fields.count("num_hidden_layers")
    return pre_norm_config(fields, windows, norm_eps=1e-5, rope_aliases=OLD_ROPE_TYPES)


PHI3 = replace(
    llama.LLAMA,
    architectures=("Phi3ForCausalLM",),
    config_from_hf=config_from_hf,
    param_specs=partial(decoder_specs, fused=True),
)
