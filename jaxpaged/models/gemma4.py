"""Gemma 4: layers of two kinds, some of which read the keys and values that an earlier one cached.

Every sixth layer sees all tokens; its heads are wider, it may have other key heads, and keys may be its values too.
The last layers have no keys of their own (`num_kv_shared_layers`): they read those of the last layer of their kind
that has some, and cache nothing. In smaller models every layer also reads a vector of its own for each token, made of
the token's id and of its embedding; in larger ones experts stand beside the dense block. Queries, keys and values are
normalised, and scores are not scaled. Sources: config.json and the published definition.

Letters: p key heads, q width of a head in layers that see all tokens, y columns of the wide blocks, l numbers of a
layer's own input, z those of all layers, one behind the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from jaxpaged.errors import CheckpointError
from jaxpaged.kv_cache_spec import AttentionSpec
from jaxpaged.layers.attention import KVTensor, attend
from jaxpaged.layers.embedding import Table, embed
from jaxpaged.layers.experts import Experts, Routed, RouterConfig, of_layers
from jaxpaged.layers.linear import Linear, apply_linear, with_backend
from jaxpaged.layers.mlp import ACTIVATIONS, Mlp, gated_mlp
from jaxpaged.layers.norm import Norm, normalised, rms_norm
from jaxpaged.layers.rope import apply_rope
from jaxpaged.models import llama
from jaxpaged.models.config import (
    FULL,
    LATER,
    SLIDING,
    DecoderConfig,
    ExpertsConfig,
    HfFields,
    LayerConfig,
    common_fields,
    layer_windows,
    short,
)
from jaxpaged.models.decoder import (
    SANDWICH_NORMS,
    Attention,
    Decoder,
    attention_spec,
    heads_apart,
    heads_of,
    kept_apart,
    linear,
    mixed,
    norm,
    norm_of_heads,
    plain_mlp,
    rotations,
    seen,
)
from jaxpaged.models.expert_specs import check_experts, stacked_expert_specs
from jaxpaged.models.interface import Batch, ForwardOutput, LayerContext, LayerOutput
from jaxpaged.models.rope_config import by_kind, longest_sequence, rope_fields, rope_from_params
from jaxpaged.models.vision.gemma4 import GEMMA4_VISION
from jaxpaged.models.wrapped import text_part
from jaxpaged.params.sharding import device_sizes
from jaxpaged.params.spec import Spec

EVERY = 6
"""Layers from one that sees all tokens to the next, where config.json does not say which do."""
ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
"""What config.json means where it says nothing of positions."""


@dataclass(frozen=True)
class Gemma4Config(DecoderConfig):
    """`full_head_dim`, `full_kv_heads`: of layers that see all tokens; there `k_is_v`: keys are values too.
    `num_shared`: of the last layers, which read what others cached; `wide`: their blocks have twice the columns.
    `layer_width`: numbers of a layer's own input, 0 where there is none. `pad_token`: the id of
    which pictures have the input."""

    full_head_dim: int = 0
    full_kv_heads: int = 0
    k_is_v: bool = False
    num_shared: int = 0
    wide: bool = False
    layer_width: int = 0
    pad_token: int = field(default=0, metadata={LATER: True})

    splits_into_stages: ClassVar[bool] = False

    @property
    def num_caches(self) -> int:
        return self.num_layers - self.num_shared

    @property
    def sources(self) -> tuple[int, ...]:
        """Of each layer, which one caches the keys and values that it reads."""
        last = {layer.window is None: i for i, layer in enumerate(self.layers[: self.num_caches])}
        return tuple(i if i < self.num_caches else last[layer.window is None] for i, layer in enumerate(self.layers))

    def leaves_out(self, name: str) -> bool:
        """Keys and values of layers that have none of their own; published files have them all the same."""
        layers = range(self.num_caches, self.num_layers)
        return name.startswith(tuple(f"model.layers.{i}.self_attn.{kind}_" for i in layers for kind in "kv"))

    def dim_sizes(self) -> dict[str, int]:
        own = {"p": self.full_kv_heads, "q": self.full_head_dim}
        own |= {"y": 2 * self.intermediate_size} if self.wide else {}
        own |= {"l": self.layer_width, "z": self.num_layers * self.layer_width} if self.layer_width else {}
        return {**super().dim_sizes(), **own}


@struct.dataclass
class Gemma4Experts:
    """Experts beside a dense block, and the norms around both. `router_scale` [D] weighs what the router reads."""

    experts: Experts
    router_scale: jax.Array
    pre_norm: Norm
    post_norm: Norm
    post_norm_of_dense: Norm


@struct.dataclass
class LayerInput:
    """What makes a summand of the residual stream of a layer's own input."""

    gate: Linear
    projection: Linear
    post_norm: Norm


