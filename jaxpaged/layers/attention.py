"""Attention in a model: the one `shard_map` around an attention kernel, and how its KV cache is sharded.

Heads are split over all devices. Metadata is the same on every device. With fewer key-value heads than devices, the
devices of one head may hold different tokens of each block (`context_parallel.py`). The cache is then split by slot
too, and each device plans its own part of the metadata. This module knows neither models nor steps. Kernels
(`pallas_kernels`) know nothing of meshes.
"""

import dataclasses
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpaged.layers.context_parallel import heads_of_group, merged, share_here
from jaxpaged.layers.dense_attention import DenseBatch, dense_attention
from jaxpaged.layers.ranks import over_model_axes
from jaxpaged.params.sharding import CONTEXT_AXES, CONTEXT_AXIS, GROUP_AXIS, MODEL_AXES, context_mesh, num_model_shards
from pallas_kernels import ragged_paged_attention as rpa
from pallas_kernels.ragged_paged_attention import AttentionMetadata, KVTensor
from pallas_kernels.ragged_paged_attention.rotation import HeadNorm as HeadNorm
from pallas_kernels.ragged_paged_attention.rotation import Rotation

MASK_DIM = 8
"""Components that heads have besides their own where some tokens are masked. One of them would do, and rows of memory
that are a multiple of eight are faster."""
MASK_QUERY, MASK_KEY = 64.0, -30_000.0
"""That component of every query, and of a masked key: numbers of float16, whose product no other score comes near."""


@dataclasses.dataclass(frozen=True)
class AttentionContext:
    """Where attention runs and which kernel runs it; hashable, so it can be a static argument.

    `context_shards`: devices that have the same key-value head, or latents, and different tokens of each context.
    `recurrence`: who computes layers with states, see `recurrence.py`.
    """

    mesh: Mesh
    backend: str
    context_shards: int = 1
    recurrence: str = "reference"

    @cached_property
    def cache_mesh(self) -> Mesh:
        """The devices, by how the cache lies on them."""
        return self.mesh if self.context_shards == 1 else context_mesh(self.mesh, self.context_shards)

    def of_cache(self, context_shards: int) -> "AttentionContext":
        """The same for layers of whose contexts so many devices hold a part each."""
        return (
            self if context_shards == self.context_shards else dataclasses.replace(self, context_shards=context_shards)
        )

    @property
    def by_head(self) -> tuple[str, ...]:
        """The axes of `cache_mesh` over which query heads are split."""
        return MODEL_AXES if self.context_shards == 1 else CONTEXT_AXES

    @property
    def by_kv_head(self) -> tuple[str, ...] | str:
        """Those over which key-value heads are."""
        return MODEL_AXES if self.context_shards == 1 else GROUP_AXIS


@struct.dataclass
class AttentionBatch:
    """What attention knows of a step, for layers that share block tables and a window.

    `window` is the one with which `metadata` was made; a kernel must not be given another.

    `scales_row`: of a KV tensor with scales for each head, those of the layers of this group.

    `masked_T`: which of the new tokens no query ever sees. The cache then has heads that are wider by `MASK_DIM`, and
    the probability of a masked token is 0 exactly. A query that sees no other token gets 0.
    """

    metadata: AttentionMetadata
    context: AttentionContext = struct.field(pytree_node=False)
    window: int | None = struct.field(pytree_node=False)
    masked_T: jax.Array | None = None
    scales_row: int = struct.field(pytree_node=False, default=0)

    @property
    def num_tokens(self) -> jax.Array:
        """Those that do not pad the step."""
        return self.metadata.query_start_loc_R1[-1]

    @property
    def mesh(self) -> Mesh:
        return self.context.mesh

    def rotates(self, kv: KVTensor) -> bool:
        """Whether `attend` takes queries and keys that are still to be rotated."""
        is_plain = self.masked_T is None and self.context.context_shards == 1
        return is_plain and rpa.rotates(self.context.backend, kv)


