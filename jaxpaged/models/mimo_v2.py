"""MiMo-V2-Flash: windows with sinks between layers that see all tokens, and values that are narrower than keys.

Layers with a window have twice the key heads of others, and a rotation of their own. Experts are chosen as by
DeepSeek-V3 (arXiv 2412.19437, section 2.1.2). The cache keeps values as wide as keys: with heads of 192 and 128 numbers
it is 1.2 times as large as it would have to be. What predicts further tokens is not loaded. Source: config.json and the
published definition.

Letters: p key heads of layers that see all tokens, K those of others, v width of a value.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from jaxpaged.errors import CheckpointError
from jaxpaged.kv_cache_spec import AttentionSpec
from jaxpaged.layers.attention import KVTensor, attend
from jaxpaged.layers.linear import apply_linear
from jaxpaged.models import llama
from jaxpaged.models.config import (
    FULL,
    SLIDING,
    DecoderConfig,
    ExpertsConfig,
    HfFields,
    LayerConfig,
    layer_windows,
)
from jaxpaged.models.decoder import (
    Attention,
    Layer,
    attention_spec,
    decoder_specs,
    feed_forward,
    forward,
    heads_apart,
    heads_of,
    linear,
    norm_if_any,
    pre_norm_config,
    rotated,
)
from jaxpaged.models.expert_specs import (
    CORRECTION,
    DENSE,
    SPARSE,
    check_experts,
    feed_forward_specs,
    layers_by_type,
    sigmoid_router,
)
from jaxpaged.models.interface import LayerContext, LayerOutput
from jaxpaged.models.rope_config import two_ropes, with_rope
from jaxpaged.params.spec import Spec

EVERY = 6
"""Layers from one that sees all tokens to the next, where config.json does not say which do; the first does too."""
ROTATED = 0.334
"""The part of a head that is rotated."""
EXPECTED = {
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "n_shared_experts": 0,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
}
"""Fields that only have one value -> that value."""
OTHER_NAMES = {
    *("sliding_window_size", "layernorm_epsilon", "attention_chunk_size"),
    *("rope_theta", "swa_rope_theta", "partial_rotary_factor"),
}
"""Fields of the publisher's that others stand for."""
SAME = {"swa_num_attention_heads": "num_attention_heads", "swa_head_dim": "head_dim", "swa_v_head_dim": "v_head_dim"}
"""Fields of layers with a window -> those of all, which they must be equal to."""


@dataclass(frozen=True)
class MiMoV2Config(DecoderConfig):
    """`full_kv_heads`: of layers that see all tokens. `value_dim`: of a head's values, which are multiplied by
    `value_scale`."""

    full_kv_heads: int = 0
    value_dim: int = 0
    value_scale: float = 1.0

    def dim_sizes(self) -> dict[str, int]:
        return {**super().dim_sizes(), "p": self.full_kv_heads, "v": self.value_dim}


def config_from_hf(hf: dict[str, Any]) -> MiMoV2Config:
    """MiMo-V2-Flash's config.json, in the publisher's spelling and in that of transformers."""
    fields = own_fields(hf)
    fields.expect(EXPECTED | {name: fields.value(other) for name, other in SAME.items()}, of="MiMo-V2-Flash")
    num_layers = fields.count("num_hidden_layers")
    experts = ExpertsConfig(
        num_experts=fields.count("n_routed_experts", 256),
        width=fields.count("moe_intermediate_size", 2048),
        router=sigmoid_router(fields),
        layers=layers_by_type(fields, range(1, num_layers)),
    )
    windows = layer_windows(fields, fields.count("sliding_window", 129), lambda i: i > 0 and (i + 1) % EVERY != 0)
    full_kv_heads, value_dim = fields.count("num_key_value_heads", 4), fields.count("v_head_dim", 128)
    if value_dim > fields.count("head_dim"):
        raise CheckpointError(f"config.json: v_head_dim {value_dim} is above head_dim; values may only be narrower.")
    swa_kv_heads = fields.count("swa_num_key_value_heads", 2 * full_kv_heads)
    value_scale = fields.number("attention_value_scale", 0.707)
    config = pre_norm_config(
        fields,
        windows,
        norm_eps=1e-5,
        ropes=partial(two_ropes, theta=5_000_000.0, window_theta=10_000.0),
        qkv_bias=fields.flag("attention_bias", False),
        num_mtp_layers=fields.index("num_nextn_predict_layers", 0),
        experts=check_experts(experts),
    )
    return MiMoV2Config(
        **{**vars(config), "num_kv_heads": swa_kv_heads},
        full_kv_heads=full_kv_heads,
        value_dim=value_dim,
        value_scale=value_scale,
    )


