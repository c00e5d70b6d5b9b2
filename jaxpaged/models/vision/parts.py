"""What towers are made of: pixels as numbers, patches, blocks of two products, specs.

Letters: I items, H rows and W columns of pixels, C channels, V values of a pixel; P patches, X numbers of a vector.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxpaged.layers.linear import Linear, apply_linear
from jaxpaged.layers.mlp import ACTIVATIONS
from jaxpaged.layers.norm import LayerNorm
from jaxpaged.models.config import HfFields
from jaxpaged.models.vision.interface import PIXELS, Picture, Shape, VisionConfig
from jaxpaged.params.sharding import MODEL_AXES
from jaxpaged.params.spec import Spec


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


def vision_fields(hf: dict[str, Any]) -> HfFields | None:
    """The fields of `vision_config`, if there is one."""
    vision = HfFields(hf).mapping("vision_config")
    return HfFields(vision) if vision else None


def axial_theta(fields: HfFields, default: float) -> float:
    """The base of rotations by row and by column, as `rope_parameters` have it."""
    ropes = HfFields(fields.mapping("rope_parameters"))
    ropes.choice("rope_type", ("axial", "default"), "axial")
    theta = ropes.number("rope_theta", default)
    ropes.refuse_unread()
    return theta


def block(x_PX: jax.Array, p: Block, activation: str) -> jax.Array:
    """The activation is computed in float32."""
    hidden = apply_linear("Td,fd->Tf", x_PX, p.fc1).astype(jnp.float32)
    return apply_linear("Tf,df->Td", ACTIVATIONS[activation](hidden).astype(x_PX.dtype), p.fc2)


def square_patches(pixels_IHWC: jax.Array, table_CV: jax.Array, side: int, dtype: Any) -> jax.Array:
    """[P, side * side * 3] of items of one size, row by row; a patch is in the order row, column, channel.

    Pixels become numbers by the table, which is rounded to `dtype`. Nothing on the way ends with an axis of a few
    numbers, of which a TPU makes 128: on its way to patches that begin with channels a picture of Gemma 3 had 470 MB.
    """
    items, height, width, channels = pixels_IHWC.shape
    lines = pixels_IHWC.reshape(items * height, width * channels).astype(jnp.int32)
    values = table_CV.shape[1]
    of_channel = jnp.arange(width * channels, dtype=jnp.int32) % channels * values
    looked_up = jnp.asarray(table_CV, dtype).reshape(-1)[lines + of_channel]
    cells = looked_up.reshape(items * height // side, side, width // side, side * channels)
    return cells.swapaxes(1, 2).reshape(-1, side * side * channels)


def numbers(patches_PX: jax.Array, table_CV: jax.Array, dtype: Any) -> jax.Array:
    """[P, X] in `dtype`: uint8 patches, one channel behind the other, as the numbers that the table has for them."""
    of_channel = patches_PX.reshape(len(patches_PX), len(table_CV), -1)
    looked_up = jax.vmap(lambda row_V, values: row_V[values], in_axes=(0, 1), out_axes=1)
    return looked_up(table_CV.astype(dtype), of_channel).reshape(patches_PX.shape)


def patch_positions(merge: int, rows: int, columns: int) -> np.ndarray:
    """int32 [P, 2]: row and column of the patches of one item with so many rows and columns of embeddings, in the order
    of embeddings, of which each is `merge` x `merge` patches. Host code."""
    row, column = np.divmod(np.arange(rows * columns), columns)
    inner_row, inner_column = np.divmod(np.arange(merge**2), merge)
    of_patches = row[:, None] * merge + inner_row, column[:, None] * merge + inner_column
    return np.stack(of_patches, axis=-1).reshape(-1, 2).astype(np.int32)


POSITIONS, PICTURES = "positions", "pictures"
"""Names of arrays of a batch: row and column of each patch, and the number of its picture."""


def patch_shapes(config: VisionConfig, size: int, frames: int = 1) -> dict[str, Shape]:
    """`Vision.shapes` of a tower whose patches see all of their picture."""
    assert frames == 1, f"{config.family} sees pictures only"
    return {
        PIXELS: ((size, 3 * config.patch**2), "uint8"),
        POSITIONS: ((size, 2), "int32"),
        PICTURES: ((size,), "int32"),
    }


def pack_patches(config: VisionConfig, pictures: Sequence[Picture], size: int) -> dict[str, np.ndarray]:
    """`Vision.pack` of such a tower. Patches that only pad are pictures of one patch each."""
    arrays = {name: np.zeros(shape, dtype) for name, (shape, dtype) in patch_shapes(config, size).items()}
    merge, end, number = math.isqrt(config.patches_per_embed), 0, 0
    for pixels, (items, rows, columns) in pictures:
        for item in np.split(pixels, items):
            begin, end = end, end + len(item)
            arrays[PIXELS][begin:end] = item
            arrays[POSITIONS][begin:end] = patch_positions(merge, rows, columns)
            arrays[PICTURES][begin:end] = number
            number += 1
    arrays[PICTURES][end:] = number + np.arange(size - end)
    return arrays


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
