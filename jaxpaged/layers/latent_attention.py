"""Attention over latents in a model (MLA): the one `shard_map` around its kernel, and how its cache lies.

Query heads are split over all devices; latents and their cache are whole on every device, each of which writes the
same, unless a group of devices holds different tokens of each block (`context_parallel.py`). Which kernel runs follows
from the attention backend of the engine. Knows neither models nor steps.

Letters: B blocks, S slots of a block, C numbers of a latent, P numbers of a rope key, W of a slot.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpaged.layers.attention import AttentionBatch, AttentionContext, on_devices
from jaxpaged.layers.context_parallel import heads_of_group, merged, share_here
from jaxpaged.layers.dense_attention import DenseBatch, dense_attention
from jaxpaged.params.sharding import CONTEXT_AXIS, num_model_shards
from pallas_kernels import mla_paged_attention as mla
from pallas_kernels.ragged_paged_attention import KVTensor

KERNELS = {
    "reference": "reference",
    "cpu": "reference",
    "tpu": "tpu",
    "tpu-interpret": "tpu",
    "gpu": "gpu",
    "gpu-interpret": "gpu",
}
"""Attention backend -> the kernel for latents. The others have none."""

MOST_SUBLANES = 16
"""Heads on a TPU come in whole tiles: of 8 float32, of 16 bfloat16. Those of a device are filled up to this."""


def attend_latents(
    batch: AttentionBatch | DenseBatch,
    q_TNC: jax.Array,
    q_rope_TNP: jax.Array,
    latent_TC: jax.Array,
    rope_TP: jax.Array,
    cache: KVTensor,
    *,
    scale: float,
) -> tuple[jax.Array, KVTensor]:
    """Causal attention of T new tokens over all that their requests have cached, themselves included.

    Queries are those that meet latents (`mla_paged_attention`). Returns (weighed latents in out_TNC, the cache with
    the new tokens). Whole texts leave a cache as it is.
    """
    if isinstance(batch, DenseBatch):
        q_TNW, k_TW = jnp.concatenate([q_TNC, q_rope_TNP], axis=2), jnp.concatenate([latent_TC, rope_TP], axis=1)
        return dense_attention(batch, q_TNW, k_TW[:, None], latent_TC[:, None], scale=scale), cache
    context, metadata = batch.context, batch.metadata
    assert metadata.visible_end_T is None, "latents are attended to causally"
    kernel, num_tokens = KERNELS[context.backend], len(q_TNC)

    def attend_heads(q_TNC, q_rope_TNP, latent_TC, rope_TP, cache, *where):
        block_size = cache.arrays[0].shape[1]
        share = share_here(context.context_shards, block_size)
        places = mla.make_metadata(*where, num_tokens=num_tokens, block_size=block_size, share=share)
        if share is not None:
            q_TNW = heads_of_group(jnp.concatenate([q_TNC, q_rope_TNP], axis=2))
            q_TNC, q_rope_TNP = q_TNW[..., : q_TNC.shape[2]], q_TNW[..., q_TNC.shape[2] :]
        num_heads = q_TNC.shape[1]
        filled = ((0, 0), (0, heads_in_kernel(kernel, num_heads) - num_heads), (0, 0))
        out_TNC, cache = mla.mla_paged_attention(
            jnp.pad(q_TNC, filled),
            jnp.pad(q_rope_TNP, filled),
            latent_TC,
            rope_TP,
            cache,
            places,
            scale=scale,
            backend=kernel,
            interpret=interpretation(context.backend),
            undivided=share is not None,
        )
        out_TNC = out_TNC[:, :num_heads]
        return out_TNC if share is None else merged(out_TNC, None, q_TNC.dtype), cache

    heads, whole = PartitionSpec(None, context.by_head, None), PartitionSpec()
    of_cache = KVTensor((latents_spec(context),), (latents_spec(context, axis=2),) * len(cache.scales))
    where = metadata.query_start_loc_R1, metadata.seq_lens_R, metadata.block_tables_RM
    in_specs = (heads, heads, whole, whole, of_cache, *[whole] * len(where))
    sharded = on_devices(context, attend_heads, in_specs, (heads, of_cache))
    return sharded(q_TNC, q_rope_TNP, latent_TC, rope_TP, cache, *where)


def latents_spec(context: AttentionContext, axis: int = 1) -> PartitionSpec:
    """How an array of the cache of a layer lies on the devices, whose slots are along `axis`: 1, of scales 2."""
    return PartitionSpec() if context.context_shards == 1 else PartitionSpec(*[None] * axis, CONTEXT_AXIS)


def scale_lanes(backend: str, block_size: int) -> int:
    """Numbers that a block of a device has for each of two scales, those of its slots first."""
    return mla.scales_shape(1, block_size, KERNELS.get(backend, backend))[2]


def heads_in_kernel(kernel: str, num_heads: int) -> int:
    """How many heads of a device the kernel is given: zeros are added where it takes whole tiles only."""
    return -(-num_heads // MOST_SUBLANES) * MOST_SUBLANES if kernel == "tpu" else num_heads


def interpretation(backend: str) -> Any:
    """What Pallas is told of a backend that is simulated."""
    if backend != "tpu-interpret":
        return backend.endswith("-interpret")
    from jax.experimental.pallas import tpu as pltpu  # takes a quarter of a second

    return pltpu.InterpretParams(dma_execution_mode="eager")


def stored_width(backend: str, latent_dim: int, width: int) -> int:
    """Numbers of a slot in the cache: of a latent and a rope key together, and what a kernel's layout adds."""
    return mla.cache_shape(1, 1, latent_dim, width - latent_dim, KERNELS.get(backend, backend))[2]


def check_latent_attention(
    context: AttentionContext,
    num_heads: int,
    latent_dim: int,
    width: int,
    block_size: int,
    dtype: Any,
    kv_dtype: Any,
    has_scales: bool = False,
) -> None:
    """Raise ValueError unless the mesh splits the heads and there is a kernel that takes what each device gets."""
    backend, devices = context.backend, num_model_shards(context.mesh)
    if num_heads % devices:
        raise ValueError(f"{num_heads} query heads do not split over {devices} devices. Use fewer devices.")
    if backend not in KERNELS:
        raise ValueError(f"attention backend {backend!r} has no kernel for latents. Use {', '.join(KERNELS)}.")
    kernel = KERNELS[backend]
    devices //= context.context_shards
    heads = heads_in_kernel(kernel, num_heads // devices)
    array = jax.ShapeDtypeStruct((1, block_size, stored_width(backend, latent_dim, width)), kv_dtype)
    scales = jax.ShapeDtypeStruct((1, 2, scale_lanes(backend, block_size)), jnp.float32)
    operands = (
        jax.ShapeDtypeStruct((1, heads, latent_dim), dtype),
        jax.ShapeDtypeStruct((1, heads, width - latent_dim), dtype),
        KVTensor((array,), (scales,) * has_scales),
    )
    reason = mla.backends(kernel, *operands)[kernel]
    if reason is not None:
        raise ValueError(f"attention backend {backend!r} cannot take these latents: {reason}. Use 'reference'.")
