"""One vector of every token, which all heads share, or none reads. A module of `kinds.CacheKind`.

Letters: P blocks of a copy.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxpaged.kv_cache_spec import LatentSpec
from jaxpaged.layers.attention import AttentionBatch, AttentionContext, step_metadata
from jaxpaged.layers.latent_attention import check_latent_attention, latents_spec, scale_lanes, stored_width
from jaxpaged.worker.cache.block_copies import gather_blocks, scatter_blocks
from jaxpaged.worker.step.packed import StepParts
from pallas_kernels.ragged_paged_attention import KVTensor


def as_stored(spec: LatentSpec, backend: str) -> LatentSpec:
    if spec.latent_dim is None:
        return spec
    stored = replace(spec, stored_width=stored_width(backend, spec.latent_dim, spec.width))
    return stored if spec.dtype is None else replace(stored, stored_scales=2 * scale_lanes(backend, spec.device_slots))


def check_heads(context: AttentionContext, num_heads: int, spec: LatentSpec, dtype: Any, kv_dtype: Any) -> None:
    assert spec.latent_dim is not None, "nothing attends to this cache"
    context, has_scales = context.of_cache(spec.context_shards), spec.dtype is not None
    sizes = spec.latent_dim, spec.width, spec.device_slots
    check_latent_attention(context, num_heads, *sizes, dtype, spec.dtype or kv_dtype, has_scales)


def tensor_of_rank(
    context: AttentionContext, spec: LatentSpec, num_blocks: int, dtype: Any, num_rows: int, num_layers: int
) -> Any:
    """Latents, to which attention has scales in 8 bits; an array of vectors that it does not read."""

    def struct(shape: tuple[int, ...], dtype: Any, axis: int) -> jax.ShapeDtypeStruct:
        place = NamedSharding(context.cache_mesh, latents_spec(context, axis))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    width = spec.stored_width or spec.width
    array = struct((num_blocks, spec.block_size, width), spec.dtype or dtype, 1)
    if not spec.is_attended:
        return array
    lanes = spec.context_shards * scale_lanes(context.backend, spec.device_slots)
    scales = () if spec.dtype is None else (struct((num_blocks, 2, lanes), jnp.float32, 2),)
    return KVTensor((array,), scales)


def step_batch(
    context: AttentionContext,
    spec: LatentSpec,
    parts: StepParts,
    tables_RM: Any,
    *,
    num_tokens: int,
    decodes_only: bool,
    shared_6R: jax.Array | None,
    visible_end_T: jax.Array | None,
) -> AttentionBatch:
    """Kernels for latents plan for themselves, so the metadata is that of whole blocks."""
    metadata = step_metadata(
        context.of_cache(1),
        parts.num_seqs[0],
        parts.query_start_loc_R1,
        parts.seq_lens_R,
        tables_RM,
        num_tokens=num_tokens,
        block_size=spec.block_size,
        window=None,
        decodes_only=decodes_only,
        shared_6R=shared_6R,
        visible_end_T=visible_end_T,
    )
    return AttentionBatch(metadata, context.of_cache(spec.context_shards), None)


def gather(tensor: Any, id_P: Any, spec: LatentSpec, backend: str) -> tuple[jax.Array, ...]:
    """Latents of 8 bits have the bytes of their two scales behind them."""
    (blocks,) = gather_blocks(tensor.arrays if spec.is_attended else (tensor,), id_P)
    if spec.dtype is not None:
        (scales_P2L,) = gather_blocks(tensor.scales, id_P)
        parts = [part[..., : spec.device_slots] for part in jnp.split(scales_P2L, spec.context_shards, axis=2)]
        scales_PS2 = jnp.swapaxes(jnp.concatenate(parts, axis=2), 1, 2)
        told = jax.lax.bitcast_convert_type(scales_PS2, blocks.dtype).reshape(*blocks.shape[:2], -1)
        blocks = jnp.concatenate([blocks, told], axis=2)
    return (blocks[:, None, :, None, :],)


def scatter(tensor: Any, id_P: Any, pages: tuple[Any, ...], spec: LatentSpec, backend: str) -> Any:
    values = pages[0][:, 0, :, 0, :]
    if not spec.is_attended:
        return scatter_blocks((tensor,), id_P, (values,))[0]
    if spec.dtype is None:
        return KVTensor(scatter_blocks(tensor.arrays, id_P, (values,)))
    width = tensor.arrays[0].shape[2]
    arrays = scatter_blocks(tensor.arrays, id_P, (values[..., :width],))
    told = values[..., width:].reshape(*values.shape[:2], 2, -1)
    scales_P2S = jnp.swapaxes(jax.lax.bitcast_convert_type(told, jnp.float32), 1, 2)
    more = ((0, 0), (0, 0), (0, tensor.scales[0].shape[2] // spec.context_shards - spec.device_slots))
    parts = [jnp.pad(part, more) for part in jnp.split(scales_P2S, spec.context_shards, axis=2)]
    scales = scatter_blocks(tensor.scales, id_P, (jnp.concatenate(parts, axis=2),))
    return KVTensor(arrays, scales)
