"""A decoder-only model from top to bottom: containers of parameters, attention, a pre-norm layer, the loop over layers,
the head, the specs of the parameters, and what most models say in config.json.

An architecture's own file says what differs. An optional part (bias, query norm) is there exactly when its parameter
is. This module knows nothing of requests and blocks.

Letters: J heads of a group, which are a key head's query heads, itself and its values'.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from jaxpaged.errors import ConfigError
from jaxpaged.kv_cache_spec import AttentionSpec
from jaxpaged.layers.attention import HeadNorm, KVTensor, Rotation, attend_heads
from jaxpaged.layers.dense_attention import DenseBatch
from jaxpaged.layers.embedding import embed, vocabulary_logits
from jaxpaged.layers.experts import Experts, Routed, mixture_of_experts, of_layers
from jaxpaged.layers.linear import Linear, apply_linear, with_backend
from jaxpaged.layers.mlp import ACTIVATIONS, Mlp, Xielu, gated_mlp
from jaxpaged.layers.norm import Norm, normalised, rms_norm
from jaxpaged.layers.rope import CosSin, RopeConfig, apply_rope, query_growth, rope_cos_sin
from jaxpaged.models.config import DecoderConfig, HfFields, LayerConfig, common_fields
from jaxpaged.models.interface import Batch, ForwardOutput, LayerContext, LayerOutput
from jaxpaged.models.rope_config import longest_sequence, single_rope
from jaxpaged.params.sharding import device_sizes, kv_heads_on_devices
from jaxpaged.params.spec import Spec


@struct.dataclass
class Attention:
    """`q_norm` and `k_norm` normalise queries and keys before they are rotated, where a model has them: every head, or,
    where weights are [N, H], all heads as one. `sinks` [N]: the score of something that every query also looks at, and
    that has no value: a summand more under its softmax. `qkv_proj` is there in place of three where they are joined
    (`joined.py`)."""

    q_proj: Linear | None
    k_proj: Linear | None
    v_proj: Linear | None
    o_proj: Linear
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    sinks: jax.Array | None = None
    qkv_proj: Linear | None = None


@struct.dataclass
class Layer:
    """The names are mostly the checkpoint's. The last two norms exist where a block's output is normalised too; the
    norms of inputs are None where only that is. `self_attn` is an `Attention`, or what a model has in its place."""

    self_attn: Any
    mlp: Mlp | Experts
    input_layernorm: Norm | None = None
    post_attention_layernorm: Norm | None = None
    pre_feedforward_layernorm: Norm | None = None
    post_feedforward_layernorm: Norm | None = None


@struct.dataclass
class Decoder:
    """All parameters. `lm_head` is None when the embedding table serves for both. A stage of a pipeline has those of
    its layers, and without the last ones no `norm` (`stages.py`)."""

    embed_tokens: jax.Array | None  # [V, D]
    layers: list[Layer]
    norm: Norm | None
    lm_head: jax.Array | None  # [V, D]


class DecoderLayer(Protocol):
    """One layer of a model, jitted with `config` static, so that layers of one kind are traced once."""

    def __call__(
        self, p: Layer, config: DecoderConfig, x_TD: jax.Array, kv: KVTensor, context: LayerContext
    ) -> LayerOutput: ...


def self_attention(
    p: Attention,
    config: DecoderConfig,
    x_TD: jax.Array,
    kv: KVTensor,
    context: LayerContext,
    added_TD: jax.Array | None = None,
) -> tuple[jax.Array, KVTensor]:
    """Causal self-attention of T new tokens over all that their requests have cached, and `added_TD` more: ([T, D],
    kv)."""
    o_TNH, kv = attended(p, config, x_TD, kv, context)
    return apply_linear("TNH,DNH->TD", o_TNH, p.o_proj, added_TD), kv


def attended(
    p: Attention, config: DecoderConfig, x_TD: jax.Array, kv: KVTensor, context: LayerContext
) -> tuple[jax.Array, KVTensor]:
    """What the heads see of it, before the last projection: ([T, N, H], kv).

    This step's keys and values go into the cache before it is read, so a token sees itself and its neighbours.
    """
    heads = heads_of(x_TD, p)
    rotation = rotation_before_attention(p, config, kv, context)
    if rotation is None or (p.q_norm is not None and rotation.norm is None):
        q_TNH, k_TKH, v_TKH = heads_apart(*heads)
        if p.q_norm is not None:
            q_TNH, k_TKH = norm_of_heads(q_TNH, p.q_norm, config), norm_of_heads(k_TKH, p.k_norm, config)
        if rotation is None:
            q_TNH, k_TKH = rotated(q_TNH, k_TKH, config, context)
        heads = q_TNH, k_TKH, v_TKH
    return attend_heads(
        context.attention,
        heads,
        kv,
        scale=config.query_scale,
        soft_cap=config.attn_soft_cap,
        sinks_N=p.sinks,
        rotation=rotation,
    )


def heads_of(x_TD: jax.Array, p: Attention) -> tuple[jax.Array, ...]:
    """Queries, keys and values; or all in one array, [T, K, G + 2, H]."""
    if p.qkv_proj is not None:
        return (apply_linear("TD,KJHD->TKJH", x_TD, p.qkv_proj),)
    q_TNH = apply_linear("TD,NHD->TNH", x_TD, p.q_proj)
    return q_TNH, apply_linear("TD,KHD->TKH", x_TD, p.k_proj), apply_linear("TD,KHD->TKH", x_TD, p.v_proj)


def heads_apart(first: jax.Array, *others: jax.Array) -> tuple[jax.Array, ...]:
    """Queries, keys and values of what `heads_of` gives."""
    if others:
        return first, *others
    q_TNH = first[:, :, :-2].reshape(len(first), -1, first.shape[-1])
    return q_TNH, first[:, :, -2], first[:, :, -1]


def rotated(
    q_TNH: jax.Array, k_TKH: jax.Array, config: DecoderConfig, context: LayerContext
) -> tuple[jax.Array, jax.Array]:
    """Queries and keys at their positions, as far as the layer knows any."""
    if context.cos_sin is not None:
        q_TNH, k_TKH = (apply_rope(x, *context.cos_sin, config.interleaved_rope) for x in (q_TNH, k_TKH))
        if config.rotated_norm:
            q_TNH, k_TKH = (normalised(x, config.norm).astype(x.dtype) for x in (q_TNH, k_TKH))
    return grown(q_TNH, config, context), k_TKH


def grown(q_TNH: jax.Array, config: DecoderConfig, context: LayerContext) -> jax.Array:
    """Queries times the factor of their positions, in layers that have one."""
    if not grows(config, context):
        return q_TNH
    assert context.query_factor_T is not None
    return (q_TNH * context.query_factor_T[:, None, None]).astype(q_TNH.dtype)


def grows(config: DecoderConfig, context: LayerContext) -> bool:
    growth = config.query_growth
    return growth is not None and (context.cos_sin is None or growth.of_rotated)


def rotation_before_attention(
    p: Attention, config: DecoderConfig, kv: KVTensor, context: LayerContext
) -> Rotation | None:
    """What attention does itself with queries and keys, in one launch with the writing of the cache; None where XLA
    rotates."""
    if context.cos_sin is None or config.rotated_norm or grows(config, context) or not context.attention.rotates(kv):
        return None
    is_plain = not (config.norm.is_offset or config.norm.is_centred or config.norm.deterministic)
    is_normed = p.q_norm is not None and p.q_norm.weight.ndim == 1 and is_plain
    norm = HeadNorm(p.q_norm.weight, p.k_norm.weight, config.norm.eps) if is_normed else None
    return Rotation(*context.cos_sin, config.interleaved_rope, norm)


def norm_of_heads(x_TNH: jax.Array, p: Norm, config: DecoderConfig) -> jax.Array:
    """Every head normalised, or all of a token as one vector."""
    if p.weight.ndim == 1:
        return rms_norm(x_TNH, p, config.norm)
    whole = rms_norm(x_TNH.reshape(len(x_TNH), -1), Norm(p.weight.reshape(-1)), config.norm)
    return whole.reshape(x_TNH.shape)


def norm_if_any(x_TD: jax.Array, p: Norm | None, config: DecoderConfig) -> jax.Array:
    return x_TD if p is None else rms_norm(x_TD, p, config.norm)


def feed_forward(
    p: Mlp | Experts, config: DecoderConfig, x_TD: jax.Array, context: LayerContext, added_TD: jax.Array | None = None
) -> tuple[jax.Array, Routed | None]:
    """[T, D] -> [T, D]: the block of all tokens, or for each token that of its experts, and `added_TD` more; and what
    the block tells of them, if anything is wanted."""
    if isinstance(p, Mlp):
        return gated_mlp(x_TD, p, config.activation, added_TD), None
    mixed_TD, routed = mixed(p, config, x_TD, context)
    return mixed_TD if added_TD is None else added_TD + mixed_TD, routed


def mixed(
    p: Experts, config: DecoderConfig, x_TD: jax.Array, context: LayerContext, judged_TD: jax.Array | None = None
) -> tuple[jax.Array, Routed | None]:
    """`mixture_of_experts` of a layer."""
    assert config.experts is not None, "a block of experts needs a router"
    batch, router, activation = context.attention, config.experts.router, config.activation
    in_turns = not isinstance(batch, DenseBatch)
    return mixture_of_experts(x_TD, p, router, activation, batch.num_tokens, batch.mesh, judged_TD, in_turns)


@partial(jax.jit, static_argnames="config")
def decoder_layer(p: Layer, config: DecoderConfig, x_TD: jax.Array, kv: KVTensor, context: LayerContext) -> LayerOutput:
    """x + attention(norm(x)), then x + mlp(norm(x)), or experts in its place."""
    normed_TD = norm_if_any(x_TD, p.input_layernorm, config)
    out_TD, kv = self_attention(p.self_attn, config, normed_TD, kv, context, unless_scaled(x_TD, config))
    x_TD = residual_sum(x_TD, out_TD, config)
    normed_TD = norm_if_any(x_TD, p.post_attention_layernorm, config)
    out_TD, routed = feed_forward(p.mlp, config, normed_TD, context, unless_scaled(x_TD, config))
    return LayerOutput(residual_sum(x_TD, out_TD, config), kv, routed)


def unless_scaled(x_TD: jax.Array, config: DecoderConfig) -> jax.Array | None:
    """The residual stream, for a block that adds its output to it; None where that is scaled first."""
    return x_TD if config.residual_scale is None else None


def residual_sum(x_TD: jax.Array, out_TD: jax.Array, config: DecoderConfig) -> jax.Array:
    """The residual stream behind a block that gave `out_TD`; see `kept_apart` for the barrier."""
    if config.residual_scale is None:
        return out_TD  # it is the sum
    scaled_TD = out_TD * config.residual_scale
    return x_TD + (jax.lax.optimization_barrier(scaled_TD) if config.deterministic else scaled_TD)


def forward(
    decoder_layer: DecoderLayer,
    params: Decoder,
    config: DecoderConfig,
    batch: Batch,
    kv: Sequence[KVTensor],
    taps: tuple[int, ...] = (),
) -> ForwardOutput:
    """The one loop over layers: `Model.forward` once `decoder_layer` is bound.

    It is unrolled; `decoder_layer` is jitted, so each kind of layer traces once.
    """
    streams: list[jax.Array] = []
    told: list[Routed] = []
    x_TD, kv = batch.stream_TD, list(kv)
    if x_TD is None:
        assert params.embed_tokens is not None, "the first layers need embeddings"
        x_TD = embed(batch.tokens_T, params.embed_tokens, config.embed_scale)
        x_TD = normalised(x_TD, config.norm).astype(x_TD.dtype) if config.normed_embeddings else x_TD
        x_TD = kept_apart(config, x_TD)
    x_TD, *deeper = (x_TD,) if batch.visual_TE is None else seen(config, batch, x_TD)
    cos_sin = rotations(config, batch.positions_T, batch.rope_offsets_3T)
    growth_T = None if config.query_growth is None else query_growth(config.query_growth, batch.positions_T)
    for p, layer, (group, tensor) in zip(params.layers, config.layers, batch.caches, strict=True):
        streams.append(x_TD)
        context = LayerContext(batch.attention[group], cos_sin.get(layer.rope), growth_T)
        output = decoder_layer(p, config, x_TD, kv[tensor], context)
        x_TD, kv[tensor] = output.x_TD, output.kv
        x_TD = kept_apart(config, x_TD + deeper.pop(0)) if deeper else x_TD
        told += [] if output.routed is None else [output.routed]
    streams.append(x_TD)
    return ForwardOutput(
        norm_if_any(x_TD, params.norm, config),
        kv,
        taps=tuple(streams[i] for i in taps),
        routed=of_layers(told),
    )


def seen(config: DecoderConfig, batch: Batch, x_TD: jax.Array) -> tuple[jax.Array, ...]:
    """Embeddings [T, D], of an encoder where the step has some, which are not scaled; and what is added behind each of
    the first layers, zero for text."""
    assert batch.visual_TE is not None and batch.is_visual_T is not None
    is_visual_T1 = batch.is_visual_T[:, None]
    levels = jnp.split(batch.visual_TE.astype(x_TD.dtype), batch.visual_TE.shape[1] // config.hidden_size, axis=1)
    return jnp.where(is_visual_T1, levels[0], x_TD), *(jnp.where(is_visual_T1, each, 0) for each in levels[1:])


def rotations(
    config: DecoderConfig, positions_T: jax.Array, offsets_3T: jax.Array | None = None
) -> dict[RopeConfig | None, CosSin]:
    """The angles of this step's positions, once for all layers that rotate alike.

    XLA may not fuse them into what uses them: on a CPU it would compute them again in every layer, for queries and for
    keys, once a head. With `deterministic` see `kept_apart`.
    """
    ropes = dict.fromkeys(layer.rope for layer in config.layers if layer.rope is not None)  # in the layers' order
    angles = lambda rope: rope_cos_sin(rope, positions_T, config.max_model_len, offsets_3T)
    return {rope: jax.lax.optimization_barrier(angles(rope)) for rope in ropes}


def kept_apart(config: DecoderConfig, x_TD: jax.Array) -> jax.Array:
    """The same values; if `deterministic`, XLA may not fuse scaled embeddings into what uses them.

    Fused, which product of a sum goes unrounded into a multiply-add depends on the program around it, and programs of
    several steps differ from others.
    """
    return jax.lax.optimization_barrier(x_TD) if config.deterministic else x_TD


def head(params: Decoder) -> jax.Array | None:
    """The table [V, D] that turns hidden states into logits; None where another stage has it."""
    return params.embed_tokens if params.lm_head is None else params.lm_head


def compute_logits(head_VD: jax.Array, config: DecoderConfig, hidden_SD: jax.Array) -> jax.Array:
    """Float32 logits [S, V] with the final soft cap and scale; columns that only pad the vocabulary are -inf."""
    logits_SV = vocabulary_logits(hidden_SD, head_VD, config.vocab_size, config.final_soft_cap, config.matmul_backend)
    # Behind a barrier for the reason that soft caps are.
    scale = config.logit_scale
    return logits_SV if scale is None else jax.lax.optimization_barrier(logits_SV * scale)


def attention_specs(
    config: DecoderConfig, block_size: int, dtype_bytes: int, num_model_shards: int
) -> list[AttentionSpec]:
    """What every layer caches, with key heads as they are after they were repeated for the shards.

    Raises ConfigError for blocks that do not fit into chunks, unless no request is longer than a chunk.
    """

    def of_layer(layer: LayerConfig) -> AttentionSpec:
        chunk = layer.chunk if (layer.chunk or 0) < config.max_model_len else None
        if chunk is not None and chunk % block_size:
            raise ConfigError(
                f"block_size {block_size} does not divide the {chunk} tokens of the model's attention_chunk_size. "
                "Choose one that does, or a max_model_len of one chunk at most."
            )
        heads = config.num_kv_heads, config.head_dim
        return attention_spec(layer, *heads, block_size, dtype_bytes, num_model_shards, chunk)

    return [of_layer(layer) for layer in config.layers]


def attention_spec(
    layer: LayerConfig,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype_bytes: int,
    num_model_shards: int,
    chunk: int | None = None,
) -> AttentionSpec:
    """What a layer with so many key heads caches, which are repeated for the shards."""
    placed = kv_heads_on_devices(num_kv_heads, num_model_shards)
    copies = placed // num_kv_heads
    return AttentionSpec(block_size, placed, head_dim, dtype_bytes, layer.window, chunk=chunk, head_copies=copies)


# ---- parameters ----------------------------------------------------------------------------------

PRE_NORMS = {name: name for name in ("input_layernorm", "post_attention_layernorm")}
"""The norms of a layer that normalises what goes into its blocks: name in `Layer` -> name in the checkpoint."""
POST_NORMS = {name: name for name in ("post_attention_layernorm", "post_feedforward_layernorm")}
"""Those of one that normalises what comes out of them."""
SANDWICH_NORMS = {**PRE_NORMS, **POST_NORMS, "pre_feedforward_layernorm": "pre_feedforward_layernorm"}
"""Those of one that does both."""


def decoder_specs(
    config: DecoderConfig,
    num_model_shards: int,
    *,
    qk_norm: bool = False,
    whole_qk_norm: bool = False,
    norms: Mapping[str, str] = PRE_NORMS,
    fused: bool = False,
    sinks: bool = False,
    mixer: Callable[[DecoderConfig, str, int], Any] | None = None,
    feed_forward: Callable[[DecoderConfig, str, int], Mlp | Experts] | None = None,
) -> Decoder:
    """Specs of a whole decoder. Raises ConfigError when the model cannot be split over so many shards.

    `qk_norm`: norms on query and key heads, `whole_qk_norm` on all heads as one vector. `norms`: which a layer has, and
    what the checkpoint calls them. `fused`: the checkpoint keeps query, key and value projections in one tensor, and
    gate and up in another. `sinks`: each query head has one. `mixer` makes what a layer of this name and number has in
    place of an `Attention`. `feed_forward` makes that block, likewise, where layers differ or it is another one.
    """
    device_sizes(config.dim_sizes(), num_model_shards)
    attention = fused_attention if fused else attention_with_bias
    mlp = fused_mlp if fused else mlp_with_bias
    layers = []
    for i in range(config.num_layers):
        name = f"model.layers.{i}"
        self_attn = mixer(config, name, i) if mixer else attention(config, f"{name}.self_attn")
        if qk_norm or whole_qk_norm:
            query, key = ("NH", "KH") if whole_qk_norm else ("H", "H")
            self_attn = self_attn.replace(
                q_norm=norm(query, f"{name}.self_attn.q_norm"), k_norm=norm(key, f"{name}.self_attn.k_norm")
            )
        if sinks:
            self_attn = self_attn.replace(sinks=Spec("N", "N", f"{name}.self_attn.sinks", dtype="float32"))
        of_layer = {field: norm("D", f"{name}.{there}") for field, there in norms.items()}
        block = feed_forward(config, name, i) if feed_forward else mlp(config, f"{name}.mlp")
        layers.append(Layer(self_attn=self_attn, mlp=block, **of_layer))
    decoder = Decoder(
        embed_tokens=Spec("VD", "V D", "model.embed_tokens.weight"),
        layers=layers,
        norm=norm("D", "model.norm"),
        lm_head=None if config.tie_embeddings else Spec("VD", "V D", "lm_head.weight"),
    )
    return with_backend(decoder, config.matmul_backend)


def norm(dims: str, name: str) -> Norm:
    return Norm(Spec(dims, dims, f"{name}.weight"))


def linear(dims: str, hf_dims: str, name: str, has_bias: bool = False) -> Linear:
    """A projection; its bias has the axes that the checkpoint merged into the weight's first one."""
    out = hf_dims.split(" ")[0]
    return Linear(Spec(dims, hf_dims, f"{name}.weight"), Spec(out, out, f"{name}.bias") if has_bias else None)