def own_fields(hf: dict[str, Any]) -> HfFields:
    """The fields, under the names that other architectures have for them. A window of the publisher's does not count
    the query itself."""
    given = {"head_dim": 192, **hf}
    if given.get("sliding_window_size") is not None:
        given["sliding_window"] = HfFields(given).count("sliding_window_size") + 1
    if given.get("layernorm_epsilon") is not None:
        given["rms_norm_eps"] = given["layernorm_epsilon"]
    kinds = {"hybrid_layer_pattern": ("layer_types", FULL, SLIDING)}
    kinds["moe_layer_freq"] = ("mlp_layer_types", DENSE, SPARSE)
    for name, (meant, zero, one) in kinds.items():
        if isinstance(given.get(name), list):
            given[meant] = [one if each else zero for each in given[name]]
    part = given.get("partial_rotary_factor", ROTATED)
    thetas = given.get("rope_theta", 5_000_000.0), given.get("swa_rope_theta", 10_000.0)
    ropes = ({"rope_theta": theta, "partial_rotary_factor": part} for theta in thetas)
    fields = HfFields(with_rope(given, dict(zip((FULL, SLIDING), ropes))))
    fields.read |= {*OTHER_NAMES, *kinds}
    return fields


def attention_specs_of_layer(config: MiMoV2Config, name: str, layer: int) -> Attention:
    """Specs of a layer's attention."""
    name, heads = f"{name}.self_attn", "p" if config.layers[layer].window is None else "K"
    sinks = Spec("N", "N", f"{name}.attention_sink_bias", dtype="float32")
    return Attention(
        q_proj=linear("NHD", "NH D", f"{name}.q_proj", config.qkv_bias),
        k_proj=linear(f"{heads}HD", f"{heads}H D", f"{name}.k_proj", config.qkv_bias),
        v_proj=linear(f"{heads}vD", f"{heads}v D", f"{name}.v_proj", config.qkv_bias),
        o_proj=linear("DNv", "D Nv", f"{name}.o_proj"),
        sinks=None if config.layers[layer].window is None else sinks,
    )


@partial(jax.jit, static_argnames="config")
def decoder_layer(p: Layer, config: MiMoV2Config, x_TD: jax.Array, kv: KVTensor, context: LayerContext) -> LayerOutput:
    """x + attention(norm(x)), then x + mlp(norm(x)), or experts in its place."""
    q_TNH, k_TKH, v_TKv = heads_apart(*heads_of(norm_if_any(x_TD, p.input_layernorm, config), p.self_attn))
    q_TNH, k_TKH = rotated(q_TNH, k_TKH, config, context)
    v_TKv = (v_TKv * config.value_scale).astype(x_TD.dtype)
    scale, sinks_N = config.query_scale, p.self_attn.sinks
    o_TNv, kv = attend(context.attention, q_TNH, k_TKH, v_TKv, kv, scale=scale, sinks_N=sinks_N)
    x_TD = x_TD + apply_linear("TNv,DNv->TD", o_TNv, p.self_attn.o_proj)
    fed_TD, routed = feed_forward(p.mlp, config, norm_if_any(x_TD, p.post_attention_layernorm, config), context)
    return LayerOutput(x_TD + fed_TD, kv, routed)


def attention_specs(
    config: MiMoV2Config, block_size: int, dtype_bytes: int, num_model_shards: int
) -> list[AttentionSpec]:
    """What every layer caches, with key heads as they are after they were repeated for the shards."""

    def of_layer(layer: LayerConfig) -> AttentionSpec:
        heads = config.full_kv_heads if layer.window is None else config.num_kv_heads
        return attention_spec(layer, heads, config.head_dim, block_size, dtype_bytes, num_model_shards)

    return [of_layer(layer) for layer in config.layers]


MIMO_V2 = replace(
    llama.LLAMA,
    architectures=("MiMoV2FlashForCausalLM",),
    config_from_hf=config_from_hf,
    param_specs=partial(
        decoder_specs, mixer=attention_specs_of_layer, feed_forward=partial(feed_forward_specs, correction=CORRECTION)
    ),
    forward=partial(forward, decoder_layer),
    attention_specs=attention_specs,
)
