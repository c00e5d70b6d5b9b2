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

from pallas_kernels.context_share import ContextShare
from pallas_kernels.ragged_paged_attention import cpu, invariant, quantized, reference
from pallas_kernels.ragged_paged_attention.backend import imported, is_place
from pallas_kernels.ragged_paged_attention.chunks import rows_of_chunks
from pallas_kernels.ragged_paged_attention.deferred import DeferredTpuBackend
from pallas_kernels.ragged_paged_attention.gpu import GpuBackend
from pallas_kernels.ragged_paged_attention.layout import KVLayout
from pallas_kernels.ragged_paged_attention.rotation import Rotation
from pallas_kernels.ragged_paged_attention.sharing import SharedWork
from pallas_kernels.token_places import token_places

# "auto" takes the first that can run; what is interpreted comes last, since it is for tests.
_BACKENDS = {
    "tpu": DeferredTpuBackend(),
    "gpu": GpuBackend(interpret=False),
    "gpu-triton": GpuBackend(interpret=False, is_pallas=False),
    "cpu": cpu,
    "reference": reference,
    "invariant": invariant,
    "tpu-interpret": DeferredTpuBackend(interpret=True),
    "gpu-interpret": GpuBackend(interpret=True),
    "gpu-triton-interpret": GpuBackend(interpret=True, is_pallas=False),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVTensor:
    """Cached keys and values of one layer: the arrays of the backend's layout, blocks on the first axis of each.

    `scales`, float32, belong to a cache of 8 bits (`quantized.py`): none, or those of keys and of values for each kv
    head, [K] and [K], which a step only reads, or the layout's arrays with a scale for each token and head.
    """

    arrays: tuple[Any, ...]
    scales: tuple[Any, ...] = ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionMetadata:
    """Which tokens of one step belong to which request, and where those cached theirs; int32 throughout.

    num_seqs: scalar, rows in use. query_start_loc_R1: [R+1], tokens of row r are [start[r], start[r+1]); entries
    after `num_seqs` equal the number of tokens. seq_lens_R: [R], context length with this step's tokens, 0 for
    rows not in use. block_tables_RM: [R, M]; ids beyond the context or before the window may be anything.
    plan: what the backend computes from these once a step, for all layers that share the block tables.
    visible_end_T: [T], of each token one past the last position that it sees, at least one past its own and at most
    the length of its row; None, where attention is causal.
    decodes_only: no row has more than one token, so programs need nothing for those that have.
    """

    num_seqs: jax.Array
    query_start_loc_R1: jax.Array
    seq_lens_R: jax.Array
    block_tables_RM: jax.Array
    plan: Any
    visible_end_T: jax.Array | None = None
    decodes_only: bool = dataclasses.field(default=False, metadata={"static": True})


def backends(platform: str) -> dict[str, str | None]:
    """Every backend's name, with the reason why it cannot run on `platform` ("cpu", "gpu", "tpu") or None."""
    return {name: module.why_not(platform) for name, module in _BACKENDS.items()}


def choose_backend(name: str, platform: str) -> str:
    """The backend called `name`, or for "auto" the first one that runs on `platform`. A stranger's is called by its
    place, 'module:NAME'.

    Raises ValueError for an unknown name, and for a backend that `platform` cannot run.
    """
    refusals = {name: imported(name).why_not(platform)} if is_place(name) else backends(platform)
    if name == "auto":
        return next(known for known, refusal in refusals.items() if refusal is None)
    if name not in refusals:
        raise ValueError(f"unknown attention backend {name!r}; known are 'auto', {', '.join(map(repr, refusals))}.")
    if refusals[name] is not None:
        raise ValueError(f"attention backend {name!r} cannot run on {platform!r}: {refusals[name]}. Use 'auto'.")
    return name


def kv_layout(backend: str) -> KVLayout:
    """How `backend` lays out the cache; only this package and what moves blocks between caches need to know."""
    return _module(backend).LAYOUT


def kv_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, backend: str) -> tuple[int, ...]:
    """The shape of each array of a `KVTensor`."""
    return kv_layout(backend).shape(num_blocks, block_size, num_kv_heads, head_dim)


def kv_heads_axis(backend: str) -> int:
    """The axis of a `KVTensor`'s arrays along which key-value heads can be split over devices."""
    return kv_layout(backend).heads_axis


def shared_work(backend: str, num_tokens: int, block_size: int) -> SharedWork | None:
    """What spans cost that several rows of a step share, `num_tokens` with padding. None where each row's context is
    read by itself, whoever else holds the same blocks: in steps of few tokens, and by backends without another way."""
    return _module(backend).shared_work(num_tokens, block_size)


def num_kv_arrays(backend: str) -> int:
    """How many arrays a `KVTensor` of this backend holds."""
    return kv_layout(backend).num_arrays


