"""Command R: attention and the feed-forward block read the same norm, and both are added at once."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax

from jaxpaged.errors import CheckpointError
from jaxpaged.layers.attention import KVTensor
from jaxpaged.models import llama
from jaxpaged.models.config import DecoderConfig, HfFields
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
    has_bias = fields.flag("attention_bias", False)
    return pre_norm_config(
        fields,
        [None] * fields.count("num_hidden_layers"),
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
    fed_TD, load_E = feed_forward(p.mlp, config, normed_TD, context)
    return LayerOutput(x_TD + attended_TD + fed_TD, kv, load_E)


COHERE = replace(
    llama.LLAMA,
    architectures=("CohereForCausalLM",),
    config_from_hf=config_from_hf,
    param_specs=partial(decoder_specs, norms={"input_layernorm": "input_layernorm"}),
    forward=partial(forward, decoder_layer),
)
