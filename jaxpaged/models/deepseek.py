"""DeepSeek-V2 and V3, and Kimi-K2 and GLM-4.7-Flash, which are V3s: latent attention and blocks of experts.

A token caches one latent and one rotated key for all heads (MLA, arXiv 2405.04434, section 2.1). Neither keys nor
values are ever made of it: queries are multiplied with the matrix that would make keys, and what they attend to with
the one that would make values (section 2.1.2). V2's router takes the best of a softmax, V3's the best of sigmoids with
a correction (arXiv 2412.19437, section 2.1.2), both of a few groups where there are groups. V3's layer that predicts a
token further is not loaded.

Letters: P numbers of a key that is rotated, C those of a latent.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxpaged.errors import CheckpointError
from jaxpaged.kv_cache_spec import LatentSpec
from jaxpaged.layers.experts import RouterConfig
from jaxpaged.layers.latent_attention import attend_latents
from jaxpaged.layers.linear import Linear, apply_linear
from jaxpaged.layers.lora import grown_heads, into_latents, out_of_latents
from jaxpaged.layers.norm import Norm, NormConfig, rms_norm
from jaxpaged.layers.rope import apply_rope
from jaxpaged.models import llama
from jaxpaged.models.config import DecoderConfig, ExpertsConfig, HfFields, LatentConfig
from jaxpaged.models.decoder import Layer, decoder_specs, feed_forward, forward, grown, linear, norm, pre_norm_config
from jaxpaged.models.expert_specs import CORRECTION, check_experts, feed_forward_specs, layers_by_type, sigmoid_router
from jaxpaged.models.interface import LayerContext, LayerOutput
from jaxpaged.models.rope_config import score_factor, single_rope
from jaxpaged.models.wrapped import text_part
from jaxpaged.params.quantized import QuantizedArray
from jaxpaged.params.spec import Spec

LATENT_NORM_EPS = 1e-6
"""Of the norms of latents, whatever config.json says of the others."""

GREEDY, GROUPS, CORRECTED = "greedy", "group_limited_greedy", "noaux_tc"
"""What config.json calls the choice of experts: of V2, of V2 with groups, and of V3."""

NO_MATHS = {"ep_size", "qk_head_dim"}
"""Over how many devices training split experts, and a sum of two other fields."""


@struct.dataclass
class LatentAttention:
    """`q_a_proj` and its norm make the latent of queries, where there is one; else `q_proj` reads the hidden state.
    `k_up` [N, k, c] and `v_up` [N, v, c] would make keys and values of a latent."""

    q_a_proj: Linear | None
    q_a_layernorm: Norm | None
    q_proj: Linear
    kv_a_proj: Linear
    kv_a_layernorm: Norm
    k_up: Linear
    v_up: Linear
    o_proj: Linear


def v2_config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """DeepSeek-V2's config.json."""
    fields = own_fields(hf)
    fields.choice("scoring_func", ("softmax",), "softmax")
    if fields.flag("norm_topk_prob", False):
        raise CheckpointError(
            "config.json: norm_topk_prob is true; what scales such weights differs between implementations of "
            "DeepSeek-V2, and published models have false. Use a DeepSeek-V3 architecture, or false."
        )
    method = fields.choice("topk_method", (GREEDY, GROUPS), GREEDY)
    num_groups, of_token = (fields.count("n_group", 1), fields.count("topk_group", 1)) if method == GROUPS else (1, 1)
    fields.read |= {"n_group", "topk_group"}
    router = RouterConfig(
        fields.count("num_experts_per_tok"),
        num_groups=num_groups,
        groups_per_token=of_token,
        best_of_group=1,
        scale=fields.number("routed_scaling_factor", 1.0),
    )
    return latent_config(fields, router, shared=2, first=0, experts=64)


def v3_config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """DeepSeek-V3's config.json, and Kimi-K2's."""
    fields = own_fields(hf)
    fields.choice("scoring_func", ("sigmoid",), "sigmoid")
    fields.choice("topk_method", (CORRECTED,), CORRECTED)
    router = sigmoid_router(fields, num_groups=8, groups_per_token=4, scale=2.5)
    return latent_config(fields, router, shared=1, first=3, experts=256)


GLM_DEFAULTS = {
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.8,
    "first_k_dense_replace": 1,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
}


def glm_config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """GLM-4.7-Flash's config.json: a V3 with other sizes and names of GLM."""
    return v3_config_from_hf({**GLM_DEFAULTS, "rms_norm_eps": 1e-5, **hf})


def kimi_k25_config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Of the part of Kimi-K2.5's config.json that describes the language model, a V3."""
    return v3_config_from_hf(text_part(hf))