def attention_with_bias(config: DecoderConfig, name: str) -> Attention:
    return Attention(
        q_proj=linear("NHD", "NH D", f"{name}.q_proj", config.qkv_bias),
        k_proj=linear("KHD", "KH D", f"{name}.k_proj", config.qkv_bias),
        v_proj=linear("KHD", "KH D", f"{name}.v_proj", config.qkv_bias),
        o_proj=linear("DNH", "D NH", f"{name}.o_proj", config.o_bias),
    )


def mlp_with_bias(config: DecoderConfig, name: str) -> Mlp:
    return Mlp(
        gate_proj=linear("FD", "F D", f"{name}.gate_proj", config.mlp_bias),
        up_proj=linear("FD", "F D", f"{name}.up_proj", config.mlp_bias),
        down_proj=linear("DF", "D F", f"{name}.down_proj", config.mlp_bias),
    )


def plain_mlp(name: str, columns: str) -> Mlp:
    """A block without biases, whose columns have this letter."""
    out, into = (f"{columns}D", f"{columns} D"), (f"D{columns}", f"D {columns}")
    return Mlp(*(linear(*out, f"{name}.{kind}_proj") for kind in ("gate", "up")), linear(*into, f"{name}.down_proj"))


def mlp_without_gate(config: DecoderConfig, name: str, xielu: Xielu | None = None) -> Mlp:
    return mlp_with_bias(config, name).replace(gate_proj=None, xielu=xielu)


