"""What the reference backends compute once a step: where new tokens go, and their lists of work.

Two lists, which together hold each query's whole context once:
* tiles: up to `tile_queries` queries that read one piece of a context in chunks. The queries are those of a span that
  several rows share (`sharing.py`), or neighbours of one row with many new tokens. A shared one leaves a partial result
  for each query, and comes before all that continue it.
* items: one query, and `ITEM_SLOTS` slots of its context. These are of rows with few new tokens.

Which rows go which way follows from what both would cost. Lists are as long as the work that there is, since they are
walked in loops; here are only their ends. This module knows neither heads nor how work is done.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.context_share import ContextShare, places_here
from pallas_kernels.ragged_paged_attention import sharing
from pallas_kernels.ragged_paged_attention.sharing import SharedWork
from pallas_kernels.shapes import ceil_div
from pallas_kernels.token_places import NOWHERE, first_visible, token_places

ITEM_SLOTS = 64
TILE_QUERIES = 128
CHUNK_SLOTS = 256


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """What all layers of a group share in one step.

    slot_block_T, slot_offset_T: where each token's keys and values go. position_T: the last slot of its row that each
    token sees, which is its own; if others hold a part of the context (`ContextShare`), all slots here are those that
    are held, and -1 is none of them. tiles: see below. item_end_R: items up to and with row r; each query of the row
    has `items_per_query_R`, the first of which is item `first_item_R` of the context. num_shared: spans that rows
    share; None where nobody looked for any.
    """

    slot_block_T: jax.Array
    slot_offset_T: jax.Array
    position_T: jax.Array
    tiles: "Tiles"
    item_end_R: jax.Array
    items_per_query_R: jax.Array
    first_item_R: jax.Array
    num_shared: jax.Array | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tiles:
    """Sources of tiles: L spans that rows share, then rows by themselves.

    tile_end_L: tiles up to and with source l. first_L, last_L: its queries in `token_X`. row_L: a row whose table leads
    to slots [begin, end) of the context, which they read.
    """

    token_X: jax.Array
    tile_end_L: jax.Array
    first_L: jax.Array
    last_L: jax.Array
    row_L: jax.Array
    begin_L: jax.Array
    end_L: jax.Array


class Tile(NamedTuple):
    """Queries of one tile, `NOWHERE` behind the last, and what they read: slots [begin, end) of `row`'s context."""

    token_Q: jax.Array
    row: jax.Array
    begin: jax.Array
    end: jax.Array


