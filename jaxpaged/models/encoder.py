"""An encoder: layers in which every token of a text sees what stands before it and behind it, and no token is drawn.

A text is computed whole, in one step. Its keys and values go through the paged cache, so that attention is that of any
model, with an end of what each token sees behind it. No later step reads them, so all layers that see alike use one
layer's memory, one after the other.

An architecture's own file says how embeddings are made and what a layer is. This module knows nothing of requests and
blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from jaxpaged.kv_cache_spec import AttentionSpec
from jaxpaged.layers.attention import KVTensor
from jaxpaged.layers.linear import Linear, apply_linear
from jaxpaged.layers.mlp import ACTIVATIONS, Mlp
from jaxpaged.layers.norm import LayerNorm, layer_norm
from jaxpaged.models.config import DecoderConfig, LayerConfig
from jaxpaged.models.decoder import Attention, attention_spec, linear, rotations
from jaxpaged.models.interface import Batch, Classifier, ForwardOutput, LayerContext, LayerOutput
from jaxpaged.params.quantized import is_quantized
from jaxpaged.params.spec import Spec

ENDS = ("Model", "ForSequenceClassification", "ForMaskedLM")
"""Ends of the names of architectures with the same layers. Models that guess words are taken for their layers."""
UNREAD = ("model.pooler.", "cls.", "lm_head.", "head.", "decoder.", "classifier.")
"""Beginnings of names of tensors that make a vector, labels or words of hidden states, where nothing asks for them."""
BUFFERS = ("model.embeddings.position_ids", "model.embeddings.token_type_ids")
"""Tensors of old files that hold 0, 1, 2, ... and zeros."""
IGNORED = (
    "attention_probs_dropout_prob",
    "hidden_dropout_prob",
    "output_past",
    "directionality",
    "position_embedding_type",
    *(f"pooler_{part}" for part in ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type")),
)
"""Fields of config.json that change nothing here; positions that are not absolute have tensors of their own."""


@dataclass(frozen=True)
class EncoderConfig(DecoderConfig):
    """`window` of a layer counts the tokens to one side that a token sees, itself included, and it sees as many to the
    other.

    `num_positions`: rows of the table of positions, 0 where there is none; the first token of a text has row
    `first_position`. `num_token_types`: kinds of tokens with a vector of their own, such as those of a first and of a
    second text. `has_norm_bias`: so have all norms. `pooling_type`: which hidden states count, if nothing else says so.
    `head_activation` and `has_head_bias`: of the product between a vector and its scores.
    """

    num_positions: int = 0
    first_position: int = 0
    num_token_types: int = 0
    has_norm_bias: bool = True
    pooling_type: str = "CLS"
    head_activation: str = "tanh"
    has_head_bias: bool = True

    splits_into_stages: ClassVar[bool] = False
    sees_both_ways: ClassVar[bool] = True

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The different windows of layers, in their order."""
        return tuple(dict.fromkeys(layer.window for layer in self.layers))

    @property
    def num_caches(self) -> int:
        return len(self.windows)

    @property
    def pooling_defaults(self) -> dict[str, Any]:
        return {"pooling_type": self.pooling_type}

    def leaves_out(self, name: str) -> bool:
        return name.startswith(UNREAD) or name in BUFFERS

    def dim_sizes(self) -> dict[str, int]:
        return {**super().dim_sizes(), "g": self.num_positions, "i": self.num_token_types}


@struct.dataclass
class EncoderLayer:
    """The norms come before the blocks or behind them; the first is None where a layer does without."""

    self_attn: Attention
    mlp: Mlp
    attention_norm: LayerNorm | None
    mlp_norm: LayerNorm


@struct.dataclass
class Encoder:
    """All parameters but those of a classifier. `norm` is there where layers do not end with one."""

    embed_tokens: jax.Array  # [V, D]
    embed_positions: jax.Array | None  # [g, D]
    embed_types: jax.Array | None  # [i, D]
    embed_norm: LayerNorm
    layers: list[EncoderLayer]
    norm: LayerNorm | None = None


class Layer(Protocol):
    """One layer, jitted with `config` static."""

    def __call__(
        self, p: EncoderLayer, config: EncoderConfig, x_TD: jax.Array, kv: KVTensor, context: LayerContext
    ) -> LayerOutput: ...


