"""Gemma 3: Gemma 2's layers with norms on query and key heads; five layers with a window, then one without.

Window layers and full layers rotate with different bases, and only the full ones are stretched (arXiv 2503.19786).
"""

from dataclasses import replace
from functools import partial
from typing import Any

from jaxpaged.models import gemma2
from jaxpaged.models.config import (
    DecoderConfig,
    HfFields,
    LayerConfig,
    layer_windows,
)
from jaxpaged.models.decoder import SANDWICH_NORMS, decoder_specs
from jaxpaged.models.rope_config import two_ropes
from jaxpaged.models.vision.gemma3 import GEMMA3_VISION
from jaxpaged.models.wrapped import text_part

DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
"""Fields that the config.json of the published models leaves out: transformers writes only what differs."""


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Gemma3's config.json, of a text model or of the text part of one that also sees images."""
    fields = HfFields({**DEFAULTS, **text_part(hf)})
    common = gemma2.gemma_fields(fields)
    local_theta = fields.number("rope_local_base_freq", 10_000.0)
    full, sliding = two_ropes(fields, common["head_dim"], theta=1_000_000.0, window_theta=local_theta)
    pattern = fields.count("sliding_window_pattern", fields.count("_sliding_window_pattern", 6))
    window = fields.count_or_none("sliding_window", 4096)
    windows = layer_windows(fields, window, sliding=lambda i: (i + 1) % pattern != 0)
    config = DecoderConfig(
        **common,
        attn_soft_cap=fields.number_or_none("attn_logit_softcapping"),
        final_soft_cap=fields.number_or_none("final_logit_softcapping"),
        layers=tuple(LayerConfig(window, full if window is None else sliding) for window in windows),
        max_position_embeddings=full.max_position,  # the published figure counts the scaling in
        max_model_len=full.max_position,
    )
    fields.refuse_unread()
    return config


GEMMA3 = replace(
    gemma2.GEMMA2,
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    config_from_hf=config_from_hf,
    param_specs=partial(decoder_specs, qk_norm=True, norms=SANDWICH_NORMS),
    vision=GEMMA3_VISION,
)
