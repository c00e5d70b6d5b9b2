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
from jaxpaged.layers.linear import Linear
from jaxpaged.layers.mlp import Mlp
from jaxpaged.models.decoder import Attention
from jaxpaged.params.quantized import StoredArray

PLATFORMS = ("gpu",)
"""Where weights are joined. A CPU's own kernels read each weight as fast as it comes."""


def joined_shapes(shapes: Any) -> Any:
    """Parameters as they are once they are joined; leaves are shapes with shardings."""

    def side_by_side(axis: int, *parts: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        out = jax.eval_shape(partial(concatenated, axis), *parts)
        return jax.ShapeDtypeStruct(out.shape, out.dtype, sharding=joined_sharding(axis, parts[0]))

    return map_blocks(side_by_side, shapes)


def joined_params(load: Callable[[], Any]) -> Any:
    """The parameters that `load` makes, joined. Those that became part of others are deleted, block by block."""

    def side_by_side(axis: int, *parts: jax.Array) -> jax.Array:
        whole = jax.jit(concatenated, static_argnums=0, out_shardings=joined_sharding(axis, parts[0]))
        out = whole(axis, *parts)
        for part in parts:
            part.delete()
        return out

    return map_blocks(side_by_side, load())


def map_blocks(side_by_side: Callable[..., Any], params: Any) -> Any:
    """`params` with one `Linear` in place of those of queries, keys and values, and of gate and up, where they are of
    one form: what `side_by_side` makes of their arrays, given the axis of their outputs."""

    def of_block(block: Any) -> Any:
        if isinstance(block, Attention) and are_alike(parts := (block.q_proj, block.k_proj, block.v_proj)):
            return block.replace(qkv_proj=joined(side_by_side, *parts), q_proj=None, k_proj=None, v_proj=None)
        if isinstance(block, Mlp) and are_alike(parts := (block.gate_proj, block.up_proj)):
            return block.replace(gate_up_proj=joined(side_by_side, *parts), gate_proj=None, up_proj=None)
        return block

    return jax.tree.map(of_block, params, is_leaf=lambda node: isinstance(node, Attention | Mlp | Experts))


def are_alike(parts: tuple[Linear | None, ...]) -> bool:
    """Whether all of the weights are there, of one form, which takes inputs in their order, and with heads of one
    size."""
    if any(part is None for part in parts) or len({part.weight.shape[1:] for part in parts}) > 1:
        return False
    forms = {(jax.tree.structure(part), *(leaf.dtype for leaf in jax.tree.leaves(part))) for part in parts}
    weight = parts[0].weight
    return len(forms) == 1 and not (isinstance(weight, StoredArray) and weight.order is not None)


def joined(side_by_side: Callable[..., Any], *parts: Linear) -> Linear:
    """One `Linear` of several. Scales of groups of inputs have the outputs behind their first axis."""
    whole = jax.tree.map(partial(side_by_side, 0), *(replaced_groups(part, None) for part in parts))
    if not isinstance(parts[0].weight, StoredArray):
        return whole
    groups = jax.tree.map(partial(side_by_side, 1), *(groups_of(part.weight) for part in parts))
    return replaced_groups(whole, groups)


def groups_of(weight: StoredArray) -> tuple[Any, Any]:
    return weight.scales, weight.zeros


def replaced_groups(p: Linear, groups: tuple[Any, Any] | None) -> Linear:
    """With other scales and zeros of groups of inputs, if it has any; None: with none."""
    if not isinstance(p.weight, StoredArray):
        return p
    scales, zeros = groups or (None, None)
    return p.replace(weight=p.weight.replace(scales=scales, zeros=zeros))


def concatenated(axis: int, *parts: Any, arrays: Any = jnp) -> Any:
    """[..., K, parts of each, ...] of arrays whose axes of this number are multiples of the last one's, K. `arrays`:
    the module that they are of."""
    before, groups = parts[-1].shape[:axis], parts[-1].shape[axis]
    apart = [part.reshape(*before, groups, -1, *part.shape[axis + 1 :]) for part in parts]
    return arrays.concatenate(apart, axis=axis + 1)


def joined_sharding(axis: int, part: Any) -> NamedSharding:
    """That of an array that is split as `part` is, and has an axis more behind this one."""
    axes = (*part.sharding.spec, *[None] * (len(part.shape) - len(part.sharding.spec)))
    return NamedSharding(part.sharding.mesh, PartitionSpec(*axes[: axis + 1], None, *axes[axis + 1 :]))