class Embedding(Protocol):
    """What a model makes of tokens before its layers, [T, D]."""

    def __call__(self, params: Encoder, config: EncoderConfig, batch: Batch) -> jax.Array: ...


def forward(
    embedding: Embedding,
    layer: Layer,
    params: Encoder,
    config: EncoderConfig,
    batch: Batch,
    kv: Sequence[KVTensor],
    taps: tuple[int, ...] = (),
) -> ForwardOutput:
    """The loop over layers: `Model.forward` once the first two are bound. Nothing taps an encoder."""
    assert not taps, taps
    x_TD, kv = embedding(params, config, batch), list(kv)
    cos_sin = rotations(config, batch.positions_T)
    for p, of_layer in zip(params.layers, config.layers, strict=True):
        group, tensor = batch.caches[config.windows.index(of_layer.window)]
        context = LayerContext(batch.attention[group], cos_sin.get(of_layer.rope))
        output = layer(p, config, x_TD, kv[tensor], context)
        x_TD, kv[tensor] = output.x_TD, output.kv
    return ForwardOutput(x_TD if params.norm is None else layer_norm(x_TD, params.norm, config.norm_eps), kv)


def attention_specs(
    config: EncoderConfig, block_size: int, dtype_bytes: int, num_model_shards: int
) -> list[AttentionSpec]:
    """What each kind of layers needs while a step is computed."""
    layers = [LayerConfig(window, None) for window in config.windows]
    sizes = config.num_kv_heads, config.head_dim, block_size, dtype_bytes, num_model_shards
    return [attention_spec(layer, *sizes) for layer in layers]


def no_head(params: Encoder) -> None:
    """`Model.head` where nothing is drawn."""


def no_logits(head: None, config: DecoderConfig, hidden_SD: jax.Array) -> jax.Array:
    """`Model.compute_logits`, which pooling has something else for."""
    return hidden_SD.astype(jnp.float32)


def norm_specs(config: EncoderConfig, name: str) -> LayerNorm:
    return LayerNorm(Spec("D", "D", f"{name}.weight"), Spec("D", "D", f"{name}.bias") if config.has_norm_bias else None)


# ---- classifiers ---------------------------------------------------------------------------------


@struct.dataclass
class ScoringHead:
    """classifier(norm(activation(dense(x)))), of a pooled vector; `norm` is None where there is none."""

    dense: Linear
    norm: LayerNorm | None
    classifier: Linear


def head_specs(config: EncoderConfig, dense: str, classifier: str, norm: str | None = None) -> ScoringHead:
    """Its specs, from the names of its modules. A classifier has few labels, so it is whole on every device."""
    return ScoringHead(
        dense=linear("DD", "D D", dense, config.has_head_bias),
        norm=norm_specs(config, norm) if norm else None,
        classifier=linear("YD", "Y D", classifier, has_bias=True),
    )


def scores(p: ScoringHead, config: EncoderConfig, pooled_SD: jax.Array) -> jax.Array:
    """Float32 scores [S, Y] of pooled vectors, float32 on the way, too."""
    hidden_SD = apply_linear("SD,DD->SD", pooled_SD, in_float32(p.dense))
    hidden_SD = HEAD_ACTIVATIONS[config.head_activation](hidden_SD)
    if p.norm is not None:
        hidden_SD = layer_norm(hidden_SD, p.norm, config.norm_eps)
    return apply_linear("SD,YD->SY", hidden_SD, in_float32(p.classifier))


HEAD_ACTIVATIONS = {**ACTIVATIONS, "tanh": jnp.tanh}


def in_float32(p: Linear) -> Linear:
    """With weights as vectors are; quantized ones are multiplied as they are."""
    bias = None if p.bias is None else p.bias.astype(jnp.float32)
    return p.replace(weight=p.weight if is_quantized(p.weight) else p.weight.astype(jnp.float32), bias=bias)


def classifier(dense: str, scores_of: str, norm: str | None = None) -> Classifier:
    """The record of a head whose modules have these names."""
    return Classifier(lambda config: head_specs(config, dense, scores_of, norm), scores)
