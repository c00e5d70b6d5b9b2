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
from pallas_kernels.shapes import ceil_div
from pallas_kernels.token_places import token_places

_OP, _BACKENDS = "mla_paged_attention", ("reference", "tpu", "gpu")
_FLOATS = ("bfloat16", "float16", "float32")
_LANES = 128
_NOWHERE = 2**31 - 1  # an index that scatter drops


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

    Operands, if given, are q_TNC, q_rope_TNP and cache_BSW of `mla_paged_attention`, or their shapes and types.
    """
    return choosing.refusals(_OP, _BACKENDS, platform, *operands)


def choose_backend(name: str, platform: str, *operands: Any) -> str:
    """The backend called `name`, or for "auto" the best one. Raises ValueError if it cannot run there."""
    return choosing.choose(_OP, _BACKENDS, name, platform, *operands)


def cache_shape(num_blocks: int, block_size: int, latent_dim: int, rope_dim: int, backend: str) -> tuple[int, int, int]:
    """[B, S, W]: a slot holds the latent and then the rope key; on a TPU zeros up to a multiple of 128."""
    width = latent_dim + rope_dim
    return num_blocks, block_size, ceil_div(width, _LANES) * _LANES if backend == "tpu" else width


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
    block_T = jnp.where(held_T, block_T, _NOWHERE)
    return MlaMetadata(query_start_loc_R1, seq_lens_R, tables_RM, row_T, position_T, block_T, slot_T)


def mla_paged_attention(
    q_TNC: jax.Array,
    q_rope_TNP: jax.Array,
    latent_TC: jax.Array,
    rope_TP: jax.Array,
    cache_BSW: jax.Array,
    metadata: MlaMetadata,
    *,
    scale: float,
    backend: str,
    interpret: Any = False,
    undivided: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Write this step's latents and rope keys into the cache, then attend causally over it.

    A token at position p sees the positions [0, p] of its own request. Scores are
    `scale * (q . latent + q_rope . rope)`; values are the latents.

    Returns out_TNC in q's type, zeros for padding tokens, and the cache with the new tokens; donate it. Padding tokens
    write nowhere. `undivided`: in place of out_TNC a float32 array [T, N, C + 2], weighted
    latents, the sum of weights and what was subtracted from scores, to be merged with other parts of the same contexts.
    `interpret` is handed to Pallas. Raises ValueError for operands that do not fit each other, or that the backend
    cannot take.
    """
    _check(q_TNC, q_rope_TNP, latent_TC, rope_TP, cache_BSW, backend)
    module = choosing.require(_OP, _BACKENDS, backend, q_TNC, q_rope_TNP, cache_BSW)
    padding = cache_BSW.shape[2] - latent_TC.shape[1] - rope_TP.shape[1]
    new_TW = jnp.pad(jnp.concatenate([latent_TC, rope_TP], axis=1), ((0, 0), (0, padding)))
    cache_BSW = cache_BSW.at[metadata.block_T, metadata.slot_T].set(new_TW.astype(cache_BSW.dtype), mode="drop")
    settings = {"scale": scale, "interpret": interpret, "undivided": undivided}
    return module.attend(q_TNC, q_rope_TNP, cache_BSW, metadata, **settings), cache_BSW


def _check(q_TNC: Any, q_rope_TNP: Any, latent_TC: Any, rope_TP: Any, cache_BSW: Any, backend: str) -> None:
    if q_TNC.ndim != 3 or str(q_TNC.dtype) not in _FLOATS:
        raise ValueError(f"q_TNC is {_spelled(q_TNC)}; accepted is {' or '.join(_FLOATS)}[T, N, C].")
    T, N, C = q_TNC.shape
    if q_rope_TNP.shape[:2] != (T, N) or q_rope_TNP.dtype != q_TNC.dtype or q_rope_TNP.ndim != 3:
        raise ValueError(f"q_rope_TNP is {_spelled(q_rope_TNP)}; accepted is {q_TNC.dtype}[{T}, {N}, P], as q_TNC.")
    for name, x, size in (("latent_TC", latent_TC, C), ("rope_TP", rope_TP, q_rope_TNP.shape[2])):
        if x.shape != (T, size):
            raise ValueError(f"{name} is {_spelled(x)}; accepted is [{T}, {size}], as for the queries.")
    width = cache_shape(1, 1, C, q_rope_TNP.shape[2], backend)[2]
    if cache_BSW.ndim != 3 or cache_BSW.shape[2] != width or str(cache_BSW.dtype) not in _FLOATS:
        accepted = f"{' or '.join(_FLOATS)}[B, S, {width}] for backend {backend!r}, see cache_shape()"
        raise ValueError(f"cache_BSW is {_spelled(cache_BSW)}; accepted is {accepted}.")


def _spelled(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"