@struct.dataclass
class Gemma4Layer:
    """`self_attn` has no projections of keys and values where another layer caches them. `scalar` multiplies the
    residual stream behind the layer."""

    self_attn: Attention
    mlp: Mlp
    input_layernorm: Norm
    post_attention_layernorm: Norm
    pre_feedforward_layernorm: Norm
    post_feedforward_layernorm: Norm
    scalar: jax.Array
    experts: Gemma4Experts | None = None
    layer_input: LayerInput | None = None


@struct.dataclass
class LayerInputs:
    """What makes the layers' own inputs: a table [V, z] of token ids, a projection of embeddings, and its norm."""

    table: Table
    projection: Linear
    norm: Norm


@struct.dataclass
class Gemma4Decoder(Decoder):
    """All parameters."""

    layer_inputs: LayerInputs | None = None


# ---- config.json ---------------------------------------------------------------------------------


def config_from_hf(hf: dict[str, Any]) -> Gemma4Config:
    """Gemma 4's config.json, or the part of it that describes the language model."""
    fields = HfFields({"head_dim": 256, **text_part(hf)})
    common, num_layers = common_fields(fields, tie_default=True), fields.count("num_hidden_layers")
    if fields.value("use_bidirectional_attention") not in (None, "vision"):
        raise CheckpointError("config.json: use_bidirectional_attention is 'all'; only causal text is supported.")
    windows = list(layer_windows(fields, fields.count("sliding_window", 512), lambda i: (i + 1) % EVERY != 0))
    windows[-1] = None
    k_is_v = fields.flag("attention_k_eq_v", False)
    num_shared = fields.index("num_kv_shared_layers", 0)
    check_shared(windows, num_shared)
    head_dim, kv_heads = full_sizes(fields, windows, common["num_kv_heads"], k_is_v)
    rope, rope_of_windows = rope_of(fields, FULL, head_dim), rope_of(fields, SLIDING, common["head_dim"])
    layer_width = fields.index("hidden_size_per_layer_input", 256)
    if layer_width and fields.count("vocab_size_per_layer_input", common["vocab_size"]) != common["vocab_size"]:
        raise CheckpointError("config.json: vocab_size_per_layer_input must be vocab_size.")
    fields.read.add("vocab_size_per_layer_input")
    has_bias = fields.flag("attention_bias", False)
    config = Gemma4Config(
        **{**common, "query_scale": 1.0, "embed_scale": common["hidden_size"] ** 0.5},
        activation=fields.choice("hidden_activation", tuple(ACTIVATIONS), "gelu_pytorch_tanh"),
        layers=tuple(LayerConfig(window, rope if window is None else rope_of_windows) for window in windows),
        max_position_embeddings=longest_sequence(rope),
        max_model_len=longest_sequence(rope),
        qkv_bias=has_bias,
        o_bias=has_bias,
        final_soft_cap=fields.number_or_none("final_logit_softcapping"),
        experts=experts_config(fields, num_layers),
        full_head_dim=head_dim,
        full_kv_heads=kv_heads,
        k_is_v=k_is_v,
        num_shared=num_shared,
        wide=fields.flag("use_double_wide_mlp", False) and num_shared > 0,
        layer_width=layer_width,
        pad_token=fields.index("pad_token_id", 0),
    )
    fields.read.add("hidden_act")
    fields.refuse_unread()
    return config


