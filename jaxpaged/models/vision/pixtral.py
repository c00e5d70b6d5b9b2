"""The tower of Pixtral (arXiv 2410.07073) and the projectors of Mistral 3 and Llava, which take pictures of any size as
patches.

A layer is x + attention(norm(x)), then x + mlp(norm(x)), without biases; queries and keys are rotated by row and
column, one half of the pairs of a head each, and patches see all of their picture. Mistral 3's projector normalises
them, merges neighbours into one, and makes that as wide as the decoder; Llava's does only the last of these.

Letters: P patches, X numbers of a vector, E embeddings, N heads.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import AbstractMesh, Mesh

from jaxpaged.errors import CheckpointError
from jaxpaged.layers.linear import Linear, apply_linear
from jaxpaged.layers.mlp import ACTIVATIONS, Mlp, gated_mlp
from jaxpaged.layers.norm import Norm, NormConfig, rms_norm
from jaxpaged.layers.rope import CosSin, RopeConfig, apply_rope, inverse_frequencies
from jaxpaged.models.config import HfFields
from jaxpaged.models.vision.attention import attend_patches
from jaxpaged.models.vision.interface import EncoderBatch, Vision, VisionConfig
from jaxpaged.models.vision.parts import (
    PICTURES,
    POSITIONS,
    Heads,
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

TOWER, PROJECTOR = "vision_tower", "multi_modal_projector"
LLAVA = "llava"
"""The `model_type` of Pixtral 12B, as transformers has it."""


@dataclass(frozen=True, kw_only=True)
class PixtralConfig(VisionConfig):
    """`merge`: the side of an embedding in patches. `rope_theta`: the base of rotations. `projector_eps`,
    `projector_activation`, `projector_bias`: of the projector. `merges`: it normalises and merges patches."""

    merge: int
    rope_theta: float
    projector_eps: float
    projector_activation: str
    projector_bias: bool
    merges: bool = True

    def dim_sizes(self) -> dict[str, int]:
        return {**super().dim_sizes(), "u": self.out_width}


@struct.dataclass
class Layer:
    attention_norm: Norm
    attention: Heads
    ffn_norm: Norm
    feed_forward: Mlp


@struct.dataclass
class Projector:
    """`norm` and `merging_layer` are None where each patch becomes an embedding as it is."""

    norm: Norm | None
    merging_layer: Linear | None
    linear_1: Linear
    linear_2: Linear


@struct.dataclass
class Tower:
    """`patch_conv` is a convolution whose steps are as long as it is wide: a product with each patch."""

    patch_conv: Linear
    ln_pre: Norm
    layers: list[Layer]
    projector: Projector


def config_from_hf(hf: dict[str, Any]) -> PixtralConfig | None:
    """Of the config.json of Mistral 3, or of Llava with this tower; None where it has no `vision_config`."""
    fields = vision_fields(hf)
    if fields is None:
        return None
    whole, text = HfFields(hf), HfFields(hf.get("text_config") or {})
    width, heads = fields.count("hidden_size", 1024), fields.count("num_attention_heads", 16)
    head_dim = fields.count("head_dim", width // heads)
    if head_dim * heads != width or head_dim % 4:
        raise CheckpointError(
            f"config.json: vision_config has {heads} heads of {head_dim} numbers for a width of {width}; a head must "
            "have its part of them, and a multiple of 4, half of which are rotated by row and half by column."
        )
    fields.choice("model_type", ("pixtral",), "pixtral")
    if fields.count("num_channels", 3) != 3 or whole.value("vision_feature_layer", -1) != -1:
        raise CheckpointError(
            "config.json: num_channels of vision_config is not 3, or vision_feature_layer not -1. No other tower is "
            "supported."
        )
    theta = axial_theta(fields, fields.number("rope_theta", 10_000.0))
    fields.read.update(("image_size", "vocab_size"))  # what a table of angles was made for, and nothing
    is_llava = whole.value("model_type") == LLAVA
    merge = 1 if is_llava else whole.count("spatial_merge_size", 2)
    if is_llava:
        whole.choice("vision_feature_select_strategy", ("full",), "full")
        fields.read.update(("is_composition", "tie_word_embeddings"))
    config = PixtralConfig(
        family="pixtral",
        width=width,
        num_layers=fields.count("num_hidden_layers", 24),
        num_heads=heads,
        head_dim=head_dim,
        columns=fields.count("intermediate_size", 4096),
        patch=fields.count("patch_size", 16),
        out_width=text.count("hidden_size", 4096 if is_llava else 5120),
        norm_eps=1e-5,
        activation=fields.choice("hidden_act", tuple(ACTIVATIONS), "gelu"),
        patches_per_embed=merge**2,
        merge=merge,
        rope_theta=theta,
        projector_eps=text.number("rms_norm_eps", 1e-5),
        projector_activation=whole.choice("projector_hidden_act", tuple(ACTIVATIONS), "gelu"),
        projector_bias=whole.flag("multimodal_projector_bias", is_llava),
        merges=not is_llava,
    )
    fields.refuse_unread()
    return config


def param_specs(config: PixtralConfig, num_shards: int) -> Tower:
    has_bias = config.projector_bias
    projector = Projector(
        norm_specs(f"{PROJECTOR}.norm") if config.merges else None,
        linear_specs("dm", "d m", f"{PROJECTOR}.patch_merger.merging_layer", has_bias=False) if config.merges else None,
        linear_specs("ud", "u d", f"{PROJECTOR}.linear_1", has_bias),
        linear_specs("Du", "D u", f"{PROJECTOR}.linear_2", has_bias),
    )
    specs = Tower(
        linear_specs("dbrs", "d b r s", f"{TOWER}.patch_conv", has_bias=False),
        norm_specs(f"{TOWER}.ln_pre"),
        [layer_specs(f"{TOWER}.transformer.layers.{i}") for i in range(config.num_layers)],
        projector,
    )
    return placed(specs, config, num_shards)


def layer_specs(name: str) -> Layer:
    heads = [linear_specs("nhd", "nh d", f"{name}.attention.{part}_proj", has_bias=False) for part in "qkv"]
    inwards = [linear_specs("fd", "f d", f"{name}.feed_forward.{part}_proj", has_bias=False) for part in ("gate", "up")]
    return Layer(
        norm_specs(f"{name}.attention_norm"),
        Heads(*heads, linear_specs("dnh", "d nh", f"{name}.attention.o_proj", has_bias=False)),
        norm_specs(f"{name}.ffn_norm"),
        Mlp(*inwards, linear_specs("df", "d f", f"{name}.feed_forward.down_proj", has_bias=False)),
    )


def norm_specs(name: str) -> Norm:
    return Norm(Spec("d", "d", f"{name}.weight"))


def encode(params: Tower, config: PixtralConfig, batch: EncoderBatch) -> jax.Array:
    """`Vision.encode`: [E, D]."""
    weight = params.patch_conv.weight
    patches = numbers(batch.pixels, batch.table_CV, weight.dtype).reshape(-1, *weight.shape[1:])
    x_PX = on_devices(apply_linear("Tbrs,dbrs->Td", patches, params.patch_conv), batch.mesh)
    x_PX = rms_norm(x_PX, params.ln_pre, NormConfig(config.norm_eps))
    cos_sin = rotations(config, batch.of_patches[POSITIONS])
    for layer in params.layers:
        x_PX = tower_layer(layer, config, x_PX, cos_sin, batch.of_patches[PICTURES], batch.mesh)
    return projected(params.projector, config, x_PX)


def rotations(config: PixtralConfig, positions: jax.Array) -> CosSin:
    """Float32, of each patch: the even frequencies of a head by its row, then the odd ones by its column."""
    frequencies = inverse_frequencies(RopeConfig(config.rope_theta, config.head_dim), 0)
    row, column = jnp.split(positions.astype(jnp.float32), 2, axis=1)
    angles = jnp.concatenate([row * frequencies[0::2], column * frequencies[1::2]], axis=1)
    return jax.lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles)))


@partial(jax.jit, static_argnames=("config", "mesh"))
def tower_layer(
    p: Layer,
    config: PixtralConfig,
    x_PX: jax.Array,
    cos_sin: CosSin,
    picture_P: jax.Array,
    mesh: Mesh | AbstractMesh | None,
) -> jax.Array:
    """[P, width] -> [P, width]; jitted, so that it is traced once."""
    heads, how = p.attention, NormConfig(config.norm_eps)
    normed = rms_norm(x_PX, p.attention_norm, how)
    q_PNH, k_PNH, v_PNH = (apply_linear("Td,nhd->Tnh", normed, w) for w in (heads.q_proj, heads.k_proj, heads.v_proj))
    q_PNH, k_PNH = (apply_rope(x, *cos_sin) for x in (q_PNH, k_PNH))
    o_PNH = attend_patches(q_PNH, k_PNH, v_PNH, picture_P, config.head_dim**-0.5, mesh=mesh)
    x_PX = on_devices(x_PX + apply_linear("Tnh,dnh->Td", o_PNH, heads.o_proj), mesh)
    return x_PX + gated_mlp(rms_norm(x_PX, p.ffn_norm, how), p.feed_forward, config.activation)


def projected(p: Projector, config: PixtralConfig, x_PX: jax.Array) -> jax.Array:
    """[E, D] of [P, width]. What is merged stands number by number, each of all patches, as a convolution has it."""
    x_EX = x_PX
    if p.norm is not None and p.merging_layer is not None:
        normed = rms_norm(x_PX, p.norm, NormConfig(config.projector_eps))
        merged_EX = normed.reshape(-1, config.patches_per_embed, config.width).swapaxes(1, 2)
        x_EX = apply_linear("Tm,dm->Td", merged_EX.reshape(len(merged_EX), -1), p.merging_layer)
    hidden = apply_linear("Td,ud->Tu", x_EX, p.linear_1).astype(jnp.float32)
    return apply_linear("Tu,Du->TD", ACTIVATIONS[config.projector_activation](hidden).astype(x_PX.dtype), p.linear_2)


PIXTRAL_VISION = Vision(
    config_from_hf=config_from_hf, param_specs=param_specs, shapes=patch_shapes, pack=pack_patches, encode=encode
)
