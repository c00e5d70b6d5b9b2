"""Llama 2 and 3, and Mistral: pre-norm layers; Mistral's attend to a window of tokens.

Source of the layer: arXiv 2302.13971; of the window: arXiv 2310.06825.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from jaxpaged.errors import CheckpointError
from jaxpaged.layers.attention import KVTensor
from jaxpaged.layers.mlp import ACTIVATIONS
from jaxpaged.layers.rope import RopeConfig
from jaxpaged.models.config import DecoderConfig, HfFields, LayerConfig, common_fields, layer_windows
from jaxpaged.models.decoder import (
    Layer,
    attention_specs,
    compute_logits,
    feed_forward,
    forward,
    head,
    norm_if_any,
    self_attention,
)
from jaxpaged.models.decoder_specs import decoder_specs
from jaxpaged.models.interface import LayerContext, LayerOutput, Model
from jaxpaged.models.rope_config import longest_sequence, single_rope


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


def pre_norm_config(
    fields: HfFields,
    windows: Sequence[int | None],
    *,
    norm_eps: float = 1e-6,
    rope_aliases: dict[str, str] | None = None,
    ropes: Callable[[HfFields, int], tuple[RopeConfig, RopeConfig]] | None = None,
    **options: Any,
) -> DecoderConfig:
    """DecoderConfig of a model whose layers differ by their window only. `options` are more of its fields.

    `ropes` makes the rotations of layers without a window and of those with one, where they are not the same.
    """
    common = common_fields(fields, norm_eps=norm_eps)
    if ropes is not None:
        rope, rope_of_windows = ropes(fields, common["head_dim"])
    else:
        rope = rope_of_windows = single_rope(fields, common["head_dim"], rope_aliases)
    length = longest_sequence(rope)
    config = DecoderConfig(
        **common,
        activation=fields.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
        layers=tuple(LayerConfig(window, rope if window is None else rope_of_windows) for window in windows),
        max_position_embeddings=length,
        max_model_len=length,
        **options,
    )
    fields.refuse_unread()
    return config


@partial(jax.jit, static_argnames="config")
def decoder_layer(p: Layer, config: DecoderConfig, x_TD: jax.Array, kv: KVTensor, context: LayerContext) -> LayerOutput:
    """x + attention(norm(x)), then x + mlp(norm(x)), or experts in its place."""
    attended_TD, kv = self_attention(p.self_attn, config, norm_if_any(x_TD, p.input_layernorm, config), kv, context)
    x_TD = x_TD + scaled(attended_TD, config)
    normed_TD = norm_if_any(x_TD, p.post_attention_layernorm, config)
    fed_TD, load_E = feed_forward(p.mlp, config, normed_TD, context)
    return LayerOutput(x_TD + scaled(fed_TD, config), kv, load_E)


def scaled(x_TD: jax.Array, config: DecoderConfig) -> jax.Array:
    """What a block adds to the residual stream; see `decoder.kept_apart` for the barrier."""
    if config.residual_scale is None:
        return x_TD
    x_TD = x_TD * config.residual_scale
    return jax.lax.optimization_barrier(x_TD) if config.deterministic else x_TD


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
