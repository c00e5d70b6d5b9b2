"""Attention in a model: the one `shard_map` around an attention kernel, and how its KV cache is sharded.

Heads are split over the mesh axes `MODEL_AXES`; metadata is the same on every device. This module knows neither
models nor steps; kernels (`pallas_kernels`) know nothing of meshes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpaged.params.sharding import MODEL_AXES, num_model_shards
from pallas_kernels import ragged_paged_attention as rpa
from pallas_kernels.ragged_paged_attention import AttentionMetadata, KVTensor

HIDING_DIM = 8
"""Components that heads have besides their own where some keys are hidden. One of them would do, and rows of memory
that are a multiple of eight are faster."""
HIDING_QUERY, HIDING_KEY = 64.0, -30_000.0
"""That component of every query, and of a hidden key: numbers of float16, whose product no other score comes near."""


@dataclasses.dataclass(frozen=True)
class AttentionContext:
    """Where attention runs and which kernel runs it; hashable, so it can be a static argument."""

    mesh: Mesh
    backend: str


@struct.dataclass
class AttentionBatch:
    """What attention knows of a step, for layers that share block tables and a window.

    `window` is the one with which `metadata` was made; a kernel must not be given another.
    """

    metadata: AttentionMetadata
    context: AttentionContext = struct.field(pytree_node=False)
    window: int | None = struct.field(pytree_node=False)


def attend(
    batch: AttentionBatch,
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    kv: KVTensor,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks_N: jax.Array | None = None,
    hidden_T: jax.Array | None = None,
) -> tuple[jax.Array, KVTensor]:
    """Causal attention of T new tokens over everything their requests have cached, themselves included.

    This step's keys and values go into the cache before the cache is read. `scale`, `soft_cap` and `sinks_N` are those
    of `ragged_paged_attention`. Returns (out_TNH, the cache with the new tokens).

    `hidden_T`: which of the new tokens no query ever sees. The cache then has heads that are wider by `HIDING_DIM`, and
    the probability of a hidden token is 0 exactly. Who sees no other gets 0.

    Raises ValueError when the mesh has more devices than there are kv heads to split.
    """
    context, head_dim = batch.context, q_TNH.shape[-1]
    if hidden_T is not None:
        assert soft_cap is None, "capped scores of hidden tokens are not far from others"
        q_TNH, k_TKH, v_TKH = hide(q_TNH, k_TKH, v_TKH, hidden_T)
    check_heads(context.mesh, q_TNH.shape[1], k_TKH.shape[1])

    def attend_heads(q_TNH, k_TKH, v_TKH, kv, metadata, sinks_N):
        return rpa.ragged_paged_attention(
            q_TNH, k_TKH, v_TKH, kv, metadata,
            scale=scale, window=batch.window, soft_cap=soft_cap, sinks_N=sinks_N, backend=context.backend,
        )  # fmt: skip

    heads, cache = PartitionSpec(None, MODEL_AXES, None), kv_spec(context.backend)
    sharded = jax.shard_map(
        attend_heads,
        mesh=context.mesh,
        in_specs=(heads, heads, heads, cache, PartitionSpec(), PartitionSpec(MODEL_AXES)),
        out_specs=(heads, cache),
        check_vma=False,  # the kernel's loops start from constants, which vary over no axis
    )
    out_TNH, kv = sharded(q_TNH, k_TKH, v_TKH, kv, batch.metadata, sinks_N)
    return out_TNH[..., :head_dim], kv


def hide(
    q_TNH: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, hidden_T: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values with `HIDING_DIM` more components, which make the scores of hidden tokens tiny."""
    hidden_T11 = hidden_T[:, None, None]
    k_TKH, v_TKH = (jnp.where(hidden_T11, 0, x) for x in (k_TKH, v_TKH))
    hiding_T11 = jnp.where(hidden_T11, HIDING_KEY, 0).astype(k_TKH.dtype)
    first = jnp.arange(HIDING_DIM) == 0
    widen = lambda x, more: jnp.concatenate([x, jnp.broadcast_to(more, (*x.shape[:2], HIDING_DIM))], axis=-1)
    return (
        widen(q_TNH, jnp.where(first, HIDING_QUERY, 0).astype(q_TNH.dtype)),
        widen(k_TKH, jnp.where(first, hiding_T11, 0)),
        widen(v_TKH, jnp.zeros((), v_TKH.dtype)),
    )


def check_heads(mesh: Mesh, num_heads: int, num_kv_heads: int) -> None:
    """Raise ValueError unless the mesh splits query heads and kv heads evenly."""
    devices = num_model_shards(mesh)
    if num_heads % devices or num_kv_heads % devices:
        raise ValueError(
            f"{num_heads} query heads and {num_kv_heads} kv heads do not split over {devices} devices. "
            "Repeat kv heads until the devices divide them, or use fewer devices."
        )


def check_attention(
    context: AttentionContext,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: Any,
    kv_dtype: Any,
) -> None:
    """Raise ValueError unless the mesh splits the heads and the kernel takes what each device gets."""
    check_heads(context.mesh, num_heads, num_kv_heads)
    devices = num_model_shards(context.mesh)
    rpa.check(
        context.backend, num_heads=num_heads // devices, num_kv_heads=num_kv_heads // devices, head_dim=head_dim,
        block_size=block_size, q_dtype=dtype, kv_dtype=kv_dtype,
    )  # fmt: skip


def kv_spec(backend: str) -> PartitionSpec:
    """How each array of a layer's cache is split: by kv head."""
    return PartitionSpec(*[None] * rpa.kv_heads_axis(backend), MODEL_AXES)


def kv_sharding(mesh: Mesh, backend: str) -> KVTensor:
    """A `NamedSharding` for every array of a layer's cache, in the cache's own tree."""
    return KVTensor((NamedSharding(mesh, kv_spec(backend)),) * rpa.num_kv_arrays(backend))


def allocate_kv(
    context: AttentionContext, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: Any
) -> KVTensor:
    """An empty cache of one layer, made in place on the devices that hold it."""
    zeros = jax.jit(
        lambda: rpa.kv_zeros(num_blocks, block_size, num_kv_heads, head_dim, dtype, context.backend),
        out_shardings=kv_sharding(context.mesh, context.backend),
    )
    return zeros()


def kv_struct(
    context: AttentionContext, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: Any
) -> KVTensor:
    """What `allocate_kv` would return, as shapes with shardings: for compiling ahead of time."""
    shape = rpa.kv_shape(num_blocks, block_size, num_kv_heads, head_dim, context.backend)
    shardings = kv_sharding(context.mesh, context.backend)
    return jax.tree.map(lambda sharding: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding), shardings)
