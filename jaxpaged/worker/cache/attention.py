"""Keys and values of every token: the layout belongs to the attention backend. A module of `kinds.CacheKind`.

Letters: P blocks of a copy.
"""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged.kv_cache_spec import AttentionSpec
from jaxpaged.layers.attention import AttentionBatch, AttentionContext, check_attention, kv_struct, step_metadata
from jaxpaged.worker.cache.block_copies import gather_blocks, scatter_blocks
from jaxpaged.worker.step.packed import StepParts
from pallas_kernels.ragged_paged_attention import KVTensor, kv_layout


def as_stored(spec: AttentionSpec, backend: str) -> AttentionSpec:
    layout = kv_layout(backend)
    stored = replace(spec, stored_dim=layout.stored_dim(spec.head_dim))
    if spec.scales != "token":
        return stored
    numbers = sum(map(math.prod, layout.scale_shapes(1, spec.device_slots, 1)))
    return replace(stored, stored_scales=numbers * spec.context_shards)


def check_heads(context: AttentionContext, num_heads: int, spec: AttentionSpec, dtype: Any, kv_dtype: Any) -> None:
    context = context.of_cache(spec.context_shards)
    check_attention(
        context,
        num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.device_slots,
        dtype,
        spec.dtype or kv_dtype,
        spec.scales,
    )


def tensor_of_rank(
    context: AttentionContext, spec: AttentionSpec, num_blocks: int, dtype: Any, num_rows: int, num_layers: int
) -> KVTensor:
    shape = num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim
    return kv_struct(context, *shape, spec.dtype or dtype, spec.scales, num_layers)


def step_batch(
    context: AttentionContext,
    spec: AttentionSpec,
    parts: StepParts,
    tables_RM: Any,
    *,
    num_tokens: int,
    decodes_only: bool,
    shared_6R: jax.Array | None,
    visible_end_T: jax.Array | None,
) -> AttentionBatch:
    context = context.of_cache(spec.context_shards)
    metadata = step_metadata(
        context,
        parts.num_seqs[0],
        parts.query_start_loc_R1,
        parts.seq_lens_R,
        tables_RM,
        num_tokens=num_tokens,
        block_size=spec.device_slots,
        window=spec.window,
        chunk=spec.chunk,
        decodes_only=decodes_only,
        shared_6R=shared_6R,
        visible_end_T=visible_end_T,
    )
    return AttentionBatch(metadata, context, spec.window)


def gather(tensor: KVTensor, id_P: Any, spec: AttentionSpec, backend: str) -> tuple[Any, ...]:
    """Each head of the model once, however many copies there are."""
    layout = kv_layout(backend)
    blocks = gather_blocks(tensor.arrays, id_P)
    values = jnp.stack(layout.unpack(blocks, spec.head_dim), axis=1)[..., :: spec.head_copies, :]
    if spec.scales != "token":
        return (values,)
    found = gather_blocks(tensor.scales, id_P)
    parts = zip(*(jnp.split(each, spec.context_shards, axis=layout.scale_slots_axis) for each in found))
    unpacked = [layout.unpack_scales(part, spec.device_slots) for part in parts]
    scales = [jnp.concatenate(each, axis=1) for each in zip(*unpacked)]
    return values, jnp.stack(scales, axis=1)[..., :: spec.head_copies]


def scatter(tensor: KVTensor, id_P: Any, pages: tuple[Any, ...], spec: AttentionSpec, backend: str) -> KVTensor:
    layout = kv_layout(backend)
    values = jnp.repeat(pages[0], spec.head_copies, axis=-2)
    arrays = scatter_blocks(tensor.arrays, id_P, layout.pack(values[:, 0], values[:, 1]))
    if spec.scales != "token":
        return KVTensor(arrays, tensor.scales)
    k_PSK, v_PSK = jnp.moveaxis(jnp.repeat(pages[1], spec.head_copies, axis=-1), 1, 0)
    parts = zip(*(jnp.split(each, spec.context_shards, axis=1) for each in (k_PSK, v_PSK)))
    packed = [layout.pack_scales(*part) for part in parts]
    scales = tuple(jnp.concatenate(each, axis=layout.scale_slots_axis) for each in zip(*packed))
    return KVTensor(arrays, scatter_blocks(tensor.scales, id_P, scales))