def step_metadata(
    context: AttentionContext,
    *where: jax.Array,
    num_tokens: int,
    block_size: int,
    window: int | None,
    chunk: int | None = None,
    decodes_only: bool = False,
    shared_6R: jax.Array | None = None,
    visible_end_T: jax.Array | None = None,
) -> AttentionMetadata:
    """`make_metadata` of a step, for layers with keys and values; `block_size` counts slots of a device. A plan for a
    device's part of contexts has an axis in front, which is split over the devices of a group.

    Raises ValueError for a `visible_end_T` where contexts are split.
    """
    if context.context_shards > 1 and visible_end_T is not None:
        raise ValueError(
            f"{context.context_shards} devices hold parts of each context, and pictures whose tokens see each other "
            "both ways need whole ones; split contexts over one device, or give --language-model-only."
        )
    make = partial(
        rpa.make_metadata,
        num_tokens=num_tokens,
        block_size=block_size,
        window=window,
        backend=context.backend,
        decodes_only=decodes_only,
        shared_6R=shared_6R,
        chunk=chunk,
        visible_end_T=visible_end_T,
    )
    if context.context_shards == 1:
        return make(*where)

    def of_device(*where: jax.Array) -> AttentionMetadata:
        metadata = make(*where, share=share_here(context.context_shards, block_size))
        return dataclasses.replace(metadata, plan=jax.tree.map(lambda x: x[None], metadata.plan))

    whole = PartitionSpec()
    out_specs = metadata_specs(AttentionMetadata(*[whole] * 5, decodes_only=decodes_only), context)
    return on_devices(context, of_device, (whole,) * len(where), out_specs)(*where)


def metadata_specs(metadata: AttentionMetadata, context: AttentionContext) -> AttentionMetadata:
    """How metadata lies on the devices."""
    whole = PartitionSpec()
    plan = whole if context.context_shards == 1 else PartitionSpec(CONTEXT_AXIS)
    ends = None if metadata.visible_end_T is None else whole
    return AttentionMetadata(*[whole] * 4, plan=plan, visible_end_T=ends, decodes_only=metadata.decodes_only)


