"""Weights side by side, so that one product reads what several would: of queries, keys and values, and of gate and up.

Each key head's query heads, itself and its values lie one behind the other, and each column's gate and up do. So the
first axis is split over devices as it was, and nothing else depends on how many there are. Checkpoints, and all that is
read of them, know nothing of it: arrays are joined when they are on their devices.

On a GPU a step has three launches less a layer, and no products that are too narrow for all of its cores.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxpaged.layers.experts import Experts
from jaxpaged.layers.mlp import Mlp
from jaxpaged.models.decoder import Attention

PLATFORMS = ("gpu",)
"""Where weights are joined. A CPU's own kernels read each weight as fast as it comes."""


def joined_shapes(shapes: Any) -> Any:
    """Parameters as they are once they are joined; leaves are shapes with shardings."""

    def side_by_side(*parts: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        out = jax.eval_shape(concatenated, *parts)
        return jax.ShapeDtypeStruct(out.shape, out.dtype, sharding=joined_sharding(parts[0]))

    return map_blocks(partial(jax.tree.map, side_by_side), shapes)


def joined_params(load: Callable[[], Any]) -> Any:
    """The parameters that `load` makes, joined. Those that became part of others are deleted, block by block."""

    def side_by_side(*parts: jax.Array) -> jax.Array:
        out = jax.jit(concatenated, out_shardings=joined_sharding(parts[0]))(*parts)
        for part in parts:
            part.delete()
        return out

    return map_blocks(partial(jax.tree.map, side_by_side), load())


def map_blocks(side_by_side: Callable[..., Any], params: Any) -> Any:
    """`params` with one `Linear` in place of those of queries, keys and values, and of gate and up: what `side_by_side`
    makes of them."""

    def of_block(block: Any) -> Any:
        if isinstance(block, Attention):
            joined = side_by_side(block.q_proj, block.k_proj, block.v_proj)
            return block.replace(qkv_proj=joined, q_proj=None, k_proj=None, v_proj=None)
        if isinstance(block, Mlp) and block.gate_proj is not None:
            joined = side_by_side(block.gate_proj, block.up_proj)
            return block.replace(gate_up_proj=joined, gate_proj=None, up_proj=None)
        return block

    return jax.tree.map(of_block, params, is_leaf=lambda node: isinstance(node, Attention | Mlp | Experts))


def concatenated(*parts: jax.Array) -> jax.Array:
    """[K, parts of each, ...] of arrays whose first axes are multiples of the last one's, K."""
    groups = len(parts[-1])
    return jnp.concatenate([part.reshape(groups, -1, *part.shape[1:]) for part in parts], axis=1)


def joined_sharding(part: Any) -> NamedSharding:
    """That of an array that is split as `part` is, and has an axis more behind the first."""
    first, *others = (*part.sharding.spec, *[None] * (len(part.shape) - len(part.sharding.spec)))
    return NamedSharding(part.sharding.mesh, PartitionSpec(first, None, *others))
