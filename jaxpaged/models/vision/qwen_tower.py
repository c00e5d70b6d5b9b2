"""The towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, which take pictures of any size as patches (arXiv 2409.12191,
2502.13923, 2511.21631).

A layer is x + attention(norm(x)), then x + mlp(norm(x)); queries and keys are rotated by row and column, one half of
the pairs of a head each. Neighbouring patches, two by two, are merged into one embedding. Qwen2.5-VL's patches see
their window only, except in a few layers; Qwen3-VL adds a learned table of positions, which is interpolated to the size
of the picture, and gives what some layers have as further levels of an embedding (DeepStack).

A patch has two frames, which for a picture are the same, and come once. The host computes all that depends on the sizes
of pictures (`qwen_packing.py`).

Letters: P patches, X numbers of a patch or an embedding, E embeddings; N heads.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import AbstractMesh, Mesh

from jaxpaged.layers.linear import Linear, apply_linear
from jaxpaged.layers.mlp import Mlp, gated_mlp
from jaxpaged.layers.norm import LayerNorm, Norm, NormConfig, layer_norm, rms_norm
from jaxpaged.layers.rope import CosSin, RopeConfig, apply_rope, inverse_frequencies
from jaxpaged.models.vision.attention import attend_patches
from jaxpaged.models.vision.interface import EncoderBatch
from jaxpaged.models.vision.parts import Block, Heads, block, numbers, on_devices
from jaxpaged.models.vision.qwen_config import QwenVisionConfig
from jaxpaged.models.vision.qwen_packing import ORDER, PICTURES, PLACES, POSITIONS, SHARES, WINDOWS


@struct.dataclass
class Layer:
    norm1: Norm | LayerNorm
    attn: Heads
    norm2: Norm | LayerNorm
    mlp: Mlp | Block


@struct.dataclass
class Merger:
    """Neighbouring patches to one vector as wide as the decoder. `norm` has the width of a patch, or of all of them."""

    norm: Norm | LayerNorm
    mlp: Block


@struct.dataclass
class Tower:
    patch_embed: Linear
    layers: list[Layer]
    merger: Merger
    deep_mergers: list[Merger]
    pos_embed: jax.Array | None


def encode(params: Tower, config: QwenVisionConfig, batch: EncoderBatch) -> jax.Array:
    """`Vision.encode`: [E, D * (1 + levels)], the merged patches of the last layer, then those of `deep_layers`."""
    of_patches, mesh = batch.of_patches, batch.mesh
    x_PX = embedded(params, config, batch)
    cos_sin = rotations(config, of_patches[POSITIONS])
    levels = []
    for i, layer in enumerate(params.layers):
        segment_P = of_patches[PICTURES if config.sees_all(i) else WINDOWS]
        longest = None if config.sees_all(i) else config.longest_window
        x_PX = tower_layer(layer, config, x_PX, cos_sin, segment_P, longest, mesh)
        if i in config.deep_layers:
            levels.append(merged(params.deep_mergers[config.deep_layers.index(i)], config, x_PX))
    embeds_EX = jnp.concatenate([merged(params.merger, config, x_PX), *levels], axis=1)
    return embeds_EX[of_patches[ORDER]] if config.window else embeds_EX


def embedded(params: Tower, config: QwenVisionConfig, batch: EncoderBatch) -> jax.Array:
    """[P, width] of the pixels: a product with the frames of each patch, and its position's vector."""
    weight = params.patch_embed.weight
    frames = batch.pixels.shape[1] // (3 * config.patch**2)
    x_PX = numbers(batch.pixels, batch.table_CV, weight.dtype).reshape(-1, 3, frames, config.patch, config.patch)
    x_PX = jnp.broadcast_to(x_PX, (len(x_PX), *weight.shape[1:]))
    x_PX = on_devices(apply_linear("Tbjrs,dbjrs->Td", x_PX, params.patch_embed), batch.mesh)
    if params.pos_embed is None:
        return x_PX
    places, shares = batch.of_patches[PLACES], batch.of_patches[SHARES]
    vectors = params.pos_embed[places].astype(jnp.float32) * shares[:, :, None]
    return x_PX + vectors.sum(axis=1).astype(x_PX.dtype)


def rotations(config: QwenVisionConfig, positions: jax.Array) -> CosSin:
    """Of rows for the first half of the pairs of a head, and of columns for the second."""
    frequencies = inverse_frequencies(RopeConfig(config.rope_theta, config.head_dim // 2), 0)
    angles = (positions.astype(jnp.float32)[:, :, None] * frequencies).reshape(len(positions), -1)
    return jax.lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles)))


@partial(jax.jit, static_argnames=("config", "longest", "mesh"))
def tower_layer(
    p: Layer,
    config: QwenVisionConfig,
    x_PX: jax.Array,
    cos_sin: CosSin,
    segment_P: jax.Array,
    longest: int | None,
    mesh: Mesh | AbstractMesh | None,
) -> jax.Array:
    """[P, width] -> [P, width]; jitted, so that layers of one kind are traced once."""
    normed = norm(x_PX, p.norm1, config)
    q_PNH, k_PNH, v_PNH = (
        apply_linear("Td,nhd->Tnh", normed, w) for w in (p.attn.q_proj, p.attn.k_proj, p.attn.v_proj)
    )
    q_PNH, k_PNH = (apply_rope(x, *cos_sin) for x in (q_PNH, k_PNH))
    o_PNH = attend_patches(q_PNH, k_PNH, v_PNH, segment_P, config.head_dim**-0.5, longest=longest, mesh=mesh)
    x_PX = on_devices(x_PX + apply_linear("Tnh,dnh->Td", o_PNH, p.attn.o_proj), mesh)
    normed = norm(x_PX, p.norm2, config)
    if isinstance(p.mlp, Mlp):
        return x_PX + gated_mlp(normed, p.mlp, config.activation)
    return x_PX + block(normed, p.mlp, config.activation)


def merged(p: Merger, config: QwenVisionConfig, x_PX: jax.Array) -> jax.Array:
    """[E, D] of [P, width]: neighbours one behind the other through two products."""
    width = config.width * config.patches_per_embed
    if p.norm.weight.shape[0] == width:
        x_PX = norm(x_PX.reshape(-1, width), p.norm, config)
    else:
        x_PX = norm(x_PX, p.norm, config).reshape(-1, width)
    return block(x_PX, p.mlp, "gelu")


def norm(x_PX: jax.Array, p: Norm | LayerNorm, config: QwenVisionConfig) -> jax.Array:
    if isinstance(p, LayerNorm):
        return layer_norm(x_PX, p, config.norm_eps)
    return rms_norm(x_PX, p, NormConfig(config.norm_eps))