def own_fields(hf: dict[str, Any]) -> HfFields:
    """The fields, with the sizes of queries where others have those of keys. What config.json says of those is the
    rotated part of a head, and as many key heads as there would be."""
    fields = HfFields(hf)
    query_dim = fields.count("qk_nope_head_dim", 128) + fields.count("qk_rope_head_dim", 64)
    fields = HfFields({**hf, "head_dim": query_dim, "num_key_value_heads": fields.count("num_attention_heads")})
    fields.read |= NO_MATHS
    return fields


def latent_config(
    fields: HfFields, router: RouterConfig, shared: int, first: int, experts: int, **options: Any
) -> DecoderConfig:
    """What all of them call alike; the numbers are the defaults of numbers of experts and of dense layers. `options`
    are more fields of the result."""
    latents = LatentConfig(
        rank=fields.count("kv_lora_rank", 512),
        plain_dim=fields.count("qk_nope_head_dim", 128),
        rope_dim=fields.count("qk_rope_head_dim", 64),
        value_dim=fields.count("v_head_dim", 128),
        query_rank=fields.count_or_none("q_lora_rank", 1536),
    )
    num_layers, width = fields.count("num_hidden_layers"), fields.count("moe_intermediate_size")
    step, dense = fields.count("moe_layer_freq", 1), fields.index("first_k_dense_replace", first)
    sparse = tuple(i for i in range(num_layers) if i >= dense and i % step == 0)
    blocks = ExpertsConfig(
        num_experts=fields.count("n_routed_experts", experts),
        width=width,
        router=router,
        layers=layers_by_type(fields, sparse),
        shared_width=width * fields.index("n_shared_experts", shared),
    )
    has_bias, factor = fields.flag("attention_bias", False), score_factor(fields)
    config = pre_norm_config(
        fields,
        [None] * num_layers,
        ropes=lambda fields, head_dim: (single_rope(fields, latents.rope_dim),) * 2,
        qkv_bias=has_bias,
        o_bias=has_bias,
        interleaved_rope=fields.flag("rope_interleave", True),
        num_mtp_layers=fields.index("num_nextn_predict_layers", 0),
        experts=check_experts(blocks),
        latents=latents,
        **options,
    )
    return replace(config, query_scale=config.query_scale * factor)


def attention_specs_of_layer(config: DecoderConfig, name: str, layer: int) -> Any:
    """Specs of a layer's attention. The matrices that make keys and values stand head by head in one tensor."""
    name = f"{name}.self_attn"
    assert config.latents is not None, "latent attention needs its sizes"
    has_latent = config.latents.query_rank is not None
    up = partial(Spec, hf_name=f"{name}.kv_b_proj.weight", fused=("k", "v"), within="N")
    queries = linear("NHa", "NH a", f"{name}.q_b_proj") if has_latent else linear("NHD", "NH D", f"{name}.q_proj")
    return LatentAttention(
        q_a_proj=linear("aD", "a D", f"{name}.q_a_proj", config.qkv_bias) if has_latent else None,
        q_a_layernorm=norm("a", f"{name}.q_a_layernorm") if has_latent else None,
        q_proj=queries,
        kv_a_proj=linear("wD", "w D", f"{name}.kv_a_proj_with_mqa", config.qkv_bias),
        kv_a_layernorm=norm("c", f"{name}.kv_a_layernorm"),
        k_up=Linear(up("Nkc", "Nk c", part=0)),
        v_up=Linear(up("Nvc", "Nv c", part=1)),
        o_proj=linear("DNv", "D Nv", f"{name}.o_proj", config.o_bias),
    )


def latent_attention(
    p: LatentAttention, config: DecoderConfig, x_TD: jax.Array, cache: jax.Array, context: LayerContext
) -> tuple[jax.Array, jax.Array]:
    """Causal self-attention of T new tokens over the latents that their requests have cached: ([T, D], cache)."""
    sizes = config.latents
    assert sizes is not None and context.cos_sin is not None, "a part of every key is rotated"
    latent_norm = replace(config.norm, eps=LATENT_NORM_EPS)
    q_TNH = grown(queries(p, x_TD, latent_norm), config, context)
    kv_TW = apply_linear("TD,wD->Tw", x_TD, p.kv_a_proj)
    latent_TC = rms_norm(kv_TW[:, : sizes.rank], p.kv_a_layernorm, latent_norm)
    rotate = lambda x_TNP: apply_rope(x_TNP, *context.cos_sin, config.interleaved_rope)
    q_rope_TNP = rotate(q_TNH[..., sizes.plain_dim :])
    rope_TP = rotate(kv_TW[:, None, sizes.rank :])[:, 0]
    q_TNC = absorbed(q_TNH[..., : sizes.plain_dim], p.k_up)
    out_TNC, cache = attend_latents(
        context.attention, q_TNC, q_rope_TNP, latent_TC, rope_TP, cache, scale=config.query_scale
    )
    return apply_linear("TNv,DNv->TD", values(out_TNC, p.v_up), p.o_proj), cache


