"""Multi-head latent attention over a paged cache, absorbed form: all heads share one latent and one rope key a token.

DeepSeek-V2 (arXiv 2405.04434), section 2.1: queries have been multiplied with the keys' up-projection, so they meet
the cached latents themselves, and what comes out is a weighted latent, which the caller multiplies with the values'
up-projection. A token costs `latent_dim + rope_dim` numbers, whatever the number of heads.

Validates, writes new tokens into the cache, picks a backend, and says why others were refused. Writing is XLA's
scatter everywhere, which moves new tokens only. `reference` is plain jax.numpy, the definition and the CPU backend; it
gathers a chunk of context into a copy before it multiplies, which `tpu` and `gpu` avoid. Not measured on accelerators.

This module knows nothing of models or of who owns which block. Letters: T tokens in the step, R rows, M blocks per
row, B blocks in the pool, S slots per block, N heads, C numbers of a latent, P of a rope key, W of a slot.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import backends as choosing
from pallas_kernels.context_share import ContextShare, places_here
from pallas_kernels.ragged_paged_attention import KVTensor, quantized
from pallas_kernels.shapes import ceil_div
from pallas_kernels.token_places import NOWHERE, token_places

_OP, _BACKENDS = "mla_paged_attention", ("reference", "tpu", "gpu")
_FLOATS = ("bfloat16", "float16", "float32")
_LANES = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MlaMetadata:
    """Which tokens of one step belong to which request, and where those cached theirs; int32 throughout.

    The first three are as given to `make_metadata`. row_T, position_T: each token's row and its place in the context,
    or among the slots that are held of it; -1 for padding tokens, and where none is. block_T, slot_T: where it is
    cached, nowhere for padding tokens, and where others hold it.
    """

    query_start_loc_R1: jax.Array
    seq_lens_R: jax.Array
    block_tables_RM: jax.Array
    row_T: jax.Array
    position_T: jax.Array
    block_T: jax.Array
    slot_T: jax.Array


def backends(platform: str, *operands: Any) -> dict[str, str | None]:
    """Every backend's name, with the reason why it cannot run on `platform`, or cannot take the operands, or None.

    Operands, if given, are q_TNC, q_rope_TNP and the cache of `mla_paged_attention`, or their shapes and types.
    """
    return choosing.refusals(_OP, _BACKENDS, platform, *operands)


def choose_backend(name: str, platform: str, *operands: Any) -> str:
    """The backend called `name`, or for "auto" the best one. Raises ValueError if it cannot run there."""
    return choosing.choose(_OP, _BACKENDS, name, platform, *operands)


def cache_shape(num_blocks: int, block_size: int, latent_dim: int, rope_dim: int, backend: str) -> tuple[int, int, int]:
    """[B, S, W]: a slot holds the latent and then the rope key; on a TPU zeros up to a multiple of 128."""
    width = latent_dim + rope_dim
    return num_blocks, block_size, ceil_div(width, _LANES) * _LANES if backend == "tpu" else width


def cache_zeros(
    num_blocks: int,
    block_size: int,
    latent_dim: int,
    rope_dim: int,
    dtype: Any,
    backend: str,
    kv_scales: str = "none",
) -> KVTensor:
    """An empty cache of one layer: one array of `cache_shape`, and its scales if it has 8 bits (`quantized.py`).

    `kv_scales`: "none"; "head", one scale of latents and one of rope keys, [1] and [1], which a step only reads, 1
    here; or "token", an array [B, 2, L] of both for each slot, the first ones of L. Raises ValueError for scales that
    do not go with `dtype`.
    """
    reason = quantized.why_not(dtype, kv_scales)
    if reason is not None:
        raise ValueError(f"there is no cache with {reason}.")
    shapes = {"none": (), "head": ((1,),) * 2, "token": (scales_shape(num_blocks, block_size, backend),)}
    cache_BSW = jnp.zeros(cache_shape(num_blocks, block_size, latent_dim, rope_dim, backend), dtype)
    return KVTensor((cache_BSW,), tuple(jnp.ones(shape, jnp.float32) for shape in shapes[kv_scales]))


def scales_shape(num_blocks: int, block_size: int, backend: str) -> tuple[int, int, int]:
    """[B, 2, L] of the scales of tokens: L is S, on a TPU a multiple of 128."""
    return num_blocks, 2, ceil_div(block_size, _LANES) * _LANES if backend == "tpu" else block_size


def make_metadata(
    query_start_loc_R1: jax.Array,
    seq_lens_R: jax.Array,
    block_tables_RM: jax.Array,
    *,
    num_tokens: int,
    block_size: int,
    share: ContextShare | None = None,
) -> MlaMetadata:
    """Metadata of one step for all layers; can be traced.

    query_start_loc_R1: tokens of row r are [start[r], start[r + 1]). seq_lens_R: context length with this step's
    tokens. block_tables_RM: ids beyond the context may be anything. `num_tokens` is T, padding included. `share`: the
    part of every context that lies here, with `block_size` slots of a block, where others hold the rest.
    """
    query_start_loc_R1, seq_lens_R, tables_RM = (
        jnp.asarray(x, jnp.int32) for x in (query_start_loc_R1, seq_lens_R, block_tables_RM)
    )
    row_T, position_T, real_T = token_places(query_start_loc_R1, seq_lens_R, num_tokens)
    row_T, position_T = row_T.astype(jnp.int32), jnp.where(real_T, position_T, -1)
    index_T, slot_T, is_here_T, position_T = places_here(position_T, block_size, share)
    block_T = tables_RM.at[row_T, index_T].get(mode="clip")
    held_T = real_T & is_here_T
    block_T = jnp.where(held_T, block_T, NOWHERE)
    return MlaMetadata(query_start_loc_R1, seq_lens_R, tables_RM, row_T, position_T, block_T, slot_T)


def mla_paged_attention(
    q_TNC: jax.Array,
    q_rope_TNP: jax.Array,
    latent_TC: jax.Array,
    rope_TP: jax.Array,
    cache: KVTensor,
    metadata: MlaMetadata,
    *,
    scale: float,
    backend: str,
    interpret: Any = False,
    undivided: bool = False,
) -> tuple[jax.Array, KVTensor]:
    """Write this step's latents and rope keys into the cache, then attend causally over it.

    A token at position p sees the positions [0, p] of its own request. Scores are
    `scale * (q . latent + q_rope . rope)`; values are the latents. What a cache of 8 bits holds of them is what counts.

    Returns out_TNC in q's type, zeros for padding tokens, and the cache with the new tokens; donate it. Padding tokens
    write nowhere. `undivided`: in place of out_TNC a float32 array [T, N, C + 2], weighted
    latents, the sum of weights and what was subtracted from scores, to be merged with other parts of the same contexts.
    `interpret` is handed to Pallas. Raises ValueError for operands that do not fit each other, or that the backend
    cannot take.
    """
    _check(q_TNC, q_rope_TNP, latent_TC, rope_TP, cache, backend)
    module = choosing.require(_OP, _BACKENDS, backend, q_TNC, q_rope_TNP, cache)
    cache = _with_new(latent_TC, rope_TP, cache, metadata)
    settings = {"scale": scale, "interpret": interpret, "undivided": undivided}
    return module.attend(q_TNC, q_rope_TNP, cache, metadata, **settings), cache


def _with_new(latent_TC: jax.Array, rope_TP: jax.Array, cache: KVTensor, metadata: MlaMetadata) -> KVTensor:
    """The cache with this step's tokens."""
    (cache_BSW,), scales, parts = cache.arrays, cache.scales, (latent_TC, rope_TP)
    if quantized.is_quantized(cache_BSW.dtype):
        of_parts = scales if len(scales) == 2 else scales * 2 or (None, None)
        stored = [quantized.quantize_new(x[:, None], scale, cache_BSW.dtype) for x, scale in zip(parts, of_parts)]
        parts = tuple(x_T1[:, 0] for x_T1, _ in stored)
        if quantized.kind_of(scales) == "token":
            scale_T2 = jnp.concatenate([scale_T1 for _, scale_T1 in stored], axis=1)
            scales = (_with_new_scales(scale_T2, scales[0], metadata),)
    padding = cache_BSW.shape[2] - latent_TC.shape[1] - rope_TP.shape[1]
    new_TW = jnp.pad(jnp.concatenate([x.astype(cache_BSW.dtype) for x in parts], axis=1), ((0, 0), (0, padding)))
    cache_BSW = cache_BSW.at[metadata.block_T, metadata.slot_T].set(new_TW, mode="drop")
    return KVTensor((cache_BSW,), scales)


