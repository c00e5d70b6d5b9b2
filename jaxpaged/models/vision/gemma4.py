"""Gemma 4's tower, which takes pictures of any size as patches, and what makes its vectors as wide as the decoder.

A patch has a learned vector of its column and one of its row. A layer is x + norm(attention(norm(x))), then x +
norm(mlp(norm(x))); queries and keys are normalised and rotated, one half of a head by the column and one by the row,
values are normalised, and scores are not scaled. Squares of patches are averaged, and their means are normalised and
projected. In some models every product limits what goes in and what comes out. Sources: config.json and the published
definition.

Letters: i column and row, g places of either; P patches, E embeddings, X numbers of a vector, N heads.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import AbstractMesh, Mesh

from jaxpaged.errors import CheckpointError
from jaxpaged.layers.linear import Linear, apply_linear
from jaxpaged.layers.mlp import ACTIVATIONS
from jaxpaged.layers.norm import Norm, NormConfig, normalised, rms_norm
from jaxpaged.layers.rope import CosSin, RopeConfig, apply_rope, inverse_frequencies
from jaxpaged.models.config import HfFields, short
from jaxpaged.models.vision.attention import attend_patches
from jaxpaged.models.vision.interface import WINDOWS, EncoderBatch, Vision, VisionConfig
from jaxpaged.models.vision.parts import (
    PICTURES,
    POSITIONS,
    axial_theta,
    linear_specs,
    numbers,
    on_devices,
    pack_patches,
    patch_shapes,
    placed,
    vision_fields,
)
from jaxpaged.params.spec import Spec

TOWER = "vision_tower"
LIMITS = ("input_min", "input_max", "output_min", "output_max")


@dataclass(frozen=True, kw_only=True)
class Gemma4VisionConfig(VisionConfig):
    """`num_places`: columns or rows that have a vector. `rope_theta`: the
    base of rotations. `is_clipped`: products limit what goes in and out. `standardises`: means are shifted and
    scaled by learned vectors."""

    num_places: int
    rope_theta: float
    is_clipped: bool
    standardises: bool

    def dim_sizes(self) -> dict[str, int]:
        return {**super().dim_sizes(), "g": self.num_places, "i": 2}


@struct.dataclass
class Clipped:
    """A product, and scalars that limit what goes in and what comes out; None where nothing is limited."""

    linear: Linear
    limits: dict[str, jax.Array] | None = None


@struct.dataclass
class Layer:
    input_layernorm: Norm
    q_proj: Clipped
    k_proj: Clipped
    v_proj: Clipped
    o_proj: Clipped
    q_norm: Norm
    k_norm: Norm
    post_attention_layernorm: Norm
    pre_feedforward_layernorm: Norm
    gate_proj: Clipped
    up_proj: Clipped
    down_proj: Clipped
    post_feedforward_layernorm: Norm


@struct.dataclass
class Gemma4Tower:
    """`places` [2, places, d]: vectors of columns, then those of rows. `bias`, `scale` [d]: of standardised means."""

    input_proj: Linear
    places: jax.Array
    layers: list[Layer]
    projection: Linear
    bias: jax.Array | None = None
    scale: jax.Array | None = None


def config_from_hf(hf: dict[str, Any]) -> Gemma4VisionConfig | None:
    """Of Gemma 4's config.json; None where it has no `vision_config`."""
    fields = vision_fields(hf)
    if fields is None:
        return None
    text = HfFields(hf.get("text_config") or {})
    heads, head_dim = fields.count("num_attention_heads", 12), fields.count("head_dim", 64)
    if fields.count("num_key_value_heads", heads) != heads or head_dim % 4 or fields.flag("attention_bias", False):
        raise CheckpointError(
            f"config.json: vision_config has {heads} heads of {head_dim} numbers and "
            f"{short(fields.value('num_key_value_heads'))} key heads, or attention_bias. As many key heads as heads, "
            "without bias, and of a multiple of 4 numbers are supported."
        )
    fields.choice("model_type", ("gemma4_vision",), "gemma4_vision")
    theta = axial_theta(fields, 100.0)
    fields.read.update(("max_position_embeddings", "default_output_length"))
    config = Gemma4VisionConfig(
        family="gemma4",
        width=fields.count("hidden_size", 768),
        num_layers=fields.count("num_hidden_layers", 16),
        num_heads=heads,
        head_dim=head_dim,
        columns=fields.count("intermediate_size", 3072),
        patch=fields.count("patch_size", 16),
        out_width=text.count("hidden_size", 2304),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=fields.choice("hidden_activation", tuple(ACTIVATIONS), "gelu_pytorch_tanh"),
        patches_per_embed=fields.count("pooling_kernel_size", 3) ** 2,
        both_ways=WINDOWS if text.value("use_bidirectional_attention") == "vision" else "",
        num_places=fields.count("position_embedding_size", 10 * 1024),
        rope_theta=theta,
        is_clipped=fields.flag("use_clipped_linears", False),
        standardises=fields.flag("standardize", False),
    )
    fields.refuse_unread()
    return config