def full_sizes(fields: HfFields, windows: Sequence[int | None], kv_heads: int, k_is_v: bool) -> tuple[int, int]:
    """(head dim, key heads) of layers that see all tokens: as newer config.json say of each of them, or as older ones
    say of all, where only models whose keys are values have other key heads there."""
    of_all = {"head_dim": fields.count("global_head_dim", 512), "num_key_value_heads": kv_heads}
    if k_is_v:
        of_all["num_key_value_heads"] = fields.count("num_global_key_value_heads", kv_heads)
    fields.read.add("num_global_key_value_heads")
    of_layers = fields.mapping("per_layer_config")
    full = [str(i) for i, window in enumerate(windows) if window is None]
    given = [of_layers[i] for i in full if i in of_layers]
    if not of_layers:
        return of_all["head_dim"], of_all["num_key_value_heads"]
    is_alike = len(given) == len(full) == len(of_layers) and all(each == given[0] for each in given)
    if not is_alike or not isinstance(given[0], dict) or not given[0].keys() <= of_all.keys():
        raise CheckpointError(
            f"config.json: per_layer_config is {short(of_layers)}; it may have head_dim and num_key_value_heads, the "
            f"same for each of the layers {', '.join(full)}, which see all tokens, and nothing of others."
        )
    own = HfFields({"head_dim": of_all["head_dim"], "num_key_value_heads": kv_heads, **given[0]})
    return own.count("head_dim"), own.count("num_key_value_heads")


def rope_of(fields: HfFields, kind: str, head_dim: int) -> Any:
    """The rotation of layers of one kind."""
    params = by_kind(rope_fields(fields))[kind] or ROPES[kind]
    return rope_from_params(fields, params, ROPES[kind]["rope_theta"], head_dim)


def experts_config(fields: HfFields, num_layers: int) -> ExpertsConfig | None:
    """Experts of every layer, if there are some."""
    names = ("num_experts", "top_k_experts", "moe_intermediate_size")
    if not fields.flag("enable_moe_block", False):
        fields.read |= {*names}
        return None
    num_experts, per_token, width = (fields.count(name) for name in names)
    router = RouterConfig(per_token, is_normalised=True)
    return check_experts(ExpertsConfig(num_experts, width, router, tuple(range(num_layers))))


def check_shared(windows: Sequence[int | None], num_shared: int) -> None:
    """CheckpointError where a layer would read what no layer of its kind has cached."""
    own, shared = windows[: len(windows) - num_shared], windows[len(windows) - num_shared :]
    if num_shared >= len(windows) or not {window is None for window in shared} <= {window is None for window in own}:
        raise CheckpointError(
            f"config.json: num_kv_shared_layers is {num_shared} of {len(windows)} layers, so that some read keys that "
            "no earlier layer of their kind has. Is this the model's own config.json?"
        )


# ---- parameters ----------------------------------------------------------------------------------


def param_specs(config: Gemma4Config, num_model_shards: int) -> Gemma4Decoder:
    """Specs of the whole decoder. Raises ConfigError when the model cannot be split over so many shards."""
    device_sizes(config.dim_sizes(), num_model_shards)
    name = "model.per_layer_model_projection"
    inputs = LayerInputs(
        table=Spec("Vz", "V z", "model.embed_tokens_per_layer.weight"),
        projection=linear("zD", "z D", name),
        norm=norm("l", "model.per_layer_projection_norm"),
    )
    decoder = Gemma4Decoder(
        embed_tokens=Spec("VD", "V D", "model.embed_tokens.weight"),
        layers=[layer_specs(config, f"model.layers.{i}", i) for i in range(config.num_layers)],
        norm=norm("D", "model.norm"),
        lm_head=None if config.tie_embeddings else Spec("VD", "V D", "lm_head.weight"),
        layer_inputs=inputs if config.layer_width else None,
    )
    return with_backend(decoder, config.matmul_backend)


def layer_specs(config: Gemma4Config, name: str, layer: int) -> Gemma4Layer:
    return Gemma4Layer(
        self_attn=attention_specs_of_layer(config, f"{name}.self_attn", layer),
        mlp=plain_mlp(f"{name}.mlp", "y" if config.wide and layer >= config.num_caches else "F"),
        **{each: norm("D", f"{name}.{there}") for each, there in SANDWICH_NORMS.items()},
        scalar=Spec("", "1", f"{name}.layer_scalar"),
        experts=expert_specs(name) if config.experts else None,
        layer_input=input_specs(name) if config.layer_width else None,
    )


