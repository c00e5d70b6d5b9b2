"""EXAONE 4: what comes out of a block is normalised, and so are query and key heads (arXiv 2507.11407).

Where some layers have a window, those without one do not rotate.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from jaxpaged.errors import CheckpointError
from jaxpaged.models import gemma2
from jaxpaged.models.config import DecoderConfig, HfFields, layer_windows, short, without_rotation
from jaxpaged.models.decoder import POST_NORMS, decoder_specs, pre_norm_config


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """EXAONE 4's config.json. Every `sliding_window_pattern`th layer, or who `layer_types` names, sees all tokens."""
    fields = HfFields(hf)
    num_layers, window = fields.count("num_hidden_layers"), fields.count_or_none("sliding_window", 4096)
    pattern = fields.value("sliding_window_pattern", 4)
    if window is None:
        fields.value("layer_types")
        return pre_norm_config(fields, [None] * num_layers, norm_eps=1e-5)
    if isinstance(pattern, str) and "layer_types" not in hf:
        raise CheckpointError(f"config.json: sliding_window_pattern is {short(pattern)}; give layer_types beside it.")
    every = 1 if isinstance(pattern, str) else fields.count("sliding_window_pattern", 4)
    windows = layer_windows(fields, window, sliding=lambda i: (i + 1) % every != 0)
    config = pre_norm_config(fields, windows, norm_eps=1e-5)
    return without_rotation(config, {i for i, each in enumerate(windows) if each is None})


EXAONE4 = replace(
    gemma2.GEMMA2,
    architectures=("Exaone4ForCausalLM",),
    config_from_hf=config_from_hf,
    param_specs=partial(decoder_specs, qk_norm=True, norms=POST_NORMS),
)