def queries(p: LatentAttention, x_TD: jax.Array, latent_norm: NormConfig) -> jax.Array:
    """[T, N, H], not rotated."""
    if p.q_a_proj is None:
        return apply_linear("TD,NHD->TNH", x_TD, p.q_proj)
    latent = rms_norm(apply_linear("TD,aD->Ta", x_TD, p.q_a_proj), p.q_a_layernorm, latent_norm)
    return apply_linear("Ta,NHa->TNH", latent, p.q_proj)


def absorbed(q_TNk: jax.Array, p: Linear) -> jax.Array:
    """[T, N, C]: queries that meet latents in place of the keys [N, k, C] would make of them."""
    if p.lora is not None:
        base_TNC = absorbed(grown_heads(q_TNk, p.lora), p.replace(lora=None))
        return (base_TNC + into_latents(q_TNk, p.lora)).astype(q_TNk.dtype)
    weight = p.weight
    if isinstance(weight, QuantizedArray):
        q_TNk = (q_TNk.astype(jnp.float32) * weight.scales).astype(q_TNk.dtype)
        weight = weight.values.astype(q_TNk.dtype)
    return product_of_heads("NTk,Nkc->NTc", q_TNk, weight).astype(q_TNk.dtype)


def values(x_TNC: jax.Array, p: Linear) -> jax.Array:
    """[T, N, v]: what values would have been weighed to, of latents that were."""
    if p.lora is not None:
        base_TNv = values(x_TNC, p.replace(lora=None))
        return (grown_heads(base_TNv, p.lora) + out_of_latents(x_TNC, p.lora)).astype(x_TNC.dtype)
    weight = p.weight
    if not isinstance(weight, QuantizedArray):
        return product_of_heads("NTc,Nvc->NTv", x_TNC, weight).astype(x_TNC.dtype)
    whole = product_of_heads("NTc,Nvc->NTv", x_TNC, weight.values.astype(x_TNC.dtype))
    return (whole * weight.scales).astype(x_TNC.dtype)


def product_of_heads(letters: str, x_TN: jax.Array, weight: jax.Array) -> jax.Array:
    """Every head's product with a matrix of its own, in float32, of x [T, N, ...]. In `letters` heads come first: of
    bfloat16 XLA:CPU has no other product of several tokens."""
    precision = jax.lax.Precision.HIGHEST if x_TN.dtype == jnp.float32 else None
    product_NT = jnp.einsum(
        letters, x_TN.swapaxes(0, 1), weight, preferred_element_type=jnp.float32, precision=precision
    )
    return product_NT.swapaxes(0, 1)


@partial(jax.jit, static_argnames="config")
def decoder_layer(p: Layer, config: DecoderConfig, x_TD: jax.Array, kv: Any, context: LayerContext) -> LayerOutput:
    """x + attention(norm(x)), then x + experts(norm(x)), or an mlp in their place."""
    assert p.input_layernorm is not None and p.post_attention_layernorm is not None
    attended_TD, kv = latent_attention(p.self_attn, config, rms_norm(x_TD, p.input_layernorm, config.norm), kv, context)
    x_TD = x_TD + attended_TD
    fed_TD, routed = feed_forward(p.mlp, config, rms_norm(x_TD, p.post_attention_layernorm, config.norm), context)
    return LayerOutput(x_TD + fed_TD, kv, routed)


def latent_specs(
    config: DecoderConfig, block_size: int, dtype_bytes: int, num_model_shards: int
) -> Sequence[LatentSpec]:
    """What every layer caches; shards have each the whole of it."""
    sizes = config.latents
    assert sizes is not None, "latent attention needs its sizes"
    return [LatentSpec(block_size, sizes.width, dtype_bytes, latent_dim=sizes.rank) for _ in config.layers]


with_shared = partial(feed_forward_specs, shared="shared_experts")

DEEPSEEK_V2 = replace(
    llama.LLAMA,
    architectures=("DeepseekV2ForCausalLM",),
    config_from_hf=v2_config_from_hf,
    param_specs=partial(decoder_specs, mixer=attention_specs_of_layer, feed_forward=with_shared),
    forward=partial(forward, decoder_layer),
    attention_specs=latent_specs,
)
DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    architectures=("DeepseekV3ForCausalLM",),
    config_from_hf=v3_config_from_hf,
    param_specs=partial(
        decoder_specs, mixer=attention_specs_of_layer, feed_forward=partial(with_shared, correction=CORRECTION)
    ),
)
GLM4_MOE_LITE = replace(DEEPSEEK_V3, architectures=("Glm4MoeLiteForCausalLM",), config_from_hf=glm_config_from_hf)
KIMI_K25 = replace(
    DEEPSEEK_V3, architectures=("KimiK25ForConditionalGeneration",), config_from_hf=kimi_k25_config_from_hf
)
