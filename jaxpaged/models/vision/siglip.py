"""The tower of SigLIP (arXiv 2303.15343): a vision transformer with a learned table of positions, for squares.

A layer is x + attention(norm(x)), then x + block(norm(x)), with biases everywhere; every patch of an item sees all of
them. There is no pooling: the result is a vector for each patch. Norms and softmax are computed in float32.

Letters: I items, H rows and W columns of pixels, C channels, V values of a pixel; P patches.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxpaged.errors import CheckpointError
from jaxpaged.layers.linear import Linear, apply_linear, matrix_product
from jaxpaged.layers.mlp import ACTIVATIONS
from jaxpaged.layers.norm import LayerNorm, layer_norm
from jaxpaged.models.config import HfFields
from jaxpaged.models.vision.attention import attend_patches
from jaxpaged.models.vision.interface import VisionConfig
from jaxpaged.models.vision.parts import (
    Block,
    Heads,
    block,
    layer_norm_specs,
    linear_specs,
    square_patches,
)
from jaxpaged.params.spec import Spec


@struct.dataclass
class Layer:
    layer_norm1: LayerNorm
    self_attn: Heads
    layer_norm2: LayerNorm
    mlp: Block


@struct.dataclass
class Tower:
    """`patch_embedding` is a convolution whose steps are as long as it is wide: a product with each patch."""

    patch_embedding: Linear  # [d, 3, side, side]
    position_embedding: jax.Array  # [patches of an item, d]
    layers: list[Layer]
    post_layernorm: LayerNorm


def sizes_from_hf(fields: HfFields) -> dict[str, Any]:
    """Fields of a `VisionConfig` of what config.json says of a SigLIP tower."""
    if fields.count("num_channels", 3) != 3:
        raise CheckpointError("config.json: num_channels of vision_config is not 3; towers read red, green and blue.")
    width, heads = fields.count("hidden_size", 768), fields.count("num_attention_heads", 12)
    image, patch = fields.count("image_size", 224), fields.count("patch_size", 16)
    if width % heads:
        raise CheckpointError(
            f"config.json: vision_config has {heads} heads, which do not divide hidden_size {width}. Check it."
        )
    sizes = {
        "width": width,
        "num_layers": fields.count("num_hidden_layers", 12),
        "num_heads": heads,
        "head_dim": width // heads,
        "columns": fields.count("intermediate_size", 3072),
        "patch": patch,
        "norm_eps": fields.number("layer_norm_eps", 1e-6),
        "activation": fields.choice("hidden_act", tuple(ACTIVATIONS), "gelu_pytorch_tanh"),
        "item_pixels": (image, image, 3),
    }
    fields.read.update(OF_THE_HEAD)
    fields.refuse_unread()
    return sizes


OF_THE_HEAD = ("vision_use_head", "projection_dim", "projector_hidden_act")
"""Fields of what makes one vector of a picture, or of a projector, which towers in language models do not use."""


def tower_specs(config: VisionConfig, name: str) -> Tower:
    return Tower(
        patch_embedding=linear_specs("dbrs", "d b r s", f"{name}.embeddings.patch_embedding"),
        position_embedding=Spec("gd", "g d", f"{name}.embeddings.position_embedding.weight"),
        layers=[layer_specs(f"{name}.encoder.layers.{i}") for i in range(config.num_layers)],
        post_layernorm=layer_norm_specs(f"{name}.post_layernorm"),
    )


def layer_specs(name: str) -> Layer:
    inwards = partial(linear_specs, "nhd", "nh d")
    return Layer(
        layer_norm1=layer_norm_specs(f"{name}.layer_norm1"),
        self_attn=Heads(
            inwards(f"{name}.self_attn.q_proj"),
            inwards(f"{name}.self_attn.k_proj"),
            inwards(f"{name}.self_attn.v_proj"),
            linear_specs("dnh", "d nh", f"{name}.self_attn.out_proj"),
        ),
        layer_norm2=layer_norm_specs(f"{name}.layer_norm2"),
        mlp=Block(linear_specs("fd", "f d", f"{name}.mlp.fc1"), linear_specs("df", "d f", f"{name}.mlp.fc2")),
    )


def tower(p: Tower, config: VisionConfig, pixels_IHWC: jax.Array, table_CV: jax.Array) -> jax.Array:
    """A vector [width] of each patch of each item, item by item and row by row, in the type of the parameters."""
    weight, dtype = p.patch_embedding.weight.transpose(0, 2, 3, 1), p.position_embedding.dtype
    patches = square_patches(pixels_IHWC, table_CV, config.patch, dtype)
    embedded = matrix_product(patches, weight.reshape(config.width, -1), dtype) + p.patch_embedding.bias
    x = embedded + jnp.tile(p.position_embedding, (len(pixels_IHWC), 1))
    for layer in p.layers:
        x = tower_layer(layer, config, x)
    return layer_norm(x, p.post_layernorm, config.norm_eps)


@partial(jax.jit, static_argnames="config")
def tower_layer(p: Layer, config: VisionConfig, x: jax.Array) -> jax.Array:
    """[P, width] -> [P, width]; jitted, so that it is traced once. Items attend one after the other."""
    normed, heads = layer_norm(x, p.layer_norm1, config.norm_eps), p.self_attn
    of_items = tuple(
        apply_linear("Td,nhd->Tnh", normed, each).reshape(-1, config.patches_per_item, *each.weight.shape[:2])
        for each in (heads.q_proj, heads.k_proj, heads.v_proj)
    )
    attend = lambda qkv: attend_patches(*qkv, None, config.head_dim**-0.5)
    attended = jax.lax.map(attend, of_items).reshape(len(x), config.num_heads, config.head_dim)
    x = x + apply_linear("Tnh,dnh->Td", attended, heads.o_proj)
    return x + block(layer_norm(x, p.layer_norm2, config.norm_eps), p.mlp, config.activation)
