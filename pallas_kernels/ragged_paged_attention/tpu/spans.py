"""Spans that rows share, as segments of the prefill kernel: tiles of the queries of all rows that hold a span.

Queries are put in another order, in which the rows of each span are side by side (`sharing.py`), and cut into tiles. A
tile reads a span once for all its queries that share it, and keeps one softmax over all spans of each query, which the
kernels begin with that read what is a row's own. This module knows nothing of heads.

Letters beside the package's: L spans, as many as rows; Y places of queries in that order, padded to whole tiles of Q; J
tiles; Z pairs of a tile and a span.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention import sharing
from pallas_kernels.ragged_paged_attention.sharing import SharedWork
from pallas_kernels.ragged_paged_attention.tpu.lanes import NUM_LANES
from pallas_kernels.ragged_paged_attention.tpu.segments import (
    CHUNK_SLOTS,
    Runs,
    Segments,
    first_visible,
    item_slots_of,
    pick,
    segments_of,
)
from pallas_kernels.shapes import ceil_div
from pallas_kernels.token_places import token_places

SMALL_STEP = 256
SMALL_QUERY_TILE, LARGEST_QUERY_TILE = 32, 128
LEAST_TOKENS = 4
"""Steps of fewer tokens share nothing, so their programs have nothing for it."""
SLOTS_OF_A_STEP, SLOTS_OF_A_TOKEN = 4096, 64
"""What sharing costs a step whatever it saves, in slots that single queries read: launching one more kernel takes as
long as reading 16 MB, 4 KiB a slot, and what it leaves of each token is written and read again, 200 KiB a token."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Spans:
    """segments: see above. token_Y: the token at each place. position_YL: where it stands, all lanes alike. place_T:
    the place of each token. shares_T: whether its row shares anything."""

    segments: Segments
    token_Y: jax.Array
    position_YL: jax.Array
    place_T: jax.Array
    shares_T: jax.Array


def query_tile_of(num_tokens: int) -> int:
    """Queries in one grid block of the prefill kernel: few in small steps, where most of a tile would be padding."""
    return SMALL_QUERY_TILE if num_tokens <= SMALL_STEP else LARGEST_QUERY_TILE


def shared_work(num_tokens: int, block_size: int) -> SharedWork | None:
    """Of a step with so many tokens, padding included.

    A tile of 32 queries multiplies for less time than its blocks take to come, so it costs what a single query does.
    One of 128, with four query heads per kv head, takes one to three times as long, by the device.
    """
    if num_tokens < LEAST_TOKENS:
        return None
    query_tile = query_tile_of(num_tokens)
    return SharedWork(
        unit=item_slots_of(block_size, NUM_LANES),
        tile=query_tile,
        break_even=1 + query_tile // LARGEST_QUERY_TILE,
        overhead=SLOTS_OF_A_STEP + SLOTS_OF_A_TOKEN * num_tokens,
        most_tiles=_most_pairs(num_tokens),
    )


def _most_pairs(num_tokens: int) -> int:
    """Room for pairs of a tile and a span: four spans deep, and a short one for each of 256 rows."""
    return 4 * ceil_div(num_tokens, query_tile_of(num_tokens)) + min(num_tokens, 256)


def make_spans(
    shared_6R: jax.Array,
    query_start_loc_R1: jax.Array,
    seq_lens_R: jax.Array,
    *,
    num_tokens: int,
    block_size: int,
    window: int | None,
) -> Spans:
    """The spans of one step; see `make_metadata` for the arguments."""
    Q, row_index_R = query_tile_of(num_tokens), jnp.arange(len(seq_lens_R))
    listed_R = row_index_R < jnp.max(shared_6R[sharing.LAST])
    rows_R = shared_6R[sharing.ROWS]
    start_R, end_R = (pick(x_R, rows_R) for x_R in (query_start_loc_R1[:-1], query_start_loc_R1[1:]))
    before_R1 = jnp.pad(jnp.cumsum(jnp.where(listed_R, end_R - start_R, 0)), (1, 0))

    place_Y = jnp.arange(ceil_div(num_tokens, Q) * Q, dtype=jnp.int32)
    sorted_Y = jnp.sum(before_R1[1:] <= place_Y[:, None], axis=-1)
    token_Y = pick(start_R - before_R1[:-1], sorted_Y) + place_Y
    row_T, position_T, real_T = token_places(query_start_loc_R1, seq_lens_R, num_tokens)
    position_Y = position_T.at[token_Y].get(mode="clip")

    sorted_place_R = jnp.where(listed_R & (rows_R == row_index_R[:, None]), before_R1[:-1], 0).sum(axis=-1)
    place_T = pick(sorted_place_R - query_start_loc_R1[:-1], row_T) + jnp.arange(num_tokens)
    runs = _runs(shared_6R, before_R1, position_Y.reshape(-1, Q), window, _most_pairs(num_tokens))
    return Spans(
        segments=segments_of(runs, len(place_Y) // Q, item_slots_of(block_size, CHUNK_SLOTS)),
        token_Y=token_Y,
        position_YL=jnp.broadcast_to(position_Y[:, None], (len(place_Y), NUM_LANES)),
        place_T=place_T,
        shares_T=real_T & (pick(shared_6R[sharing.OWN], row_T) > 0),
    )


def _runs(
    shared_6R: jax.Array, before_R1: jax.Array, position_JQ: jax.Array, window: int | None, most_pairs: int
) -> Runs:
    """Every tile with every span that some of its queries share, tile by tile."""
    (J, Q), L = position_JQ.shape, shared_6R.shape[1]
    first_L, last_L = (before_R1[shared_6R[line]] for line in (sharing.FIRST, sharing.LAST))
    tile_J1 = jnp.arange(J)[:, None]
    first_JL, end_JL = jnp.maximum(first_L - tile_J1 * Q, 0), jnp.minimum(last_L - tile_J1 * Q, Q)
    pairs_up_to = jnp.cumsum((first_JL < end_JL).reshape(-1))
    z_Z = jnp.arange(most_pairs)
    pair_Z = jnp.minimum(jnp.sum(pairs_up_to <= z_Z[:, None], axis=-1), J * L - 1)
    used_Z, tile_Z, span_Z = z_Z < pairs_up_to[-1], pair_Z // L, pair_Z % L

    first_Z, end_Z = first_JL.reshape(-1)[pair_Z], end_JL.reshape(-1)[pair_Z]
    query_Q = jnp.arange(Q)
    mine_ZQ = (query_Q >= first_Z[:, None]) & (query_Q < end_Z[:, None])
    least_Z = jnp.where(mine_ZQ, position_JQ[tile_Z], 2**30).min(axis=-1)
    last_Z = jnp.where(mine_ZQ, position_JQ[tile_Z], -1).max(axis=-1)
    row_L = pick(shared_6R[sharing.ROWS], shared_6R[sharing.FIRST])
    return Runs(
        used_Z=used_Z,
        row_Z=pick(row_L, span_Z),
        first_query_Z=first_Z,
        end_query_Z=end_Z,
        least_Z=least_Z,
        last_Z=last_Z,
        begin_Z=jnp.maximum(pick(shared_6R[sharing.BEGIN], span_Z), first_visible(least_Z, window)),
        end_Z=jnp.minimum(pick(shared_6R[sharing.END], span_Z), last_Z + 1),
        block_Z=jnp.where(used_Z, tile_Z, J),
    )