def kv_zeros(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: Any,
    backend: str,
    kv_scales: str = "none",
) -> KVTensor:
    """An empty cache of one layer. `kv_scales` is "none", "head" or "token"; scales of heads are 1.

    Raises ValueError for scales that do not go with `dtype`.
    """
    reason = quantized.why_not(dtype, kv_scales)
    if reason is not None:
        raise ValueError(f"there is no cache with {reason}.")
    layout = kv_layout(backend)
    shape = layout.shape(num_blocks, block_size, num_kv_heads, head_dim)
    scale_shapes = {
        "none": (),
        "head": ((num_kv_heads,),) * 2,
        "token": layout.scale_shapes(num_blocks, block_size, num_kv_heads),
    }
    return KVTensor(
        tuple(jnp.zeros(shape, dtype) for _ in range(layout.num_arrays)),
        tuple(jnp.ones(shape, jnp.float32) for shape in scale_shapes[kv_scales]),
    )


def check(
    backend: str,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    q_dtype: Any,
    kv_dtype: Any,
    kv_scales: str = "none",
) -> None:
    """Raise ValueError, naming what is accepted, unless `backend` can attend with such heads, blocks and types."""
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads cannot share {num_kv_heads} key-value heads evenly. "
            "Give a number of query heads that is a multiple."
        )
    reason = quantized.why_not(kv_dtype, kv_scales) or _module(backend).cannot_take(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        q_dtype=jnp.dtype(q_dtype),
        kv_dtype=jnp.dtype(kv_dtype),
        kv_scales=kv_scales,
    )
    if reason is not None:
        raise ValueError(f"attention backend {backend!r} cannot take {reason}. Use 'reference'.")


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
    decodes_only: bool = False,
    shared_6R: jax.Array | None = None,
    chunk: int | None = None,
    share: ContextShare | None = None,
    visible_end_T: jax.Array | None = None,
) -> AttentionMetadata:
    """Metadata of one step for the layers that share `block_tables_RM` and `window`; can be traced.

    `num_tokens` is T, the padded number of tokens of the step. `shared_6R`: what `sharing.fill_spans` found, for a
    backend that has a `shared_work`. `chunk`, a multiple of `block_size` in place of a window: a query at position p
    sees the positions [p - p % chunk, p]. Rows are then chunks of rows (`chunks.py`), each of which is read by itself.
    `share`: the part of every context that lies here, where others hold the rest; there is no window then, and
    `block_size` and spans count slots that are held. `visible_end_T`: one past the last position that each token sees,
    for tokens that see some behind them, such as those of one picture; anything for padding. See `AttentionMetadata`
    for the others.

    Raises ValueError for `visible_end_T` with `chunk`, with `share`, or where there are decodes only.
    """
    assert query_start_loc_R1.shape == (seq_lens_R.shape[0] + 1,), (query_start_loc_R1.shape, seq_lens_R.shape)
    assert block_tables_RM.shape[0] == seq_lens_R.shape[0], (block_tables_RM.shape, seq_lens_R.shape)
    arrays = (num_seqs, query_start_loc_R1, seq_lens_R, block_tables_RM)
    num_seqs, query_start_loc_R1, seq_lens_R, block_tables_RM = (jnp.asarray(x, jnp.int32) for x in arrays)
    ahead: dict[str, Any] = {}
    if visible_end_T is not None:
        if chunk is not None or share is not None or decodes_only:
            raise ValueError(
                "attention beyond a token's own position goes neither with chunks of positions nor with contexts that "
                "several devices hold, and decodes have none; leave out visible_end_T."
            )
        visible_end_T = _within_rows(visible_end_T, query_start_loc_R1, seq_lens_R)
        ahead["visible_end_T"] = visible_end_T
    if chunk is not None:
        assert window is None, (window, chunk)
        num_seqs, query_start_loc_R1, seq_lens_R, block_tables_RM = rows_of_chunks(
            query_start_loc_R1,
            seq_lens_R,
            block_tables_RM,
            num_tokens=num_tokens,
            block_size=block_size,
            chunk=chunk,
            decodes_only=decodes_only,
        )
    spans: dict[str, Any] = {} if shared_6R is None or chunk is not None else {"shared_6R": shared_6R}
    if share is not None:
        assert backend != "invariant" and window is None and chunk is None, (backend, window, chunk)
        assert share.slots == block_size, (share, block_size)
        spans["share"] = share
    plan = _module(backend).make_plan(
        query_start_loc_R1,
        seq_lens_R,
        block_tables_RM,
        num_tokens=num_tokens,
        block_size=block_size,
        window=window,
        **spans,
        **ahead,
    )
    where = num_seqs, query_start_loc_R1, seq_lens_R, block_tables_RM
    return AttentionMetadata(*where, plan, visible_end_T, decodes_only)


def _within_rows(visible_end_T: jax.Array, query_start_loc_R1: jax.Array, seq_lens_R: jax.Array) -> jax.Array:
    """Ends that lie behind their tokens and not beyond their rows."""
    row_T, position_T, _ = token_places(query_start_loc_R1, seq_lens_R, len(visible_end_T))
    return jnp.clip(jnp.asarray(visible_end_T, jnp.int32), position_T + 1, seq_lens_R[row_T])


