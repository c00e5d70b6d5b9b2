"""Keys and values of every token: the layout belongs to the attention backend. A module of `kinds.CacheKind`.

Letters: P blocks of a copy.
"""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from jaxpaged.kv_cache_spec import AttentionSpec
from jaxpaged.layers.attention import AttentionBatch, AttentionContext, check_attention, kv_struct, step_metadata
from jaxpaged.worker.step.packed import StepParts
from pallas_kernels import kv_copy
from pallas_kernels.ragged_paged_attention import KVTensor, kv_layout


def as_stored(spec: AttentionSpec, backend: str) -> AttentionSpec:
    return replace(spec, stored_dim=kv_layout(backend).stored_dim(spec.head_dim))


def check_heads(context: AttentionContext, num_heads: int, spec: AttentionSpec, dtype: Any, kv_dtype: Any) -> None:
    context = context.of_cache(spec.context_shards)
    check_attention(context, num_heads, spec.num_kv_heads, spec.head_dim, spec.device_slots, dtype, kv_dtype)


def tensor_of_rank(
    context: AttentionContext, spec: AttentionSpec, num_blocks: int, dtype: Any, num_rows: int
) -> KVTensor:
    return kv_struct(context, num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim, dtype)


def step_batch(
    context: AttentionContext, spec: AttentionSpec, parts: StepParts, tables_RM: Any, **settings: Any
) -> AttentionBatch:
    context = context.of_cache(spec.context_shards)
    metadata = step_metadata(
        context,
        parts.num_seqs[0],
        parts.query_start_loc_R1,
        parts.seq_lens_R,
        tables_RM,
        block_size=spec.device_slots,
        window=spec.window,
        chunk=spec.chunk,
        **settings,
    )
    return AttentionBatch(metadata, context, spec.window)


def gather(tensor: KVTensor, id_P: Any, spec: AttentionSpec, backend: str) -> Any:
    """Each head of the model once, however many copies there are."""
    blocks = kv_copy.gather_blocks(tensor.arrays, id_P)
    return jnp.stack(kv_layout(backend).unpack(blocks, spec.head_dim), axis=1)[..., :: spec.head_copies, :]


def scatter(tensor: KVTensor, id_P: Any, values: Any, spec: AttentionSpec, backend: str) -> KVTensor:
    values = jnp.repeat(values, spec.head_copies, axis=-2)
    blocks = kv_layout(backend).pack(values[:, 0], values[:, 1])
    return KVTensor(kv_copy.scatter_blocks(tensor.arrays, id_P, blocks), tensor.scales)
