"""Command R and Command A: attention and the feed-forward block read the same norm, and both are added at once.

Three of four layers of Command A have a window, and only those rotate (arXiv 2504.00698).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from jaxpaged.errors import CheckpointError
from jaxpaged.layers.attention import KVTensor
from jaxpaged.models import llama
from jaxpaged.models.config import DecoderConfig, HfFields, layer_windows, without_rotation
from jaxpaged.models.decoder import (
    Layer,
    decoder_specs,
    feed_forward,
    forward,
    norm_if_any,
    pre_norm_config,
    self_attention,
)
from jaxpaged.models.interface import LayerContext, LayerOutput


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Command R's config.json. Norms take off the mean; neighbours of a head are rotated together."""
    fields = HfFields({"tie_word_embeddings": True, "rope_theta": 500_000.0, **hf})
    if fields.flag("use_qk_norm", False):
        raise CheckpointError("config.json: use_qk_norm is true; norms of queries and keys are not supported here.")
    return parallel_config(fields, [None] * fields.count("num_hidden_layers"))


COHERE2_EXPECTED = {
    "use_parallel_block": True,
    "use_gated_activation": True,
    "use_parallel_embedding": False,
    "use_qk_norm": False,
    "rotary_pct": 1.0,
}
"""Fields of Command A that only have one value -> that value."""


def cohere2_config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Command A's config.json. Every `sliding_window_pattern`th layer sees all tokens and does not rotate."""
    fields = HfFields({"tie_word_embeddings": True, **hf})
    window, every = fields.count_or_none("sliding_window", 4096), fields.count("sliding_window_pattern", 4)
    fields.read |= {"order_of_interleaved_layers", "use_embedding_sharing", "position_embedding_type"}
    fields.expect(COHERE2_EXPECTED, of="Command A")
    windows = layer_windows(fields, window, sliding=lambda i: (i + 1) % every != 0)
    config = parallel_config(fields, windows)
    return without_rotation(config, {i for i, each in enumerate(windows) if each is None})


def parallel_config(fields: HfFields, windows: Sequence[int | None]) -> DecoderConfig:
    """What both call alike."""
    has_bias = fields.flag("attention_bias", False)
    return pre_norm_config(
        fields,
        windows,
        norm_eps=fields.number("layer_norm_eps", 1e-5),
        qkv_bias=has_bias,
        o_bias=has_bias,
        logit_scale=fields.number("logit_scale", 0.0625),
        centred_norms=True,
        interleaved_rope=True,
    )


@partial(jax.jit, static_argnames="config")
def decoder_layer(p: Layer, config: DecoderConfig, x_TD: jax.Array, kv: KVTensor, context: LayerContext) -> LayerOutput:
    """x + attention(norm(x)) + mlp(norm(x))."""
    normed_TD = norm_if_any(x_TD, p.input_layernorm, config)
    attended_TD, kv = self_attention(p.self_attn, config, normed_TD, kv, context)
    fed_TD, routed = feed_forward(p.mlp, config, normed_TD, context)
    return LayerOutput(x_TD + attended_TD + fed_TD, kv, routed)


COHERE = replace(
    llama.LLAMA,
    architectures=("CohereForCausalLM",),
    config_from_hf=config_from_hf,
    param_specs=partial(decoder_specs, norms={"input_layernorm": "input_layernorm"}),
    forward=partial(forward, decoder_layer),
)
COHERE2 = replace(COHERE, architectures=("Cohere2ForCausalLM",), config_from_hf=cohere2_config_from_hf)
