"""MiMo 7B: Qwen 2's layers, and one that predicts a token further (arXiv 2505.07608), which can draft.

That layer's input is a linear function of the decoder's last hidden state and an embedding, both normalised. It shares
the decoder's embeddings and its table of logits.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxpaged.layers.attention import KVTensor
from jaxpaged.layers.embedding import Table
from jaxpaged.layers.linear import Linear, apply_linear, with_backend
from jaxpaged.layers.norm import Norm, rms_norm
from jaxpaged.models import llama
from jaxpaged.models.config import DecoderConfig, HfFields
from jaxpaged.models.decoder import (
    Layer,
    attention_with_bias,
    compute_logits,
    decoder_layer,
    linear,
    mlp_with_bias,
    norm,
    pre_norm_config,
)
from jaxpaged.models.interface import Head, HeadConfig, LayerContext
from jaxpaged.models.qwen2 import qwen_windows


@struct.dataclass
class Mtp:
    """The layer that predicts further. The decoder's tables serve it too."""

    token_layernorm: Norm
    hidden_layernorm: Norm
    input_proj: Linear
    layer: Layer
    final_layernorm: Norm
    embed_tokens: None = None
    lm_head: None = None


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """MiMo's config.json."""
    fields = HfFields(hf)
    num_further = fields.index("num_nextn_predict_layers", 0)
    windows, has_bias = qwen_windows(fields), fields.flag("attention_bias", True)
    return pre_norm_config(fields, windows, qkv_bias=has_bias, num_mtp_layers=num_further)


def mtp_specs(config: HeadConfig, num_model_shards: int) -> Mtp:
    """Specs of the first layer that predicts further; the decoder splits the same way, so this one does."""
    name = "model.mtp_layers.0"
    mtp = Mtp(
        token_layernorm=norm("D", f"{name}.token_layernorm"),
        hidden_layernorm=norm("D", f"{name}.hidden_layernorm"),
        input_proj=linear("DZ", "D Z", f"{name}.input_proj"),
        layer=Layer(
            self_attn=attention_with_bias(config, f"{name}.self_attn"),
            mlp=mlp_with_bias(config, f"{name}.mlp"),
            input_layernorm=norm("D", f"{name}.input_layernorm"),
            post_attention_layernorm=norm("D", f"{name}.post_attention_layernorm"),
        ),
        final_layernorm=norm("D", f"{name}.final_layernorm"),
    )
    return with_backend(mtp, config.matmul_backend)


def features(params: Mtp, config: HeadConfig, hidden_TD: jax.Array, taps: tuple[jax.Array, ...]) -> jax.Array:
    """The decoder's last hidden states."""
    return hidden_TD


def forward(
    params: Mtp, config: HeadConfig, embedded_TD: jax.Array, before_TD: jax.Array, kv: KVTensor, context: LayerContext
) -> tuple[jax.Array, jax.Array, KVTensor]:
    """The layer and its norm, whose output is like that of the decoder."""
    hidden_TD = rms_norm(before_TD, params.hidden_layernorm, config.norm)
    both_TZ = jnp.concatenate([hidden_TD, rms_norm(embedded_TD, params.token_layernorm, config.norm)], axis=-1)
    x_TD = apply_linear("TZ,DZ->TD", both_TZ, params.input_proj)
    output = decoder_layer(params.layer, config, x_TD, kv, context)
    hidden_TD = rms_norm(output.x_TD, params.final_layernorm, config.norm)
    return hidden_TD, hidden_TD, output.kv


def table_of_logits(params: Mtp, table_VD: Table) -> Table:
    return table_VD


MTP = Head(
    param_specs=mtp_specs,
    features=features,
    forward=forward,
    head=table_of_logits,
    compute_logits=compute_logits,
)
MIMO = replace(llama.LLAMA, architectures=("MiMoForCausalLM",), config_from_hf=config_from_hf, mtp=MTP)
