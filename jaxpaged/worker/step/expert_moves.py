"""The function of the programs that move experts between devices, and the tables that say where experts are.

A block's arrays of one shape share a program. Devices exchange rows of one expert each at a time, all to all, so what
this needs besides the new array is small.

Letters: e places of experts, X devices.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpaged.layers.experts import Experts, Placement, expert_blocks, map_experts, weights_of
from jaxpaged.layers.ranks import of_ranks
from jaxpaged.params.sharding import EXPERT_AXIS, expert_axes, num_expert_devices, num_ranks
from jaxpaged.worker.expert_placing import first_experts, tables

BYTES_AT_ONCE = 64 << 20
"""What devices send each other at a time, at most, unless a single row of each is more."""


def with_tables(params: Any, mesh: Mesh, shapes_only: bool = False) -> Any:
    """Parameters whose experts are where they were loaded, with tables that say so. `shapes_only`: so are `params`."""

    def with_own(p: Experts) -> Experts:
        num_experts, num_places = p.router.weight.shape[0], p.gate_proj.weight.shape[0]
        expert_e = first_experts(num_experts, num_places)
        return p.replace(placement=placement_of(expert_e, num_experts, mesh, shapes_only))

    return map_experts(with_own, params)


def loaded_with_tables(load: Callable[[], Any], mesh: Mesh) -> Any:
    return with_tables(load(), mesh)


def placement_of(expert_e: np.ndarray, num_experts: int, mesh: Mesh, shapes_only: bool = False) -> Placement:
    """The tables of a placement, on all devices, or their shapes."""
    whole = NamedSharding(mesh, PartitionSpec())
    if shapes_only:
        make: Callable[[np.ndarray], Any] = lambda table: jax.ShapeDtypeStruct(table.shape, table.dtype, sharding=whole)
    else:
        make = lambda table: jax.make_array_from_callback(table.shape, whole, lambda index: table[index])
    return Placement(*map(make, tables(expert_e, num_experts)))


def load_structs(params: Any, mesh: Mesh) -> list[jax.ShapeDtypeStruct]:
    """The shape of the counts, which stand behind the KV tensors; nothing where nothing is counted. Each attention rank
    counts its own tokens, one after the other along the first axis."""
    num_experts = [len(p.placement.num_places_E) for p in placed_blocks(params)]
    if not num_experts:
        return []
    shape = (num_ranks(mesh) * len(num_experts), num_experts[0])
    return [jax.ShapeDtypeStruct(shape, jnp.uint32, sharding=of_ranks(mesh))]


def placed_blocks(params: Any) -> list[Any]:
    """The blocks whose experts have tables, in the order of their counts."""
    return [p for p in expert_blocks(params) if p.placement is not None]


def with_parts(p: Experts, parts: list[Any]) -> Experts:
    """The block with others in place of `weights_of`."""
    tree = jax.tree.structure((p.gate_proj, p.up_proj, p.down_proj))
    gate, up, down = jax.tree.unflatten(tree, parts)
    return p.replace(gate_proj=gate, up_proj=up, down_proj=down)


def parts_to_move(params: Any) -> list[Any]:
    """The arrays of the blocks that have tables, one of each shape and type: arrays that are alike share a program."""
    return list({kind_of(part): part for p in placed_blocks(params) for part in weights_of(p)}.values())


def move_number(part: Any, params: Any) -> int:
    """Which of the programs that move arrays, from 1, is for this one."""
    return [kind_of(each) for each in parts_to_move(params)].index(kind_of(part)) + 1


def kind_of(part: Any) -> tuple[Any, ...]:
    return tuple(part.shape), jnp.dtype(part.dtype).name


def move_experts(mesh: Mesh, part: Any, own: jax.Array, source_e: jax.Array) -> jax.Array:
    """An array of a block that lies as `part` does, with the experts in its places that were in places `source_e`."""
    num_devices, axes, spec = num_expert_devices(mesh), expert_axes(mesh), part.sharding.spec
    tile = rows_at_once(part.shape[1], num_devices * part.dtype.itemsize * row_size(part.shape))

    def move(own: jax.Array, source_e: jax.Array) -> jax.Array:
        return moved(own, source_e, num_devices, tile, axes)

    return jax.shard_map(move, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec, check_vma=False)(
        own, source_e
    )  # what a device gets follows from its index


def row_size(shape: tuple[int, ...]) -> int:
    """Numbers of one row of one expert."""
    return 1 if len(shape) == 2 else shape[2]


def rows_at_once(num_rows: int, bytes_per_row: int) -> int:
    """The largest divisor of the rows that keeps what is sent within `BYTES_AT_ONCE`."""
    most = max(BYTES_AT_ONCE // bytes_per_row, 1)
    return next(n for n in range(min(most, num_rows), 0, -1) if num_rows % n == 0)


def moved(
    own: jax.Array, source_e: jax.Array, num_devices: int, tile: int, axes: str | tuple[str, ...] = EXPERT_AXIS
) -> jax.Array:
    """This device's places, `own`, with what was in the places `source_e` of all devices, those of the mesh's `axes`:
    the first axis, and of the second `tile` rows at a time."""
    num_here, num_tiles = len(own), own.shape[1] // tile
    me = jax.lax.axis_index(axes)

    def exchange(i: jax.Array, new: jax.Array) -> jax.Array:
        place, row = i // num_tiles, i % num_tiles * tile
        wanted_X = source_e[jnp.arange(num_devices) * num_here + place]
        rows = jax.lax.dynamic_slice_in_dim(own, row, tile, axis=1)
        # A device sends to each other what that one would want if it were here; only the owner is listened to.
        got = jax.lax.all_to_all(rows[wanted_X % num_here], axes, split_axis=0, concat_axis=0)
        mine = got[wanted_X[me] // num_here][None]
        return jax.lax.dynamic_update_slice(new, mine, (place, row) + (0,) * (own.ndim - 2))

    return jax.lax.fori_loop(0, num_here * num_tiles, exchange, jnp.zeros_like(own))
