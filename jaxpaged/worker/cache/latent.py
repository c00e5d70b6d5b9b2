"""One vector of every token, which all heads share, or none reads. A module of `kinds.CacheKind`.

Letters: P blocks of a copy.
"""

from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxpaged.kv_cache_spec import LatentSpec
from jaxpaged.layers.attention import AttentionBatch, AttentionContext, step_metadata
from jaxpaged.layers.latent_attention import check_latent_attention, latents_spec, stored_width
from jaxpaged.worker.step.packed import StepParts
from pallas_kernels import kv_copy


def as_stored(spec: LatentSpec, backend: str) -> LatentSpec:
    if spec.latent_dim is None:
        return spec
    return replace(spec, stored_width=stored_width(backend, spec.latent_dim, spec.width))


def check_heads(context: AttentionContext, num_heads: int, spec: LatentSpec, dtype: Any, kv_dtype: Any) -> None:
    assert spec.latent_dim is not None, "nothing attends to this cache"
    context = context.of_cache(spec.context_shards)
    check_latent_attention(context, num_heads, spec.latent_dim, spec.width, spec.device_slots, dtype, kv_dtype)


def tensor_of_rank(
    context: AttentionContext, spec: LatentSpec, num_blocks: int, dtype: Any, num_rows: int, num_layers: int
) -> jax.ShapeDtypeStruct:
    place = NamedSharding(context.cache_mesh, latents_spec(context))
    width = spec.stored_width or spec.width
    return jax.ShapeDtypeStruct((num_blocks, spec.block_size, width), dtype, sharding=place)


def step_batch(
    context: AttentionContext, spec: LatentSpec, parts: StepParts, tables_RM: Any, **settings: Any
) -> AttentionBatch:
    """Kernels for latents plan for themselves, so the metadata is that of whole blocks."""
    metadata = step_metadata(
        context.of_cache(1),
        parts.num_seqs[0],
        parts.query_start_loc_R1,
        parts.seq_lens_R,
        tables_RM,
        block_size=spec.block_size,
        window=None,
        **settings,
    )
    return AttentionBatch(metadata, context.of_cache(spec.context_shards), None)


def gather(tensor: jax.Array, id_P: Any, spec: LatentSpec, backend: str) -> tuple[jax.Array, ...]:
    (blocks,) = kv_copy.gather_blocks((tensor,), id_P)
    return (blocks[:, None, :, None, :],)


def scatter(tensor: jax.Array, id_P: Any, pages: tuple[Any, ...], spec: LatentSpec, backend: str) -> jax.Array:
    return kv_copy.scatter_blocks((tensor,), id_P, (pages[0][:, 0, :, 0, :],))[0]
