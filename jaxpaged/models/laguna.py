"""Laguna: gates on what each head gives, and other numbers of heads in layers that see all tokens.

Layers with a window have more query heads and a rotation of their own; key heads are the same everywhere. A head, or
each of its numbers, is multiplied by the softplus of a product with the layer's input. Experts are chosen by sigmoids
with a correction (arXiv 2408.15664), beside one for all tokens. Source: config.json and the published definition.

Letters: o query heads of layers that see all tokens, N those of others.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged.errors import CheckpointError
from jaxpaged.layers.attention import KVTensor
from jaxpaged.layers.experts import SIGMOID, RouterConfig
from jaxpaged.layers.linear import apply_linear
from jaxpaged.models import llama
from jaxpaged.models.config import FULL, SLIDING, DecoderConfig, ExpertsConfig, HfFields, layer_windows, short
from jaxpaged.models.decoder import (
    Layer,
    attended,
    decoder_specs,
    feed_forward,
    forward,
    linear,
    norm_if_any,
    pre_norm_config,
)
from jaxpaged.models.expert_specs import check_experts, feed_forward_specs, layers_by_type, sparse_layers
from jaxpaged.models.interface import LayerContext, LayerOutput
from jaxpaged.models.muse_glimmer import GatedAttention
from jaxpaged.models.rope_config import rope_fields, two_ropes, with_rope

EXPECTED = {"norm_topk_prob": True, "moe_router_score_func": "sigmoid"}
"""Fields that only have one value -> that value."""
ROPES = {
    FULL: {"rope_type": "default", "rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
}
"""What config.json means where it says nothing of positions."""
PER_HEAD, PER_NUMBER = "per-head", "per-element"
"""What `gating` may be; true is the first."""


@dataclass(frozen=True)
class LagunaConfig(DecoderConfig):
    """`full_heads`: query heads of layers that see all tokens. `gates_numbers`: each number of a head has a gate."""

    full_heads: int = 0
    gates_numbers: bool = False

    def dim_sizes(self) -> dict[str, int]:
        return {**super().dim_sizes(), "o": self.full_heads}


def config_from_hf(hf: dict[str, Any]) -> LagunaConfig:
    """Laguna's config.json."""
    fields = own_fields(hf)
    fields.expect(EXPECTED, of="Laguna")
    num_layers = fields.count("num_hidden_layers")
    default = sparse_layers(fields) if "mlp_only_layers" in hf else range(1, num_layers)
    experts = ExpertsConfig(
        num_experts=fields.count("num_experts", 256),
        width=fields.count("moe_intermediate_size", 512),
        router=RouterConfig(
            fields.count("num_experts_per_tok", 8),
            SIGMOID,
            is_normalised=True,
            scale=fields.number("moe_routed_scaling_factor", 1.0),
        ),
        layers=layers_by_type(fields, default),
        shared_width=fields.count("shared_expert_intermediate_size", 512),
    )
    has_window = [window is not None for window in layer_windows(fields, 1, sliding=lambda i: False)]
    window = fields.count("sliding_window", 512) if any(has_window) else None
    full_heads, heads = heads_of_kinds(fields, has_window)
    has_bias, gates_numbers = fields.flag("attention_bias", False), kind_of_gates(fields) == PER_NUMBER
    fields.read |= {"sliding_window", "decoder_sparse_step", "mlp_only_layers"}
    config = pre_norm_config(
        fields,
        [window if has else None for has in has_window],
        ropes=partial(two_ropes, theta=500_000.0, window_theta=10_000.0),
        qkv_bias=has_bias,
        o_bias=has_bias,
        experts=check_experts(experts),
    )
    return LagunaConfig(**{**vars(config), "num_heads": heads}, full_heads=full_heads, gates_numbers=gates_numbers)


def own_fields(hf: dict[str, Any]) -> HfFields:
    """The fields. What is said of positions for no kind of layers is of all kinds that do not say it themselves."""
    given = with_rope({"head_dim": 128, **hf}, ROPES)
    fields = HfFields(given)
    said = HfFields(rope_fields(fields))
    of_all = {name: value for name, value in said.hf.items() if name not in ROPES}
    of_kinds = {kind: {**of_all, **said.mapping(kind)} for kind in ROPES}
    of_kinds[SLIDING] = fields.mapping("swa_rope_parameters") or of_kinds[SLIDING]
    if "partial_rotary_factor" in hf:
        of_kinds = {
            kind: {"partial_rotary_factor": hf["partial_rotary_factor"], **own} for kind, own in of_kinds.items()
        }
    fields = HfFields({**given, "rope_scaling": None, "rope_parameters": of_kinds})
    fields.read |= {"partial_rotary_factor", "swa_rope_parameters"}
    return fields


