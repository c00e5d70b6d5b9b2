"""Spans that rows share, as segments of the prefill kernel: tiles of the queries of all rows that hold a span.

A tile (`shared_tiles.py`) keeps one softmax over all spans of each of its queries, which the kernels begin with that
read what is a row's own. This module knows nothing of heads. Letters beside the package's: Y places of queries.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention import sharing
from pallas_kernels.ragged_paged_attention.shared_tiles import place_of_rows, runs_of, shared_queries
from pallas_kernels.ragged_paged_attention.sharing import SharedWork, room_for_tiles
from pallas_kernels.ragged_paged_attention.tpu.lanes import NUM_LANES, over_lanes
from pallas_kernels.ragged_paged_attention.tpu.segments import (
    CHUNK_SLOTS,
    Segments,
    item_slots_of,
    segments_of,
)
from pallas_kernels.token_places import pick, token_places

SMALL_STEP = 256
SMALL_QUERY_TILE, LARGEST_QUERY_TILE = 32, 128
LEAST_TOKENS = 4
"""Steps of fewer tokens share nothing, so their programs have nothing for it."""
SLOTS_OF_A_STEP, SLOTS_OF_A_TOKEN = 4096, 64
"""What sharing costs a step whatever it saves, in slots that single queries read: launching one more kernel takes as
long as reading 16 MB, 4 KiB a slot, and what it leaves of each token is written and read again, 160 KiB a token."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Spans:
    """segments: see above. token_Y: the token at each place. position_YL: where it stands, all lanes alike. place_T:
    the place of each token. shares_T: whether its row shares anything. end_YL: one past the last position that each
    query sees, like position_YL, if that is not its own."""

    segments: Segments
    token_Y: jax.Array
    position_YL: jax.Array
    place_T: jax.Array
    shares_T: jax.Array
    end_YL: jax.Array | None


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
        most_tiles=room_for_tiles(num_tokens, query_tile),
    )


def make_spans(
    shared_6R: jax.Array,
    query_start_loc_R1: jax.Array,
    seq_lens_R: jax.Array,
    *,
    num_tokens: int,
    block_size: int,
    window: int | None,
    visible_end_T: jax.Array | None = None,
) -> Spans:
    """The spans of one step; see `make_metadata` for the arguments."""
    Q, settings = query_tile_of(num_tokens), (query_start_loc_R1, seq_lens_R, num_tokens)
    queries = shared_queries(shared_6R, *settings, Q, visible_end_T)
    row_T, _, real_T = token_places(*settings)
    first_place_R = place_of_rows(shared_6R, queries.before_R1)
    place_T = pick(first_place_R - query_start_loc_R1[:-1], row_T) + jnp.arange(num_tokens)
    runs = runs_of(shared_6R, queries, Q, window, room_for_tiles(num_tokens, Q))
    num_places = len(queries.token_Y)
    return Spans(
        segments=segments_of(runs, num_places // Q, item_slots_of(block_size, CHUNK_SLOTS)),
        token_Y=queries.token_Y,
        position_YL=over_lanes(queries.position_Y),
        place_T=place_T,
        shares_T=real_T & (pick(shared_6R[sharing.OWN], row_T) > 0),
        end_YL=None if queries.end_Y is None else over_lanes(queries.end_Y),
    )
