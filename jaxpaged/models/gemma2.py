"""Gemma 2: norms before and after both blocks, soft caps, every other layer with a window (arXiv 2408.00118)."""

from functools import partial
from typing import Any

import jax

from jaxpaged.layers.attention import KVTensor
from jaxpaged.layers.mlp import ACTIVATIONS
from jaxpaged.models.config import DecoderConfig, HfFields, LayerConfig, common_fields, layer_windows
from jaxpaged.models.decoder import (
    SANDWICH_NORMS,
    Layer,
    attention_specs,
    compute_logits,
    decoder_specs,
    feed_forward,
    forward,
    head,
    norm_if_any,
    self_attention,
)
from jaxpaged.models.interface import LayerContext, LayerOutput, Model
from jaxpaged.models.rope_config import longest_sequence, single_rope

DEFAULTS = {"head_dim": 256}
"""Fields that Gemma 2's config.json may leave out."""


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Gemma2's config.json. Even layers have the window; absent soft caps are 50 and 30, null ones are none."""
    fields = HfFields({**DEFAULTS, **hf})
    common = gemma_fields(fields)
    rope = single_rope(fields, common["head_dim"])
    windows = layer_windows(fields, fields.count_or_none("sliding_window", 4096), sliding=lambda i: i % 2 == 0)
    config = DecoderConfig(
        **common,
        attn_soft_cap=fields.number_or_none("attn_logit_softcapping", 50.0),
        final_soft_cap=fields.number_or_none("final_logit_softcapping", 30.0),
        layers=tuple(LayerConfig(window, rope) for window in windows),
        max_position_embeddings=longest_sequence(rope),
        max_model_len=longest_sequence(rope),
    )
    fields.refuse_unread()
    return config


def gemma_fields(fields: HfFields) -> dict[str, Any]:
    """What Gemma 2 and 3 have alike: scale of queries and embeddings, activation, tied embeddings, offset norms."""
    common = common_fields(fields, tie_default=True)
    common["query_scale"] = fields.number("query_pre_attn_scalar", 256) ** -0.5
    common["embed_scale"] = common["hidden_size"] ** 0.5
    common["offset_norms"] = True
    common["qkv_bias"] = common["o_bias"] = fields.flag("attention_bias", False)
    common["activation"] = fields.choice("hidden_activation", tuple(ACTIVATIONS), "gelu_pytorch_tanh")
    fields.value("hidden_act")  # an older spelling that transformers ignores in favour of the one above
    return common


@partial(jax.jit, static_argnames="config")
def decoder_layer(p: Layer, config: DecoderConfig, x_TD: jax.Array, kv: KVTensor, context: LayerContext) -> LayerOutput:
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))); the inner norms are there if their weights are."""
    attended_TD, kv = self_attention(p.self_attn, config, norm_if_any(x_TD, p.input_layernorm, config), kv, context)
    x_TD = x_TD + norm_if_any(attended_TD, p.post_attention_layernorm, config)
    out_TD, routed = feed_forward(p.mlp, config, norm_if_any(x_TD, p.pre_feedforward_layernorm, config), context)
    return LayerOutput(x_TD + norm_if_any(out_TD, p.post_feedforward_layernorm, config), kv, routed)


GEMMA2 = Model(
    architectures=("Gemma2ForCausalLM",),
    config_from_hf=config_from_hf,
    param_specs=partial(decoder_specs, norms=SANDWICH_NORMS),
    forward=partial(forward, decoder_layer),
    head=head,
    compute_logits=compute_logits,
    attention_specs=attention_specs,
)
