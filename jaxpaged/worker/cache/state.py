"""Recurrent states: rows have the states of requests, and blocks are snapshots of them. A module of `kinds.CacheKind`.

Letters: P blocks of a copy.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxpaged.kv_cache_spec import StateArray, StateSpec
from jaxpaged.layers.attention import AttentionContext
from jaxpaged.layers.state import StateBatch, StateTensor, state_metadata
from jaxpaged.params.sharding import MODEL_AXES
from jaxpaged.worker.cache.block_copies import gather_blocks, scatter_blocks
from jaxpaged.worker.step.packed import StepParts


def as_stored(spec: StateSpec, backend: str) -> StateSpec:
    return spec


def check_heads(context: AttentionContext, num_heads: int, spec: StateSpec, dtype: Any, kv_dtype: Any) -> None:
    raise AssertionError("nothing attends to a state")


def tensor_of_rank(
    context: AttentionContext, spec: StateSpec, num_blocks: int, dtype: Any, num_rows: int, num_layers: int
) -> StateTensor:
    def struct(array: StateArray, count: int, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        split = [MODEL_AXES if axis == array.split_axis else None for axis in range(array.split_axis + 1)]
        sharding = NamedSharding(context.mesh, PartitionSpec(None, *split))
        return jax.ShapeDtypeStruct((count, *shape), array.dtype, sharding=sharding)

    return StateTensor(
        rows=[struct(array, num_rows, array.row_shape(spec.num_drafts)) for array in spec.arrays],
        blocks=[struct(array, num_blocks, array.shape) for array in spec.arrays],
    )


def step_batch(
    context: AttentionContext,
    spec: StateSpec,
    parts: StepParts,
    tables_RM: Any,
    *,
    num_tokens: int,
    decodes_only: bool,
    shared_6R: jax.Array | None,
    visible_end_T: jax.Array | None,
) -> StateBatch:
    """What rows share, that all of them decode, and what tokens see makes no difference to a state."""
    metadata = state_metadata(
        parts.rows_R,
        parts.query_start_loc_R1,
        parts.seq_lens_R,
        tables_RM,
        num_tokens=num_tokens,
        block_size=spec.block_size,
    )
    return StateBatch(metadata, context)


def gather(tensor: StateTensor, id_P: Any, spec: StateSpec, backend: str) -> tuple[jax.Array, ...]:
    """The bytes of snapshots: those of their arrays, one after the other."""
    arrays = gather_blocks(tuple(tensor.blocks), id_P)
    parts = [jax.lax.bitcast_convert_type(array, jnp.uint8).reshape(len(id_P), -1) for array in arrays]
    return (jnp.concatenate(parts, axis=1)[:, None, None, None, :],)


def scatter(tensor: StateTensor, id_P: Any, pages: tuple[Any, ...], spec: StateSpec, backend: str) -> StateTensor:
    arrays, start = [], 0
    for array in spec.arrays:
        end = start + array.num_bytes(array.shape)
        dtype = jnp.dtype(array.dtype)
        parts = (dtype.itemsize,) if dtype.itemsize > 1 else ()
        cut = pages[0][:, 0, 0, 0, start:end].reshape(len(id_P), *array.shape, *parts)
        arrays.append(jax.lax.bitcast_convert_type(cut, dtype))
        start = end
    return tensor.replace(blocks=list(scatter_blocks(tuple(tensor.blocks), id_P, tuple(arrays))))