def attention_specs_of_layer(config: Gemma4Config, name: str, layer: int) -> Attention:
    """Specs of a layer's attention, without keys and values where another layer caches them."""
    is_full, has_keys = config.layers[layer].window is None, layer < config.num_caches
    heads, width = ("p", "q") if is_full else ("K", "H")
    project = lambda letter, kind: linear(
        f"{letter}{width}D", f"{letter}{width} D", f"{name}.{kind}_proj", config.qkv_bias
    )
    return Attention(
        q_proj=project("N", "q"),
        k_proj=project(heads, "k") if has_keys else None,
        v_proj=project(heads, "v") if has_keys and not (is_full and config.k_is_v) else None,
        o_proj=linear(f"DN{width}", f"D N{width}", f"{name}.o_proj", config.o_bias),
        q_norm=norm(width, f"{name}.q_norm"),
        k_norm=norm(width, f"{name}.k_norm") if has_keys else None,
    )


def expert_specs(name: str) -> Gemma4Experts:
    """Specs of the experts of a layer, which stand beside its dense block."""
    experts = stacked_expert_specs(name, "router.proj", transposed=False)
    scale = Spec("E", "E", f"{name}.router.per_expert_scale", dtype="float32")
    return Gemma4Experts(
        experts=experts.replace(expert_scale=scale),
        router_scale=Spec("D", "D", f"{name}.router.scale", dtype="float32"),
        pre_norm=norm("D", f"{name}.pre_feedforward_layernorm_2"),
        post_norm=norm("D", f"{name}.post_feedforward_layernorm_2"),
        post_norm_of_dense=norm("D", f"{name}.post_feedforward_layernorm_1"),
    )


def input_specs(name: str) -> LayerInput:
    return LayerInput(
        gate=linear("lD", "l D", f"{name}.per_layer_input_gate"),
        projection=linear("Dl", "D l", f"{name}.per_layer_projection"),
        post_norm=norm("D", f"{name}.post_per_layer_input_norm"),
    )


# ---- layers --------------------------------------------------------------------------------------


def self_attention(
    p: Attention, config: Gemma4Config, x_TD: jax.Array, kv: KVTensor, context: LayerContext
) -> tuple[jax.Array, KVTensor]:
    """Causal self-attention of T new tokens over all that their requests have cached: ([T, D], kv)."""
    rotate = lambda x: apply_rope(x, *context.cos_sin)
    if p.qkv_proj is not None or p.v_proj is not None:
        q_TNH, k_TKH, v_TKH = heads_apart(*heads_of(x_TD, p))
    else:
        q_TNH = apply_linear("TD,NHD->TNH", x_TD, p.q_proj)
        k_TKH = v_TKH = None if p.k_proj is None else apply_linear("TD,KHD->TKH", x_TD, p.k_proj)
    q_TNH = rotate(norm_of_heads(q_TNH, p.q_norm, config))
    if k_TKH is not None and v_TKH is not None:
        k_TKH, v_TKH = rotate(norm_of_heads(k_TKH, p.k_norm, config)), normalised(v_TKH, config.norm).astype(x_TD.dtype)
    o_TNH, kv = attend(context.attention, q_TNH, k_TKH, v_TKH, kv, scale=config.query_scale)
    return apply_linear("TNH,DNH->TD", o_TNH, p.o_proj), kv


def feed_forward(
    p: Gemma4Layer, config: Gemma4Config, x_TD: jax.Array, context: LayerContext
) -> tuple[jax.Array, Routed | None]:
    """[T, D] of the dense block, and of the experts beside it; and how many tokens went to each, where experts move."""
    own = partial(rms_norm, config=config.norm)
    dense_TD = gated_mlp(own(x_TD, p.pre_feedforward_layernorm), p.mlp, config.activation)
    if p.experts is None:
        return dense_TD, None
    judged_TD = normalised(x_TD, config.norm) * (p.experts.router_scale * config.hidden_size**-0.5)
    mixed_TD, routed = mixed(p.experts.experts, config, own(x_TD, p.experts.pre_norm), context, judged_TD)
    return own(dense_TD, p.experts.post_norm_of_dense) + own(mixed_TD, p.experts.post_norm), routed