def on_devices(context: AttentionContext, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
    """`function` on every device's part, by the axes of `cache_mesh`."""
    mesh = context.cache_mesh
    if context.context_shards == 1:
        return over_model_axes(mesh, function, in_specs, out_specs)
    # The kernels' loops start from constants, which vary over no axis.
    sharded = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def call(*arguments: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # whatever view the caller has of the devices
            return sharded(*arguments)

    return call


def attend(
    batch: AttentionBatch | DenseBatch,
    q_TNH: jax.Array,
    k_TKH: jax.Array | None,
    v_TKH: jax.Array | None,
    kv: KVTensor,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks_N: jax.Array | None = None,
) -> tuple[jax.Array, KVTensor]:
    """Attention of T new tokens over everything their requests have cached, themselves included: causal, but for tokens
    that the metadata lets see what stands behind them.

    This step's keys and values go into the cache before the cache is read; without them they are there already, since
    another layer cached them. `scale`, `soft_cap` and `sinks_N` are those of `ragged_paged_attention`. Returns
    (out_TNH, the cache with the new tokens).

    Raises ValueError when the mesh has more devices than there are kv heads to split.
    """
    if k_TKH is None and not isinstance(batch, DenseBatch):
        real_T = jnp.arange(len(q_TNH)) < batch.metadata.query_start_loc_R1[-1]
        q_TNH = jnp.where(real_T[:, None, None], q_TNH, 0)
    heads = q_TNH, k_TKH, v_TKH
    return attend_heads(batch, heads, kv, scale=scale, soft_cap=soft_cap, sinks_N=sinks_N)


def attend_heads(
    batch: AttentionBatch | DenseBatch,
    heads: tuple[jax.Array | None, ...],
    kv: KVTensor,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks_N: jax.Array | None = None,
    rotation: Rotation | None = None,
) -> tuple[jax.Array, KVTensor]:
    """`attend` of queries, keys and values that still go through `rotation`, where the batch rotates. Then all may be
    one array [T, K, G + 2, H], each key head's queries, itself and its values one behind the other. Of whole texts the
    cache is their keys and values."""
    if isinstance(batch, DenseBatch):
        q_TNH, *own = heads
        kv = kv if own[0] is None else tuple(own)
        return dense_attention(batch, q_TNH, *kv, scale=scale, soft_cap=soft_cap, sinks_N=sinks_N), kv
    context, head_dim = batch.context, heads[0].shape[-1]
    if batch.masked_T is not None:
        assert soft_cap is None, "capped scores of masked tokens are not far from others"
        heads = mask_tokens(*heads, batch.masked_T)
    num_kv_heads = num_heads_in(kv, context) if heads[-1] is None else heads[-1].shape[1]
    num_heads = heads[0].shape[1] if len(heads) == 3 else num_kv_heads * (heads[0].shape[2] - 2)
    check_heads(context.mesh, num_heads, num_kv_heads)

    settings = {"scale": scale, "window": batch.window, "soft_cap": soft_cap, "backend": context.backend}

    def attend_here(heads, kv, metadata, sinks_N, rotation):
        if rotation is not None:
            q_TNH, kv = rpa.rotate_and_write(heads, rotation, kv, metadata, backend=context.backend)
            heads = q_TNH, None, None
        if context.context_shards == 1:
            return rpa.ragged_paged_attention(*heads, kv, metadata, sinks_N=sinks_N, **settings)
        q_TNH, k_TKH, v_TKH = heads
        metadata = dataclasses.replace(metadata, plan=jax.tree.map(lambda x: x[0], metadata.plan))
        parts, kv = rpa.ragged_paged_attention(
            heads_of_group(q_TNH), k_TKH, v_TKH, kv, metadata, undivided=True, **settings
        )
        return merged(parts, sinks_N, q_TNH.dtype), kv

    cached = of_layer(kv, batch.scales_row)
    by_head, cache = PartitionSpec(None, context.by_head, None), kv_specs(context, cached)
    of_step = metadata_specs(batch.metadata, context), PartitionSpec(context.by_head), PartitionSpec()
    sharded = on_devices(context, attend_here, (by_head, cache, *of_step), (by_head, cache))
    out_TNH, cached = sharded(heads, cached, batch.metadata, sinks_N, rotation)
    return out_TNH[..., :head_dim], cached if has_token_scales(cached) else KVTensor(cached.arrays, kv.scales)


def of_layer(kv: KVTensor, row: int) -> KVTensor:
    """What kernels take: of scales for each head, those of one of the layers that share the tensor."""
    if not kv.scales or has_token_scales(kv):
        return kv
    return KVTensor(kv.arrays, tuple(scales_GK[row] for scales_GK in kv.scales))


def has_token_scales(kv: KVTensor) -> bool:
    """Whether each token and head has scales. Those for each head have two axes at most, here [G, K]."""
    return bool(kv.scales) and kv.scales[0].ndim > 2


def num_heads_in(kv: KVTensor, context: AttentionContext) -> int:
    """Key-value heads of a cache, over all devices."""
    return kv.arrays[0].shape[rpa.kv_layout(context.backend).heads_axis]


def mask_tokens(
    q_TNH: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, masked_T: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values with `MASK_DIM` more components, which make the scores of masked tokens tiny."""
    masked_T11 = masked_T[:, None, None]
    k_TKH, v_TKH = (jnp.where(masked_T11, 0, x) for x in (k_TKH, v_TKH))
    mask_T11 = jnp.where(masked_T11, MASK_KEY, 0).astype(k_TKH.dtype)
    first = jnp.arange(MASK_DIM) == 0
    widen = lambda x, more: jnp.concatenate([x, jnp.broadcast_to(more, (*x.shape[:2], MASK_DIM))], axis=-1)
    return (
        widen(q_TNH, jnp.where(first, MASK_QUERY, 0).astype(q_TNH.dtype)),
        widen(k_TKH, jnp.where(first, mask_T11, 0)),
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
    kv_scales: str = "none",
) -> None:
    """Raise ValueError unless the mesh splits the heads and the kernel takes what each device gets. `num_kv_heads` and
    `block_size`: heads of all groups of devices that hold a context together, and slots of one device."""
    shards = context.context_shards
    check_heads(context.mesh, num_heads, num_kv_heads * shards)
    groups = num_model_shards(context.mesh) // shards
    rpa.check(
        context.backend,
        num_heads=num_heads // groups,
        num_kv_heads=num_kv_heads // groups,
        head_dim=head_dim,
        block_size=block_size,
        q_dtype=dtype,
        kv_dtype=kv_dtype,
        kv_scales=kv_scales,
    )


def kv_spec(context: AttentionContext, slots_axis: int) -> PartitionSpec:
    """How an array of a layer's cache is split: by kv head, and by slot if devices hold parts of contexts."""
    axes: dict[int, Any] = {rpa.kv_layout(context.backend).heads_axis: context.by_kv_head}
    if context.context_shards > 1:
        axes[slots_axis] = CONTEXT_AXIS
    return PartitionSpec(*[axes.get(axis) for axis in range(max(axes) + 1)])


def kv_specs(context: AttentionContext, kv: KVTensor) -> KVTensor:
    """How a layer's cache, of which `kv` has as many arrays, is split: scales as what they belong to."""
    layout = rpa.kv_layout(context.backend)
    if has_token_scales(kv):
        of_scales = kv_spec(context, layout.scale_slots_axis)
    else:
        of_scales = PartitionSpec(*[None] * (kv.scales[0].ndim - 1 if kv.scales else 0), context.by_kv_head)
    return KVTensor((kv_spec(context, layout.slots_axis),) * len(kv.arrays), (of_scales,) * len(kv.scales))


def kv_sharding(context: AttentionContext, kv: KVTensor) -> KVTensor:
    """A `NamedSharding` for every array of a layer's cache, in the cache's own tree."""
    return jax.tree.map(partial(NamedSharding, context.cache_mesh), kv_specs(context, kv))


def allocate_kv(context: AttentionContext, *shape: Any, **scales: Any) -> KVTensor:
    """An empty cache of one layer, `kv_struct` of the same arguments, made in place on the devices that hold it. Scales
    for each head are 1."""
    struct = kv_struct(context, *shape, **scales)

    def made() -> KVTensor:
        arrays = (jnp.zeros(each.shape, each.dtype) for each in struct.arrays)
        return KVTensor(tuple(arrays), tuple(jnp.ones(each.shape, each.dtype) for each in struct.scales))

    return jax.jit(made, out_shardings=jax.tree.map(lambda each: each.sharding, struct))()


def kv_struct(
    context: AttentionContext,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: Any,
    kv_scales: str = "none",
    num_layers: int = 1,
) -> KVTensor:
    """Shapes with shardings of the cache of one layer, or of so many that share a KV tensor and have scales of their
    own, [G, K] where they are for each head."""
    layout, shards = rpa.kv_layout(context.backend), context.context_shards
    shape = layout.shape(num_blocks, block_size, num_kv_heads, head_dim)
    scale_shapes: tuple[tuple[int, ...], ...] = ()
    if kv_scales == "head":
        scale_shapes = ((num_layers, num_kv_heads),) * 2
    elif kv_scales == "token":
        of_device, axis = layout.scale_shapes(num_blocks, block_size // shards, num_kv_heads), layout.scale_slots_axis
        scale_shapes = tuple((*each[:axis], shards * each[axis], *each[axis + 1 :]) for each in of_device)
    arrays = (jax.ShapeDtypeStruct(shape, dtype),) * layout.num_arrays
    kv = KVTensor(arrays, tuple(jax.ShapeDtypeStruct(each, jnp.float32) for each in scale_shapes))
    place = lambda each, sharding: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding)
    return jax.tree.map(place, kv, kv_sharding(context, kv))