def param_specs(config: Gemma4VisionConfig, num_shards: int) -> Gemma4Tower:
    standard = partial(Spec, "d", "d") if config.standardises else lambda name: None
    specs = Gemma4Tower(
        linear_specs("drsb", "d rsb", f"{TOWER}.patch_embedder.input_proj", has_bias=False),
        Spec("igd", "i g d", f"{TOWER}.patch_embedder.position_embedding_table"),
        [layer_specs(config, f"{TOWER}.encoder.layers.{i}") for i in range(config.num_layers)],
        linear_specs("Dd", "D d", "model.embed_vision.embedding_projection", has_bias=False),
        standard(f"{TOWER}.std_bias"),
        standard(f"{TOWER}.std_scale"),
    )
    return placed(specs, config, num_shards)


def layer_specs(config: Gemma4VisionConfig, name: str) -> Layer:
    def clipped(dims: str, hf_dims: str, part: str) -> Clipped:
        limits = {limit: Spec("", "1", f"{name}.{part}.{limit}") for limit in LIMITS} if config.is_clipped else None
        return Clipped(linear_specs(dims, hf_dims, f"{name}.{part}.linear", has_bias=False), limits)

    own = lambda part, dims="d": Norm(Spec(dims, dims, f"{name}.{part}.weight"))
    return Layer(
        own("input_layernorm"),
        *(clipped("nhd", "nh d", f"self_attn.{part}_proj") for part in "qkv"),
        clipped("dnh", "d nh", "self_attn.o_proj"),
        own("self_attn.q_norm", "h"),
        own("self_attn.k_norm", "h"),
        own("post_attention_layernorm"),
        own("pre_feedforward_layernorm"),
        *(clipped("fd", "f d", f"mlp.{part}_proj") for part in ("gate", "up")),
        clipped("df", "d f", "mlp.down_proj"),
        own("post_feedforward_layernorm"),
    )


def encode(params: Gemma4Tower, config: Gemma4VisionConfig, batch: EncoderBatch) -> jax.Array:
    """`Vision.encode`: [E, D]."""
    weight, places = params.input_proj.weight, batch.of_patches[POSITIONS]
    row_P, column_P = places[:, 0], places[:, 1]
    of_channels = numbers(batch.pixels, batch.table_CV, weight.dtype).reshape(-1, 3, config.patch, config.patch)
    x_PX = apply_linear("Trsb,drsb->Td", jnp.moveaxis(of_channels, 1, 3), params.input_proj)
    x_PX = on_devices(x_PX + params.places[0][column_P] + params.places[1][row_P], batch.mesh)
    cos_sin = rotations(config, column_P, row_P)
    for layer in params.layers:
        x_PX = tower_layer(layer, config, x_PX, cos_sin, batch.of_patches[PICTURES], batch.mesh)
    return projected(params, config, x_PX)


