"""Muse Glimmer's language model: gates on what attention gives, queries and keys of length one, embeddings too.

Three of four layers have a window and rotate, the last of each four sees all tokens and does not. What goes into a
block is normalised, and what comes out of it, with weights that say how far a factor is from 1; those of the final norm
are factors. Queries and keys are normalised without weights, and queries multiplied by one number. Source: config.json
and the published definition.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxpaged.errors import CheckpointError
from jaxpaged.layers.attention import KVTensor, attend
from jaxpaged.layers.linear import Linear, apply_linear
from jaxpaged.layers.norm import normalised, rms_norm
from jaxpaged.models import llama
from jaxpaged.models.config import DecoderConfig, HfFields, is_positive, layer_windows, short, without_rotation
from jaxpaged.models.decoder import (
    SANDWICH_NORMS,
    Attention,
    Layer,
    attention_with_bias,
    decoder_specs,
    feed_forward,
    forward,
    heads_apart,
    heads_of,
    linear,
    pre_norm_config,
    rotated,
)
from jaxpaged.models.interface import LayerContext, LayerOutput
from jaxpaged.models.wrapped import text_part

EVERY = 4
"""Layers from one that sees all tokens to the next; the last one does."""


@dataclass(frozen=True)
class MuseGlimmerConfig(DecoderConfig):
    """`query_factor` multiplies normalised queries. `post_norm_eps`: of the norms of what comes out of blocks."""

    query_factor: float = 1.0
    post_norm_eps: float = 1e-8


@struct.dataclass
class GatedAttention(Attention):
    """`gate_proj` makes what the output is multiplied by, before the last projection."""

    gate_proj: Linear | None = None


def config_from_hf(hf: dict[str, Any]) -> MuseGlimmerConfig:
    """Muse Glimmer's config.json, or the part of it that describes the language model."""
    given = {"head_dim": 128, "rope_theta": 500_000.0, **text_part(hf)}
    fields = HfFields({**given, "hidden_act": given.get("hidden_activation", "silu")})
    fields.read.add("hidden_activation")
    num_layers, window = fields.count("num_hidden_layers"), fields.count_or_none("sliding_window", 2048)
    is_full = [(num_layers - 1 - i) % EVERY == 0 for i in range(num_layers)]
    windows = layer_windows(fields, window, sliding=lambda i: not is_full[i])
    thetas = fields.value("layer_rope_theta") or [0 if full else 1 for full in is_full]
    is_list = isinstance(thetas, list) and all(theta == 0 or is_positive(theta) for theta in thetas)
    if not is_list or len(thetas) != num_layers or len({*thetas} - {0}) > 1:
        raise CheckpointError(
            f"config.json: layer_rope_theta is {short(thetas)}; it must have {num_layers} entries, each 0, for a layer "
            "that does not rotate, or one and the same number."
        )
    multiplier, cap = fields.number("output_multiplier", 1.0), fields.number("final_logit_softcapping", 20.0)
    factor, post_norm_eps = fields.number("qk_scale_factor", 3.87), fields.number("post_norm_eps", 1e-8)
    config = pre_norm_config(
        fields,
        windows,
        norm_eps=1e-5,
        final_soft_cap=cap / multiplier,  # the cap is that of logits once they are multiplied
        logit_scale=multiplier,
        normed_embeddings=True,
    )
    config = without_rotation(config, {i for i, theta in enumerate(thetas) if not theta})
    return MuseGlimmerConfig(**vars(config), query_factor=factor, post_norm_eps=post_norm_eps)


def attention_specs_of_layer(config: DecoderConfig, name: str, layer: int) -> GatedAttention:
    """Specs of a layer's attention."""
    plain = attention_with_bias(config, f"{name}.self_attn")
    return GatedAttention(**vars(plain) | {"gate_proj": linear("NHD", "NH D", f"{name}.self_attn.gate_proj")})


def gated_attention(
    p: GatedAttention, config: MuseGlimmerConfig, x_TD: jax.Array, kv: KVTensor, context: LayerContext
) -> tuple[jax.Array, KVTensor]:
    """Causal self-attention of T new tokens over all that their requests have cached: ([T, D], kv)."""
    q_TNH, k_TKH, v_TKH = heads_apart(*heads_of(x_TD, p))
    q_TNH = (normalised(q_TNH, config.norm) * config.query_factor).astype(x_TD.dtype)
    q_TNH, k_TKH = rotated(q_TNH, normalised(k_TKH, config.norm).astype(x_TD.dtype), config, context)
    o_TNH, kv = attend(context.attention, q_TNH, k_TKH, v_TKH, kv, scale=config.query_scale)
    gate_TNH = jax.nn.sigmoid(apply_linear("TD,NHD->TNH", x_TD, p.gate_proj).astype(jnp.float32))
    return apply_linear("TNH,DNH->TD", (o_TNH * gate_TNH).astype(x_TD.dtype), p.o_proj), kv


@partial(jax.jit, static_argnames="config")
def decoder_layer(
    p: Layer, config: MuseGlimmerConfig, x_TD: jax.Array, kv: KVTensor, context: LayerContext
) -> LayerOutput:
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""
    of_inputs = replace(config.norm, is_offset=True)
    of_outputs = replace(of_inputs, eps=config.post_norm_eps)
    attended_TD, kv = gated_attention(p.self_attn, config, rms_norm(x_TD, p.input_layernorm, of_inputs), kv, context)
    x_TD = x_TD + rms_norm(attended_TD, p.post_attention_layernorm, of_outputs)
    normed_TD = rms_norm(x_TD, p.pre_feedforward_layernorm, of_inputs)
    fed_TD, routed = feed_forward(p.mlp, config, normed_TD, context)
    return LayerOutput(x_TD + rms_norm(fed_TD, p.post_feedforward_layernorm, of_outputs), kv, routed)


MUSE_GLIMMER = replace(
    llama.LLAMA,
    architectures=("MuseGlimmerForConditionalGeneration",),
    config_from_hf=config_from_hf,
    param_specs=partial(decoder_specs, mixer=attention_specs_of_layer, norms=SANDWICH_NORMS),
    forward=partial(forward, decoder_layer),
)