def rotates(backend: str, kv: KVTensor) -> bool:
    """Whether `backend` has a `rotate_and_write` for such a cache."""
    module = _module(backend)
    return isinstance(module, GpuBackend) and module.rotates(kv.arrays[0].dtype)


def rotate_and_write(
    heads: tuple[jax.Array, ...], rotation: Rotation, kv: KVTensor, metadata: AttentionMetadata, *, backend: str
) -> tuple[jax.Array, KVTensor]:
    """(q_TNH, normalised and rotated, zero for padding tokens; the cache with this step's keys and values): what comes
    before `ragged_paged_attention`, which is then given no keys and values.

    `heads`: queries [T, N, H], keys and values [T, K, H], or all as one array [T, K, G + 2, H], each key head's
    queries, itself and its values one behind the other. Only for a backend that `rotates`.
    """
    q_TNH, arrays = _module(backend).rotate_and_write(heads, rotation, kv.arrays, metadata)
    return q_TNH, dataclasses.replace(kv, arrays=arrays)


def ragged_paged_attention(
    q_TNH: jax.Array,
    k_TKH: jax.Array | None,
    v_TKH: jax.Array | None,
    kv: KVTensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks_N: jax.Array | None = None,
    backend: str,
    undivided: bool = False,
) -> tuple[jax.Array, KVTensor]:
    """Write this step's keys and values into the cache, then attend over it, causally unless `metadata` says more.
    Without keys and values they are in the cache already: see `rotate_and_write`, and layers that read what another
    layer has cached. Queries of padding tokens are zero then.

    A query at position p sees the positions (p - window, p] of its own request, itself included; all of [0, p]
    without a window; and those behind it up to the end that `metadata` may have for it. Scores are `scale * q.k`, then
    `soft_cap * tanh(score / soft_cap)` if given; `sinks_N` adds one logit per query head to the softmax's denominator.
    `window` must be the one `metadata` was made with.

    Returns out_TNH in q's dtype, zeros for padding tokens, and the cache with the new tokens. Donate `kv` to the
    enclosing jit and it is updated in place. Padding tokens write nowhere. `undivided`, without sinks: in place of
    out_TNH what `numerics.unpacked` takes, float32 [T, N, H + 2], to be merged with other parts of the same contexts.
    "invariant", whose numerics are its own, has neither.

    Values may be narrower than keys: v_TKV, and out_TNV. They are cached with zeros behind them, so heads of 192 and
    128 cost 1.2 times the bytes that they need, and products of values 1.5 times.

    Raises ValueError for heads, blocks and types that the backend cannot take, see `check`, for values that are wider
    than keys, and for narrower ones with `undivided`.
    """
    _, num_heads, head_dim = q_TNH.shape
    value_dim = head_dim if v_TKH is None else v_TKH.shape[-1]
    if value_dim != head_dim:
        v_TKH = _as_wide_as_keys(v_TKH, head_dim, undivided)
    check(
        backend,
        num_heads=num_heads,
        num_kv_heads=kv.arrays[0].shape[kv_layout(backend).heads_axis] if k_TKH is None else k_TKH.shape[1],
        head_dim=head_dim,
        block_size=kv.arrays[0].shape[kv_layout(backend).slots_axis],
        q_dtype=q_TNH.dtype,
        kv_dtype=kv.arrays[0].dtype,
        kv_scales=quantized.kind_of(kv.scales),
    )
    parts = {"undivided": True} if undivided else {}
    assert not undivided or (backend != "invariant" and sinks_N is None), (backend, sinks_N)
    out_TNH, arrays, scales = _module(backend).attention(
        q_TNH,
        k_TKH,
        v_TKH,
        kv.arrays,
        metadata,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks_N=sinks_N,
        scales=kv.scales,
        **parts,
    )
    return out_TNH if value_dim == head_dim else out_TNH[..., :value_dim], KVTensor(arrays, scales)


def _as_wide_as_keys(v_TKV: jax.Array, head_dim: int, undivided: bool) -> jax.Array:
    """Values with zeros behind them. Raises ValueError for wider ones, and for any with `undivided`."""
    value_dim = v_TKV.shape[-1]
    if value_dim > head_dim or undivided:
        beside = ", undivided" if undivided else ""
        raise ValueError(f"heads of keys have {head_dim} numbers and those of values {value_dim}{beside}; pad them.")
    return jnp.pad(v_TKV, ((0, 0), (0, 0), (0, head_dim - value_dim)))


def _module(backend: str) -> Any:
    if is_place(backend):
        return imported(backend)
    if backend not in _BACKENDS:
        raise ValueError(f"unknown attention backend {backend!r}; call choose_backend() first.")
    return _BACKENDS[backend]
