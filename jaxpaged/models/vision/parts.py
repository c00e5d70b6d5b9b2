"""What towers are made of: pixels as numbers, patches, norms with a bias, blocks of two products, specs.

Letters: I items, H rows and W columns of pixels, C channels, V values of a pixel; P patches, X numbers of a vector.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxpaged.layers.linear import Linear, apply_linear
from jaxpaged.layers.mlp import ACTIVATIONS
from jaxpaged.layers.norm import NormConfig, normalised
from jaxpaged.models.vision.interface import VisionConfig
from jaxpaged.params.sharding import MODEL_AXES
from jaxpaged.params.spec import Spec


@struct.dataclass
class LayerNorm:
    """`weight` and `bias` have the width of the normalised axis."""

    weight: jax.Array
    bias: jax.Array


@struct.dataclass
class Block:
    """fc2(activation(fc1(x)))."""

    fc1: Linear
    fc2: Linear


@struct.dataclass
class Heads:
    """The projections of attention."""

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear


def layer_norm(x_PX: jax.Array, p: LayerNorm, eps: float) -> jax.Array:
    """(x - mean) / sqrt(variance + eps) * weight + bias, computed in float32 and rounded once (arXiv 1607.06450)."""
    unit = normalised(x_PX, NormConfig(eps, is_centred=True))
    return (unit * p.weight.astype(jnp.float32) + p.bias.astype(jnp.float32)).astype(x_PX.dtype)


def block(x_PX: jax.Array, p: Block, activation: str) -> jax.Array:
    """The activation is computed in float32."""
    hidden = apply_linear("Td,fd->Tf", x_PX, p.fc1).astype(jnp.float32)
    return apply_linear("Tf,df->Td", ACTIVATIONS[activation](hidden).astype(x_PX.dtype), p.fc2)


def square_patches(pixels_IHWC: jax.Array, table_CV: jax.Array, side: int, dtype: Any) -> jax.Array:
    """[P, 3 * side * side] of items of one size, row by row; a patch is in the order channel, row, column.

    Pixels become numbers by the table, which is rounded to `dtype`.
    """
    items, height, width, channels = pixels_IHWC.shape
    rows, columns = height // side, width // side
    cells = pixels_IHWC.reshape(items, rows, side, columns, side, channels).transpose(0, 1, 3, 5, 2, 4)
    return numbers(cells.reshape(-1, channels * side * side), table_CV, dtype)


def numbers(patches_PX: jax.Array, table_CV: jax.Array, dtype: Any) -> jax.Array:
    """[P, X] in `dtype`: uint8 patches, one channel behind the other, as the numbers that the table has for them."""
    of_channel = patches_PX.reshape(len(patches_PX), len(table_CV), -1)
    looked_up = jax.vmap(lambda row_V, values: row_V[values], in_axes=(0, 1), out_axes=1)
    return looked_up(table_CV.astype(dtype), of_channel).reshape(patches_PX.shape)


def on_devices(x_PX: jax.Array, mesh: Mesh | AbstractMesh | None) -> jax.Array:
    """The same, patches split over the devices of the mesh, if there is one that can share them."""
    if mesh is None or len(x_PX) % mesh.size:
        return x_PX
    return jax.lax.with_sharding_constraint(x_PX, NamedSharding(mesh, PartitionSpec(MODEL_AXES)))


def placed(specs: Any, config: VisionConfig, num_shards: int) -> Any:
    """The specs of a tower as they lie on devices: split by their letters, or whole where that cannot be or is not to
    be (`VisionConfig.splits`)."""
    if config.splits(num_shards):
        return specs
    return jax.tree.map(lambda spec: replace(spec, whole=True), specs)


def layer_norm_specs(name: str) -> LayerNorm:
    return LayerNorm(Spec("d", "d", f"{name}.weight"), Spec("d", "d", f"{name}.bias"))


def linear_specs(dims: str, hf_dims: str, name: str, has_bias: bool = True) -> Linear:
    """A projection; its bias has the axes that the checkpoint merged into the weight's first one."""
    out = hf_dims.split(" ")[0]
    return Linear(Spec(dims, hf_dims, f"{name}.weight"), Spec(out, out, f"{name}.bias") if has_bias else None)