def fused_attention(config: DecoderConfig, name: str) -> Attention:
    """Query, key and value rows stand one after another in `qkv_proj`."""
    qkv = [
        Linear(Spec(dims, hf_dims, f"{name}.qkv_proj.weight", fused=("NH", "KH", "KH"), part=part))
        for part, (dims, hf_dims) in enumerate([("NHD", "NH D"), ("KHD", "KH D"), ("KHD", "KH D")])
    ]
    return Attention(*qkv, o_proj=linear("DNH", "D NH", f"{name}.o_proj"))


def fused_mlp(config: DecoderConfig, name: str) -> Mlp:
    """Gate and up rows stand one after another in `gate_up_proj`."""
    gate, up = (
        Linear(Spec("FD", "F D", f"{name}.gate_up_proj.weight", fused=("F", "F"), part=part)) for part in range(2)
    )
    return Mlp(gate, up, linear("DF", "D F", f"{name}.down_proj"))


# ---- config.json ---------------------------------------------------------------------------------


def pre_norm_config(
    fields: HfFields,
    windows: Sequence[int | None],
    *,
    norm_eps: float = 1e-6,
    rope_aliases: dict[str, str] | None = None,
    ropes: Callable[[HfFields, int], tuple[RopeConfig, RopeConfig]] | None = None,
    activations: tuple[str, ...] = tuple(ACTIVATIONS),
    **options: Any,
) -> DecoderConfig:
    """DecoderConfig of a model whose layers differ by their window only. `options` are more of its fields.
    `activations`: what `hidden_act` may be; the first stands for a missing one.

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
        activation=fields.choice("hidden_act", activations, activations[0]),
        layers=tuple(LayerConfig(window, rope if window is None else rope_of_windows) for window in windows),
        max_position_embeddings=length,
        max_model_len=length,
        **options,
    )
    fields.refuse_unread()
    return config
