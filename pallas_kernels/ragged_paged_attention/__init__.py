"""Ragged paged attention: one call for prefill chunks and decodes of many requests over a paged KV cache.

Validates, picks a backend, and says why others were refused. What a backend computes, and how it lays out the
cache, is in its own module; `reference` is plain jax.numpy, the definition of correct, and the CPU backend.
This module knows nothing of models, of who owns which block, or of meshes.

Letters: T tokens in the step, R rows (requests), M blocks per row, B blocks in the pool, S slots per block,
N query heads, K key-value heads, G = N / K, H head dim.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention import invariant, reference

_BACKENDS = {"reference": reference, "invariant": invariant}  # in the order in which "auto" takes them


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVTensor:
    """Cached keys and values of one layer: the arrays of the backend's layout, blocks on the first axis of each."""

    arrays: tuple[Any, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionMetadata:
    """Which tokens of one step belong to which request, and where those cached theirs; int32 throughout.

    num_seqs: scalar, rows in use. query_start_loc_R1: [R+1], tokens of row r are [start[r], start[r+1]); entries
    after `num_seqs` equal the number of tokens. seq_lens_R: [R], context length with this step's tokens, 0 for
    rows not in use. block_tables_RM: [R, M]; ids beyond the context or before the window may be anything.
    plan: what the backend computes from these once a step, for all layers that share the block tables.
    """

    num_seqs: jax.Array
    query_start_loc_R1: jax.Array
    seq_lens_R: jax.Array
    block_tables_RM: jax.Array
    plan: Any


def backends(platform: str) -> dict[str, str | None]:
    """Every backend's name, with the reason why it cannot run on `platform` ("cpu", "gpu", "tpu") or None."""
    return {name: module.why_not(platform) for name, module in _BACKENDS.items()}


def choose_backend(name: str, platform: str) -> str:
    """The backend called `name`, or for "auto" the first one that runs on `platform`.

    Raises ValueError for an unknown name, and for a backend that `platform` cannot run.
    """
    refusals = backends(platform)
    if name == "auto":
        return next(known for known, refusal in refusals.items() if refusal is None)
    if name not in refusals:
        raise ValueError(f"unknown attention backend {name!r}; known are 'auto', {', '.join(map(repr, refusals))}.")
    if refusals[name] is not None:
        raise ValueError(f"attention backend {name!r} cannot run on {platform!r}: {refusals[name]}. Use 'auto'.")
    return name


def kv_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, backend: str) -> tuple[int, ...]:
    """The shape of each array of a `KVTensor`."""
    return _module(backend).kv_shape(num_blocks, block_size, num_kv_heads, head_dim)


def kv_heads_axis(backend: str) -> int:
    """The axis of a `KVTensor`'s arrays along which key-value heads can be split over devices."""
    return _module(backend).KV_HEADS_AXIS


def num_kv_arrays(backend: str) -> int:
    """How many arrays a `KVTensor` of this backend holds."""
    return _module(backend).NUM_KV_ARRAYS


def kv_zeros(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: Any, backend: str
) -> KVTensor:
    """An empty cache of one layer."""
    shape = kv_shape(num_blocks, block_size, num_kv_heads, head_dim, backend)
    return KVTensor(tuple(jnp.zeros(shape, dtype) for _ in range(num_kv_arrays(backend))))


def make_metadata(
    num_seqs: jax.Array,
    query_start_loc_R1: jax.Array,
    seq_lens_R: jax.Array,
    block_tables_RM: jax.Array,
    *,
    num_tokens: int,
    block_size: int,
    window: int | None,
    backend: str,
) -> AttentionMetadata:
    """Metadata of one step for the layers that share `block_tables_RM` and `window`; can be traced.

    `num_tokens` is T, the padded number of tokens of the step. See `AttentionMetadata` for the arrays.
    """
    assert query_start_loc_R1.shape == (seq_lens_R.shape[0] + 1,), (query_start_loc_R1.shape, seq_lens_R.shape)
    assert block_tables_RM.shape[0] == seq_lens_R.shape[0], (block_tables_RM.shape, seq_lens_R.shape)
    arrays = (num_seqs, query_start_loc_R1, seq_lens_R, block_tables_RM)
    num_seqs, query_start_loc_R1, seq_lens_R, block_tables_RM = (jnp.asarray(x, jnp.int32) for x in arrays)
    plan = _module(backend).make_plan(
        query_start_loc_R1, seq_lens_R, block_tables_RM, num_tokens=num_tokens, block_size=block_size, window=window
    )
    return AttentionMetadata(num_seqs, query_start_loc_R1, seq_lens_R, block_tables_RM, plan)


def ragged_paged_attention(
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    kv: KVTensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks_N: jax.Array | None = None,
    backend: str,
) -> tuple[jax.Array, KVTensor]:
    """Write this step's keys and values into the cache, then attend causally over it.

    A query at position p sees the positions (p - window, p] of its own request, itself included; all of [0, p]
    without a window. Scores are `scale * q.k`, then `soft_cap * tanh(score / soft_cap)` if given; `sinks_N` adds
    one logit per query head to the softmax's denominator. `window` must be the one `metadata` was made with.

    Returns out_TNH in q's dtype, zeros for padding tokens, and the cache with the new tokens. Donate `kv` to the
    enclosing jit and it is updated in place. Padding tokens write nowhere.
    """
    num_heads, num_kv_heads = q_TNH.shape[1], k_TKH.shape[1]
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads cannot share {num_kv_heads} key-value heads evenly.")
    out_TNH, arrays = _module(backend).attention(
        q_TNH, k_TKH, v_TKH, kv.arrays, metadata,
        scale=scale, window=window, soft_cap=soft_cap, sinks_N=sinks_N,
    )  # fmt: skip
    return out_TNH, KVTensor(arrays)


def _module(backend: str) -> Any:
    if backend not in _BACKENDS:
        raise ValueError(f"unknown attention backend {backend!r}; call choose_backend() first.")
    return _BACKENDS[backend]