def _with_new_scales(scale_T2: jax.Array, scales_B2L: jax.Array, metadata: MlaMetadata) -> jax.Array:
    """Each token writes the scales of its block as a whole, with those of the step's other tokens in it: a TPU would
    turn all scales around for a scatter of single slots."""
    block_T, slot_T, slot_L = metadata.block_T, metadata.slot_T, jnp.arange(scales_B2L.shape[2])
    token_TL = jnp.arange(len(block_T))[:, None] + slot_L - slot_T[:, None]
    same_TL = (token_TL >= 0) & (token_TL < len(block_T))
    same_TL &= (block_T.at[token_TL].get(mode="clip") == block_T[:, None]) & (
        slot_T.at[token_TL].get(mode="clip") == slot_L
    )
    new_T2L = scale_T2.at[token_TL].get(mode="clip").swapaxes(1, 2)
    replaced_T2L = jnp.where(same_TL[:, None], new_T2L, scales_B2L.at[block_T].get(mode="clip"))
    return scales_B2L.at[block_T].set(replaced_T2L, mode="drop")


def _check(q_TNC: Any, q_rope_TNP: Any, latent_TC: Any, rope_TP: Any, cache: KVTensor, backend: str) -> None:
    if q_TNC.ndim != 3 or str(q_TNC.dtype) not in _FLOATS:
        raise ValueError(f"q_TNC is {_spelled(q_TNC)}; accepted is {' or '.join(_FLOATS)}[T, N, C].")
    T, N, C = q_TNC.shape
    if q_rope_TNP.shape[:2] != (T, N) or q_rope_TNP.dtype != q_TNC.dtype or q_rope_TNP.ndim != 3:
        raise ValueError(f"q_rope_TNP is {_spelled(q_rope_TNP)}; accepted is {q_TNC.dtype}[{T}, {N}, P], as q_TNC.")
    for name, x, size in (("latent_TC", latent_TC, C), ("rope_TP", rope_TP, q_rope_TNP.shape[2])):
        if x.shape != (T, size):
            raise ValueError(f"{name} is {_spelled(x)}; accepted is [{T}, {size}], as for the queries.")
    (cache_BSW,), kind = cache.arrays, quantized.kind_of(cache.scales)
    width, types = cache_shape(1, 1, C, q_rope_TNP.shape[2], backend)[2], (*_FLOATS, *map(str, quantized.LARGEST))
    if cache_BSW.ndim != 3 or cache_BSW.shape[2] != width or str(cache_BSW.dtype) not in types:
        accepted = f"{' or '.join(types)}[B, S, {width}] for backend {backend!r}, see cache_shape()"
        raise ValueError(f"cache_BSW is {_spelled(cache_BSW)}; accepted is {accepted}.")
    reason = quantized.why_not(cache_BSW.dtype, kind)
    if reason is not None:
        raise ValueError(f"there is no cache with {reason}.")
    shapes = [scales_shape(*cache_BSW.shape[:2], backend)] if kind == "token" else [(1,)] * len(cache.scales)
    if [x.shape for x in cache.scales] != shapes:
        found = ", ".join(map(_spelled, cache.scales))
        raise ValueError(f"scales are {found}; accepted are float32 {shapes}, see cache_zeros().")


def _spelled(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"