def rotations(config: Gemma4VisionConfig, column_P: jax.Array, row_P: jax.Array) -> tuple[CosSin, CosSin]:
    """Float32, of each patch: the angles of its column, and those of its row."""
    frequencies = inverse_frequencies(RopeConfig(config.rope_theta, config.head_dim // 2), 0)
    of_place = lambda place_P: place_P.astype(jnp.float32)[:, None] * frequencies
    angles = of_place(column_P), of_place(row_P)
    return jax.lax.optimization_barrier(tuple((jnp.cos(angle), jnp.sin(angle)) for angle in angles))


@partial(jax.jit, static_argnames=("config", "mesh"))
def tower_layer(
    p: Layer,
    config: Gemma4VisionConfig,
    x_PX: jax.Array,
    cos_sin: tuple[CosSin, CosSin],
    picture_P: jax.Array,
    mesh: Mesh | AbstractMesh | None,
) -> jax.Array:
    """[P, width] -> [P, width]; jitted, so that it is traced once."""
    how = NormConfig(config.norm_eps)
    norm = partial(rms_norm, config=how)
    own = norm(x_PX, p.input_layernorm)
    q_PNH, k_PNH, v_PNH = (clipped("Td,nhd->Tnh", own, w) for w in (p.q_proj, p.k_proj, p.v_proj))
    q_PNH, k_PNH = rotated(norm(q_PNH, p.q_norm), cos_sin), rotated(norm(k_PNH, p.k_norm), cos_sin)
    v_PNH = normalised(v_PNH, how).astype(v_PNH.dtype)
    o_PNH = attend_patches(q_PNH, k_PNH, v_PNH, picture_P, 1.0, mesh=mesh)
    x_PX = on_devices(x_PX + norm(clipped("Tnh,dnh->Td", o_PNH, p.o_proj), p.post_attention_layernorm), mesh)
    own = norm(x_PX, p.pre_feedforward_layernorm)
    gate, up = (clipped("Td,fd->Tf", own, w) for w in (p.gate_proj, p.up_proj))
    gated = ACTIVATIONS[config.activation](gate.astype(jnp.float32)) * up
    return x_PX + norm(clipped("Tf,df->Td", gated.astype(x_PX.dtype), p.down_proj), p.post_feedforward_layernorm)


def clipped(letters: str, x: jax.Array, p: Clipped) -> jax.Array:
    """The product of what is within its limits, within its limits."""
    if p.limits is None:
        return apply_linear(letters, x, p.linear)
    y = apply_linear(letters, jnp.clip(x, p.limits["input_min"], p.limits["input_max"]), p.linear)
    return jnp.clip(y, p.limits["output_min"], p.limits["output_max"])


def rotated(x_PNH: jax.Array, cos_sin: tuple[CosSin, CosSin]) -> jax.Array:
    """The first half of each head by the patch's column, the second by its row."""
    halves = jnp.split(x_PNH, 2, axis=-1)
    return jnp.concatenate([apply_rope(half, *angles) for half, angles in zip(halves, cos_sin, strict=True)], axis=-1)


def projected(p: Gemma4Tower, config: Gemma4VisionConfig, x_PX: jax.Array) -> jax.Array:
    """[E, D] of [P, width]. The patches of an embedding lie together. Means are scaled in float32, beyond float16."""
    mean_EX = x_PX.astype(jnp.float32).reshape(-1, config.patches_per_embed, config.width).mean(1)
    mean_EX = mean_EX.astype(x_PX.dtype).astype(jnp.float32) * math.sqrt(config.width)
    if p.bias is not None and p.scale is not None:
        mean_EX = (mean_EX - p.bias.astype(jnp.float32)) * p.scale.astype(jnp.float32)
    unit_EX = normalised(mean_EX.astype(x_PX.dtype), NormConfig(config.norm_eps)).astype(x_PX.dtype)
    return apply_linear("Td,Dd->TD", unit_EX, p.projection)


GEMMA4_VISION = Vision(
    config_from_hf=config_from_hf, param_specs=param_specs, shapes=patch_shapes, pack=pack_patches, encode=encode
)
