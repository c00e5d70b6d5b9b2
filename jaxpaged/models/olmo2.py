"""OLMo 2 and 3: what comes out of a block is normalised, not what goes in, and queries and keys are, all heads as one.

Sources: arXiv 2501.00656; OLMo 3: three layers with a window, then one without, and only that one is stretched.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from jaxpaged.models import gemma2
from jaxpaged.models.config import DecoderConfig, HfFields, layer_windows
from jaxpaged.models.decoder import POST_NORMS, decoder_specs, pre_norm_config
from jaxpaged.models.rope_config import two_ropes


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """OLMo 2's config.json. `attention_bias` is on all four projections."""
    fields = HfFields(hf)
    has_bias = fields.flag("attention_bias", False)
    windows = [None] * fields.count("num_hidden_layers")
    return pre_norm_config(fields, windows, norm_eps=1e-5, qkv_bias=has_bias, o_bias=has_bias)


def olmo3_config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """OLMo 3's config.json. Every fourth layer sees all tokens unless `layer_types` says otherwise."""
    fields = HfFields(hf)
    has_bias = fields.flag("attention_bias", False)
    window = fields.count_or_none("sliding_window", 4096)
    windows = layer_windows(fields, window, sliding=lambda i: (i + 1) % 4 != 0)
    return pre_norm_config(
        fields, windows, norm_eps=1e-5, ropes=partial(two_ropes, theta=500_000.0), qkv_bias=has_bias, o_bias=has_bias
    )


OLMO2 = replace(
    gemma2.GEMMA2,
    architectures=("Olmo2ForCausalLM",),
    config_from_hf=config_from_hf,
    param_specs=partial(decoder_specs, whole_qk_norm=True, norms=POST_NORMS),
)
OLMO3 = replace(OLMO2, architectures=("Olmo3ForCausalLM",), config_from_hf=olmo3_config_from_hf)