@partial(jax.jit, static_argnames="config")
def decoder_layer(
    p: Gemma4Layer,
    config: Gemma4Config,
    x_TD: jax.Array,
    kv: KVTensor,
    context: LayerContext,
    input_Tl: jax.Array | None,
) -> LayerOutput:
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))), then what the layer's own input adds."""
    own = partial(rms_norm, config=config.norm)
    attended_TD, kv = self_attention(p.self_attn, config, own(x_TD, p.input_layernorm), kv, context)
    x_TD = x_TD + own(attended_TD, p.post_attention_layernorm)
    fed_TD, routed = feed_forward(p, config, x_TD, context)
    x_TD = x_TD + own(fed_TD, p.post_feedforward_layernorm)
    if p.layer_input is not None:
        assert input_Tl is not None
        gate_Tl = ACTIVATIONS[config.activation](apply_linear("TD,lD->Tl", x_TD, p.layer_input.gate))
        added_TD = apply_linear("Tl,Dl->TD", gate_Tl * input_Tl, p.layer_input.projection)
        x_TD = x_TD + own(added_TD, p.layer_input.post_norm)
    return LayerOutput(kept_apart(config, x_TD * p.scalar), kv, routed)


def inputs_of_layers(p: LayerInputs | None, config: Gemma4Config, batch: Batch, x_TD: jax.Array) -> jax.Array | None:
    """[T, L, l]: of every layer its own input. Where a picture is, its embedding and the padding token make it."""
    if p is None:
        return None
    tokens_T = batch.tokens_T
    if batch.is_visual_T is not None:
        tokens_T = jnp.where(batch.is_visual_T, config.pad_token, tokens_T)
    shape = len(tokens_T), config.num_layers, config.layer_width
    of_ids_TLl = embed(tokens_T, p.table, config.layer_width**0.5).reshape(shape)
    projected_Tz = apply_linear("TD,zD->Tz", x_TD, p.projection) * jnp.asarray(config.hidden_size**-0.5, x_TD.dtype)
    return (rms_norm(projected_Tz.reshape(shape), p.norm, config.norm) + of_ids_TLl) * jnp.asarray(0.5**0.5, x_TD.dtype)


def forward(
    params: Gemma4Decoder, config: Gemma4Config, batch: Batch, kv: Sequence[KVTensor], taps: tuple[int, ...] = ()
) -> ForwardOutput:
    """All layers; those without a cache of their own are given that of the layer they read."""
    assert params.norm is not None, "this model is not cut into stages"
    streams, told, kv = list[jax.Array](), list[Routed](), list(kv)
    x_TD = kept_apart(config, embed(batch.tokens_T, params.embed_tokens, config.embed_scale))
    (x_TD,) = (x_TD,) if batch.visual_TE is None else seen(config, batch, x_TD)
    cos_sin = rotations(config, batch.positions_T)
    inputs_TLl = inputs_of_layers(params.layer_inputs, config, batch, x_TD)
    for i, (p, layer) in enumerate(zip(params.layers, config.layers, strict=True)):
        streams.append(x_TD)
        group, tensor = batch.caches[config.sources[i]]
        context = LayerContext(batch.attention[group], cos_sin.get(layer.rope))
        output = decoder_layer(p, config, x_TD, kv[tensor], context, None if inputs_TLl is None else inputs_TLl[:, i])
        x_TD, kv[tensor] = output.x_TD, output.kv
        told += [] if output.routed is None else [output.routed]
    streams.append(x_TD)
    return ForwardOutput(
        rms_norm(x_TD, params.norm, config.norm),
        kv,
        taps=tuple(streams[i] for i in taps),
        routed=of_layers(told),
    )


def attention_specs(
    config: Gemma4Config, block_size: int, dtype_bytes: int, num_model_shards: int
) -> list[AttentionSpec]:
    """What the layers cache that have keys and values, with key heads as they are after they were repeated."""

    def of_layer(layer: LayerConfig) -> AttentionSpec:
        heads = (
            (config.num_kv_heads, config.head_dim)
            if layer.window is not None
            else (config.full_kv_heads, config.full_head_dim)
        )
        return attention_spec(layer, *heads, block_size, dtype_bytes, num_model_shards)

    return [of_layer(layer) for layer in config.layers[: config.num_caches]]


GEMMA4 = replace(
    llama.LLAMA,
    architectures=("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    config_from_hf=config_from_hf,
    param_specs=param_specs,
    forward=forward,
    attention_specs=attention_specs,
    vision=GEMMA4_VISION,
)