def make_plan(
    query_start_loc_R1: jax.Array,
    seq_lens_R: jax.Array,
    block_tables_RM: jax.Array,
    *,
    num_tokens: int,
    block_size: int,
    window: int | None,
    shared_6R: jax.Array | None = None,
    share: ContextShare | None = None,
    visible_end_T: jax.Array | None = None,
) -> Plan:
    """The plan of one step; see `make_metadata` for the arguments. Items are of all that any query of a row sees, so
    `visible_end_T` changes none."""
    start_R, end_R = query_start_loc_R1[:-1], query_start_loc_R1[1:]
    token_T = jnp.arange(num_tokens, dtype=jnp.int32)
    row_T, position_T, real_T = token_places(query_start_loc_R1, seq_lens_R, num_tokens)
    index_T, offset_T, is_here_T, position_T = places_here(position_T, block_size, share)
    if share is not None:
        assert window is None, "windows are not known to holders of a part"
        seq_lens_R = share.num_held(seq_lens_R)
    held_T = real_T & is_here_T
    block_T = block_tables_RM.at[row_T, index_T].get(mode="clip")

    num_queries_R = end_R - start_R
    own_R = jnp.zeros_like(seq_lens_R) if shared_6R is None else shared_6R[sharing.OWN]
    first_R = own_R if share else jnp.maximum(first_visible(seq_lens_R - num_queries_R, window), own_R)
    last_R = seq_lens_R - 1
    item_slots, chunk_slots = item_and_chunk_slots(block_size)
    items_per_query_R = jnp.maximum(last_R // item_slots - first_R // item_slots + 1, 0)
    chunks_per_tile_R = last_R // chunk_slots - first_R // chunk_slots + 1
    num_items_R = num_queries_R * items_per_query_R
    num_tiles_R = ceil_div(num_queries_R, tile_queries(num_tokens))
    tiled_R = num_items_R > num_tiles_R * chunks_per_tile_R * items_per_chunk(num_tokens)
    rows = Tiles(
        token_X=token_T,
        tile_end_L=jnp.cumsum(jnp.where(tiled_R, num_tiles_R, 0)),
        first_L=start_R,
        last_L=end_R,
        row_L=jnp.arange(len(seq_lens_R), dtype=jnp.int32),
        begin_L=own_R,
        end_L=seq_lens_R,
    )
    spans = None if shared_6R is None else tiles_of_spans(shared_6R, query_start_loc_R1, token_T)
    return Plan(
        slot_block_T=jnp.where(held_T, block_T, NOWHERE),
        slot_offset_T=offset_T,
        position_T=position_T,
        tiles=rows if spans is None else _joined(spans, rows),
        item_end_R=jnp.cumsum(jnp.where(tiled_R, 0, num_items_R)),
        items_per_query_R=items_per_query_R,
        first_item_R=first_R // item_slots,
        num_shared=None if spans is None else spans.tile_end_L[-1],
    )


def tiles_of_spans(shared_6R: jax.Array, query_start_loc_R1: jax.Array, token_T: jax.Array) -> Tiles:
    """Tiles of the queries of all rows that share a span, put side by side."""
    rows_R = shared_6R[sharing.ROWS]
    start_R, end_R = query_start_loc_R1[rows_R], query_start_loc_R1[rows_R + 1]
    before_R1 = jnp.pad(jnp.cumsum(end_R - start_R), (1, 0))
    sorted_T = jnp.minimum(jnp.sum(before_R1[1:] <= token_T[:, None], axis=-1), len(rows_R) - 1)
    first_R, last_R = before_R1[shared_6R[sharing.FIRST]], before_R1[shared_6R[sharing.LAST]]
    return Tiles(
        token_X=(start_R - before_R1[:-1])[sorted_T] + token_T,
        tile_end_L=jnp.cumsum(ceil_div(last_R - first_R, tile_queries(len(token_T)))),
        first_L=first_R,
        last_L=last_R,
        row_L=rows_R[shared_6R[sharing.FIRST]],
        begin_L=shared_6R[sharing.BEGIN],
        end_L=shared_6R[sharing.END],
    )


def _joined(spans: Tiles, rows: Tiles) -> Tiles:
    """The tiles of spans, then those of rows."""
    later = dataclasses.replace(
        rows,
        tile_end_L=rows.tile_end_L + spans.tile_end_L[-1],
        first_L=rows.first_L + len(spans.token_X),
        last_L=rows.last_L + len(spans.token_X),
    )
    return jax.tree.map(lambda one, other: jnp.concatenate([one, other]), spans, later)


def find_tile(tiles: Tiles, index: jax.Array, num_queries: int) -> Tile:
    """The tile of this index."""
    source = jnp.sum(tiles.tile_end_L <= index)
    first, last = tiles.first_L[source], tiles.last_L[source]
    num_tiles = lax.div(last - first + num_queries - 1, num_queries)
    place_Q = first + (num_tiles - tiles.tile_end_L[source] + index) * num_queries + jnp.arange(num_queries)
    token_Q = jnp.where(place_Q < last, tiles.token_X.at[place_Q].get(mode="clip"), NOWHERE)
    return Tile(token_Q, tiles.row_L[source], tiles.begin_L[source], tiles.end_L[source])


def shared_work(num_tokens: int, block_size: int) -> SharedWork | None:
    """Of a step with so many tokens, padding included; None where they are too few for sharing ever to pay."""
    item_slots, chunk_slots = item_and_chunk_slots(block_size)
    break_even = ceil_div(items_per_chunk(num_tokens) * item_slots, chunk_slots)
    return SharedWork(item_slots, tile_queries(num_tokens), break_even) if num_tokens > break_even else None


def tile_queries(num_tokens: int) -> int:
    """Queries in a tile. Never one, since XLA:CPU takes a way of its own for products with a single row."""
    return min(TILE_QUERIES, max(num_tokens, 2))


def items_per_chunk(num_tokens: int) -> int:
    """This many items take as long as one chunk for a tile of queries."""
    return 8 + 40 * tile_queries(num_tokens) // TILE_QUERIES


def item_and_chunk_slots(block_size: int) -> tuple[int, int]:
    """Slots of an item, in whole blocks, and of a chunk, in whole items."""
    item_slots = whole_blocks(ITEM_SLOTS, block_size)
    return item_slots, whole_blocks(CHUNK_SLOTS, item_slots)


def whole_blocks(slots: int, block_size: int) -> int:
    """The multiple of `block_size` that is nearest to `slots` from below, but at least one block."""
    return max(1, slots // block_size) * block_size