def heads_of_kinds(fields: HfFields, has_window: list[bool]) -> tuple[int, int]:
    """(query heads of layers that see all tokens, those of layers with a window)."""
    num_layers, key_heads = len(has_window), fields.count("num_key_value_heads", 8)
    found = fields.value("num_attention_heads_per_layer", [fields.count("num_attention_heads")] * num_layers)
    is_split = isinstance(found, list) and all(type(n) is int and n > 0 and n % key_heads == 0 for n in found)
    of_kinds = dict(zip(has_window, found)) if is_split else {}
    if not is_split or [of_kinds.get(kind) for kind in has_window] != found:
        raise CheckpointError(
            f"config.json: num_attention_heads_per_layer is {short(found)}; it must have {num_layers} entries, each a "
            f"multiple of num_key_value_heads, {key_heads}, and the same for all layers of one kind of layer_types."
        )
    return of_kinds.get(False, found[0]), of_kinds.get(True, found[0])


def kind_of_gates(fields: HfFields) -> str:
    """What has a gate of its own: a head, or each of its numbers."""
    kinds = (PER_HEAD, PER_NUMBER)
    kind = PER_HEAD if fields.value("gating", True) is True else fields.choice("gating", kinds, PER_HEAD)
    of_layer = kind.replace("-", "_")
    fields.of_layers("gating_types", (of_layer,), [of_layer] * fields.count("num_hidden_layers"))
    return kind


def attention_specs_of_layer(config: LagunaConfig, name: str, layer: int) -> GatedAttention:
    """Specs of a layer's attention, without norms."""
    name, heads = f"{name}.self_attn", "o" if config.layers[layer].window is None else "N"
    gates = f"{heads}H" if config.gates_numbers else heads
    return GatedAttention(
        q_proj=linear(f"{heads}HD", f"{heads}H D", f"{name}.q_proj", config.qkv_bias),
        k_proj=linear("KHD", "KH D", f"{name}.k_proj", config.qkv_bias),
        v_proj=linear("KHD", "KH D", f"{name}.v_proj", config.qkv_bias),
        o_proj=linear(f"D{heads}H", f"D {heads}H", f"{name}.o_proj", config.o_bias),
        gate_proj=linear(f"{gates}D", f"{gates} D", f"{name}.g_proj"),
    )


@partial(jax.jit, static_argnames="config")
def decoder_layer(p: Layer, config: LagunaConfig, x_TD: jax.Array, kv: KVTensor, context: LayerContext) -> LayerOutput:
    """x + attention(norm(x)), whose heads have gates, then x + mlp(norm(x)), or experts in its place."""
    normed_TD = norm_if_any(x_TD, p.input_layernorm, config)
    o_TNH, kv = attended(p.self_attn, config, normed_TD, kv, context)
    gated_TNH = o_TNH * gates_of(p.self_attn, config, normed_TD)
    x_TD = apply_linear("TNH,DNH->TD", gated_TNH, p.self_attn.o_proj, x_TD)
    normed_TD = norm_if_any(x_TD, p.post_attention_layernorm, config)
    x_TD, routed = feed_forward(p.mlp, config, normed_TD, context, x_TD)
    return LayerOutput(x_TD, kv, routed)


def gates_of(p: GatedAttention, config: LagunaConfig, x_TD: jax.Array) -> jax.Array:
    """[T, N, H], or [T, N, 1]: what the heads are multiplied by."""
    if config.gates_numbers:
        logits_TNH = apply_linear("TD,NHD->TNH", x_TD, p.gate_proj)
    else:
        logits_TNH = apply_linear("TD,ND->TN", x_TD, p.gate_proj)[:, :, None]
    return jax.nn.softplus(logits_TNH.astype(jnp.float32)).astype(x_TD.dtype)


LAGUNA = replace(
    llama.LLAMA,
    architectures=("LagunaForCausalLM",),
    config_from_hf=config_from_hf,
    param_specs=partial(
        decoder_specs,
        qk_norm=True,
        mixer=attention_specs_of_layer,
        feed_forward=partial(feed_forward_specs, shared="shared_expert", correction="experts.e_score_correction_bias"),
    ),
    forward=partial(forward, decoder_layer),
)
