"""Ragged paged attention for TPU, in Pallas."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention.tpu.decode import DecodeShape, decode_attention
from pallas_kernels.ragged_paged_attention.tpu.fetch import FetchShape
from pallas_kernels.ragged_paged_attention.tpu.lanes import NUM_LANES, Lanes, round_up
from pallas_kernels.ragged_paged_attention.tpu.plan import (
    CHUNK_SLOTS,
    DECODE_ITEM_SLOTS,
    Plan,
    item_slots_of,
    make_plan,
    rows_per_block,
    write_group_of,
)
from pallas_kernels.ragged_paged_attention.tpu.prefill import PrefillShape, prefill_attention
from pallas_kernels.ragged_paged_attention.tpu.softmax import LOG2_E, ScoreRule
from pallas_kernels.ragged_paged_attention.tpu.write import write_tokens

NUM_KV_ARRAYS = 1
KV_HEADS_AXIS = 1
VMEM_LIMIT_BYTES = 48 * 2**20


def why_not(platform: str) -> str | None:
    return None if platform == "tpu" else "its kernels are compiled by Mosaic, for TPUs only"


def kv_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
    return (num_blocks, num_kv_heads, block_size, Lanes(head_dim).slot)


def attention(
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    kv: tuple[jax.Array],
    metadata: Any,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks_N: jax.Array | None,
    interpret: Any = False,
) -> tuple[jax.Array, tuple[jax.Array]]:
    """See `ragged_paged_attention`; `kv` is (kv_BKSW,)."""
    (T, N, H), K = q_TNH.shape, k_TKH.shape[1]
    lanes, plan = Lanes(H), metadata.plan
    block_size = kv[0].shape[2]
    new_TKW = jnp.concatenate([_padded(x.astype(jnp.float32), lanes.padded) for x in (k_TKH, v_TKH)], axis=-1)
    settings = {"vmem_limit_bytes": VMEM_LIMIT_BYTES, "interpret": interpret}
    kv_BKSW = write_tokens(new_TKW, kv[0], plan.writes, write_group_of(block_size), **settings)
    q_TKGD = _padded(q_TNH, lanes.operand).reshape(T, K, N // K, lanes.operand)
    rule = ScoreRule(scale, soft_cap)
    sinks_KG = None if sinks_N is None else LOG2_E * sinks_N.astype(jnp.float32).reshape(K, N // K)
    R = len(metadata.seq_lens_R)
    fetch = lambda items, slots: FetchShape(items, K, item_slots_of(block_size, slots), block_size, lanes.slot, window, plan.tables.shape[0] // R)

    # decode
    X = round_up(N // K, 8)
    q_ZKXD = jnp.pad(q_TKGD[plan.decode_token_Z], ((0, 0), (0, 0), (0, X - N // K), (0, 0)))
    sinks = None if sinks_KG is None else jnp.broadcast_to(jnp.pad(sinks_KG, ((0, 0), (0, X - N // K)))[..., None], (K, X, NUM_LANES))
    dshape = DecodeShape(fetch(max(1, min(8, 32 // K)), DECODE_ITEM_SLOTS), lanes, rule, rows_per_block(R))
    decoded_ZKXD = decode_attention(q_ZKXD, sinks, kv_BKSW, plan.tables, plan.decode, dshape, **settings)

    # prefill
    Q = plan.query_tile
    q_KGYD = jnp.pad(q_TKGD.transpose(1, 2, 0, 3), ((0, 0), (0, 0), (0, round_up(T, Q) - T), (0, 0)))
    sinks = None if sinks_KG is None else jnp.broadcast_to(sinks_KG[..., None], (K, N // K, NUM_LANES))
    pshape = PrefillShape(fetch(1, CHUNK_SLOTS), lanes, rule, Q)
    out_KGYD = prefill_attention(q_KGYD, sinks, kv_BKSW, plan.tables, plan.prefill, pshape, **settings)
    out_TKGD = out_KGYD[:, :, :T].transpose(2, 0, 1, 3)
    decoded_TKGD = decoded_ZKXD.at[plan.decode_segment_T].get(mode="clip")[:, :, : N // K]
    out_TKGD = jnp.where((plan.decode_segment_T >= 0)[:, None, None, None], decoded_TKGD, out_TKGD)
    return out_TKGD[..., lanes.outputs].reshape(T, N, H), (kv_BKSW,)


def _padded(x: jax.Array, lanes: int) -> jax.Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, lanes - x.shape[-1])])
