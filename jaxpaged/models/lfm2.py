"""LFM2 and LFM2.5, dense and with experts: most layers have a short convolution in place of attention.

It is of every channel by itself, over products of two projections of the token, and its output is weighed by a third
(`layers/short_conv.py`). So such a layer keeps two inputs a channel of a request, however long that is. The others have
attention, with norms on query and key heads. These are the definitions of transformers.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from flax import struct

from jaxpaged.errors import CheckpointError
from jaxpaged.kv_cache_spec import CacheSpec, StateArray, StateSpec
from jaxpaged.layers.experts import SIGMOID, Experts, RouterConfig
from jaxpaged.layers.linear import Linear, apply_linear
from jaxpaged.layers.mlp import Mlp
from jaxpaged.layers.short_conv import Filter, short_convolution
from jaxpaged.layers.state import StateTensor
from jaxpaged.models import llama
from jaxpaged.models.config import (
    FULL,
    SHORT_CONV,
    DecoderConfig,
    ExpertsConfig,
    HfFields,
    LayerConfig,
    ShortConvConfig,
    short,
)
from jaxpaged.models.decoder import (
    Attention,
    Decoder,
    Layer,
    attention_specs,
    decoder_specs,
    feed_forward,
    forward,
    linear,
    norm,
    norm_if_any,
    pre_norm_config,
    self_attention,
)
from jaxpaged.models.expert_specs import check_experts, expert_specs
from jaxpaged.models.interface import LayerContext, LayerOutput
from jaxpaged.params.spec import Spec

CONV = "conv"
"""What `layer_types` calls layers with a convolution."""
NORMS = {"input_layernorm": "operator_norm", "post_attention_layernorm": "ffn_norm"}
PROJECTIONS = ("w1", "w3", "w2")

DEFAULTS = {
    "vocab_size": 65_536,
    "hidden_size": 2560,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "rope_theta": 1_000_000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE_DEFAULTS = {**DEFAULTS, "hidden_size": 2048, "intermediate_size": 7168}
"""Fields that config.json may leave out."""
NO_MATHS = {
    *("block_dim", "block_norm_eps", "block_mlp_init_scale", "block_out_init_scale", "block_use_swiglu"),
    *("block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "use_pos_enc"),
}
"""Fields of published models that transformers does not read: other names of sizes, and how weights began."""


@struct.dataclass
class ShortConv:
    """`b_proj` times `x_proj` go into the convolution, and `c_proj` weighs what comes out of it."""

    b_proj: Linear
    c_proj: Linear
    x_proj: Linear
    conv: Filter
    out_proj: Linear


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """LFM2's config.json. Feed-forward blocks are two thirds as wide as it says, and then a whole number of blocks."""
    fields = own_fields({**DEFAULTS, **hf})
    width = fields.count("intermediate_size")
    if fields.flag("block_auto_adjust_ff_dim", True):
        block, factor = fields.count("block_multiple_of", 256), fields.number("block_ffn_dim_multiplier", 1.0)
        width = -(-int(factor * int(2 * width / 3)) // block) * block
    fields.read |= {"block_ffn_dim_multiplier", "block_multiple_of"}
    return hybrid_config(fields, intermediate_size=width)


def moe_config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """LFM2-MoE's config.json: behind the first layers, experts that are chosen and weighed by sigmoids."""
    fields = own_fields({**MOE_DEFAULTS, **hf})
    num_layers, dense = fields.count("num_hidden_layers"), fields.index("num_dense_layers", 2)
    router = RouterConfig(
        fields.count("num_experts_per_tok", 4),
        SIGMOID,
        is_normalised=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
        least_sum=1e-6,
    )
    experts = ExpertsConfig(
        num_experts=fields.count("num_experts", 32),
        width=fields.count("moe_intermediate_size", 1792),
        router=router,
        layers=tuple(range(dense, num_layers)),
        has_correction=fields.flag("use_expert_bias", True),
    )
    return hybrid_config(fields, experts=check_experts(experts))


def own_fields(hf: dict[str, Any]) -> HfFields:
    """The fields, under the names that other architectures have for them."""
    aliases = {"tie_word_embeddings": "tie_embedding", "intermediate_size": "block_ff_dim", "rms_norm_eps": "norm_eps"}
    renamed = {name: hf[alias] for name, alias in aliases.items() if hf.get(alias) is not None}
    fields = HfFields({"tie_word_embeddings": True, "rms_norm_eps": 1e-5, **hf, **renamed})
    fields.read |= {*aliases.values(), *NO_MATHS}
    return fields


def hybrid_config(fields: HfFields, **options: Any) -> DecoderConfig:
    """What both call alike. `options` are further fields, or others than those of config.json."""
    kinds = layer_kinds(fields)
    conv = ShortConvConfig(fields.count("conv_L_cache", 3), fields.flag("conv_bias", False))
    config = pre_norm_config(fields, [None] * len(kinds))
    of_layer = {FULL: config.layers[0], CONV: LayerConfig(window=None, rope=None, mixer=SHORT_CONV)}
    return replace(config, layers=tuple(of_layer[kind] for kind in kinds), short_conv=conv, **options)


def layer_kinds(fields: HfFields) -> list[str]:
    """The kind of every layer: as `layer_types` says, or else attention in the layers `full_attn_idxs`."""
    num_layers = fields.count("num_hidden_layers")
    attending = fields.value("full_attn_idxs", list(range(num_layers)))
    if not isinstance(attending, list) or not all(type(i) is int and 0 <= i < num_layers for i in attending):
        raise CheckpointError(
            f"config.json: full_attn_idxs is {short(attending)}; it must be a list of layers, of which there are "
            f"{num_layers}."
        )
    defaults = [FULL if i in attending else CONV for i in range(num_layers)]
    kinds = fields.of_layers("layer_types", (FULL, CONV), defaults)
    if FULL not in kinds:
        raise CheckpointError("config.json: no layer of layer_types has attention; published models have some.")
    return kinds


def param_specs(config: DecoderConfig, num_model_shards: int) -> Decoder:
    specs = decoder_specs(config, num_model_shards, norms=NORMS, mixer=mixer_specs, feed_forward=feed_forward_specs)
    return specs.replace(norm=norm("D", "model.embedding_norm"))


def mixer_specs(config: DecoderConfig, name: str, layer: int) -> Attention | ShortConv:
    """Specs of what a layer has to bring tokens together."""
    if config.layers[layer].mixer == SHORT_CONV:
        return short_conv_specs(config, f"{name}.conv")
    name = f"{name}.self_attn"
    return Attention(
        q_proj=linear("NHD", "NH D", f"{name}.q_proj"),
        k_proj=linear("KHD", "KH D", f"{name}.k_proj"),
        v_proj=linear("KHD", "KH D", f"{name}.v_proj"),
        o_proj=linear("DNH", "D NH", f"{name}.out_proj"),
        q_norm=norm("H", f"{name}.q_layernorm"),
        k_norm=norm("H", f"{name}.k_layernorm"),
    )


def short_conv_specs(config: DecoderConfig, name: str) -> ShortConv:
    """The three projections of a token stand one after another in one tensor."""
    assert config.short_conv is not None, "a convolution needs its sizes"
    has_bias = config.short_conv.has_bias

    def projection(part: int) -> Linear:
        weight, bias = (f"{name}.in_proj.{end}" for end in ("weight", "bias"))
        part_of = partial(Spec, fused=("x", "x", "x"), part=part)
        return Linear(part_of("xD", "x D", weight), part_of("x", "x", bias) if has_bias else None)

    bias = Spec("x", "x", f"{name}.conv.bias", dtype="float32") if has_bias else None
    return ShortConv(
        *map(projection, range(3)),
        conv=Filter(Spec("xt", "x 1 t", f"{name}.conv.weight", dtype="float32"), bias),
        out_proj=linear("Dx", "D x", f"{name}.out_proj", has_bias),
    )


def feed_forward_specs(config: DecoderConfig, name: str, layer: int) -> Mlp | Experts:
    """Specs of a layer's feed-forward block."""
    name = f"{name}.feed_forward"
    if layer not in config.sparse_layers:
        gate, up, down = (f"{name}.{projection}" for projection in PROJECTIONS)
        return Mlp(linear("FD", "F D", gate), linear("FD", "F D", up), linear("DF", "D F", down))
    assert config.experts is not None, "a block of experts needs its sizes"
    bias = Spec("E", "E", f"{name}.expert_bias", dtype="float32") if config.experts.has_correction else None
    return expert_specs(config, name, PROJECTIONS).replace(correction=bias)


def short_conv(
    p: ShortConv, config: DecoderConfig, x_TD: jax.Array, state: StateTensor, context: LayerContext
) -> tuple[jax.Array, StateTensor]:
    """The convolution of T new tokens behind those of their requests: ([T, D], state)."""
    into_TD = apply_linear("TD,xD->Tx", x_TD, p.b_proj) * apply_linear("TD,xD->Tx", x_TD, p.x_proj)
    out_TD, state = short_convolution(into_TD, p.conv, state, context.attention, config.deterministic)
    weighed_TD = apply_linear("TD,xD->Tx", x_TD, p.c_proj) * out_TD
    return apply_linear("Tx,Dx->TD", weighed_TD, p.out_proj), state


@partial(jax.jit, static_argnames="config")
def decoder_layer(p: Layer, config: DecoderConfig, x_TD: jax.Array, kv: Any, context: LayerContext) -> LayerOutput:
    """x + convolution(norm(x)), or attention in its place, then x + mlp(norm(x)), or experts."""
    mixer = short_conv if isinstance(p.self_attn, ShortConv) else self_attention
    mixed_TD, kv = mixer(p.self_attn, config, norm_if_any(x_TD, p.input_layernorm, config), kv, context)
    x_TD = x_TD + mixed_TD
    fed_TD, routed = feed_forward(p.mlp, config, norm_if_any(x_TD, p.post_attention_layernorm, config), context)
    return LayerOutput(x_TD + fed_TD, kv, routed)


def cache_specs(config: DecoderConfig, block_size: int, dtype_bytes: int, num_model_shards: int) -> Sequence[CacheSpec]:
    """What every layer caches: keys and values, or the last inputs of a convolution, in the model's own type."""
    assert config.short_conv is not None, "a convolution needs its sizes"
    inputs = StateArray((config.short_conv.width - 1, config.hidden_size), config.dtype, split_axis=1, token_axis=0)
    state = StateSpec(block_size, (inputs,))
    specs = attention_specs(config, block_size, dtype_bytes, num_model_shards)
    return [state if layer.mixer == SHORT_CONV else spec for layer, spec in zip(config.layers, specs, strict=True)]


LFM2 = replace(
    llama.LLAMA,
    architectures=("Lfm2ForCausalLM",),
    config_from_hf=config_from_hf,
    param_specs=param_specs,
    forward=partial(forward, decoder_layer),
    attention_specs=cache_specs,
)
LFM2_MOE = replace(LFM2, architectures=("Lfm2MoeForCausalLM",), config_from_hf=moe_config_from_hf)
