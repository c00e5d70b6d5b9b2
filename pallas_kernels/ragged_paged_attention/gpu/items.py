"""Work lists of the GPU kernels: which program attends from which query tokens to which part of whose context.

A row's new tokens are cut into query tiles, and the context of a tile into parts wherever a step has too few tiles
to fill the device. An item is one part of one tile. Lists have static lengths, bounded from the shapes of a step,
and programs beyond the last item stop at once. This module knows nothing of heads or of how an item is computed.

Letters beside the package's: I items, E tiles that are cut into parts.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ragged_paged_attention.shared_tiles import Runs
from pallas_kernels.shapes import ceil_div
from pallas_kernels.token_places import first_visible, token_places

# Columns of `Items.items_I` and of `Items.tiles_E`.
ROW, TOKEN, NUM_QUERIES, POSITION, LAST, BEGIN, END, PART, NUM_PARTS, FIRST_QUERY, BEGUN = range(11)
NUM_COLUMNS = 11

NOT_SPLIT = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Items:
    """The work of one kernel call, int32 with one column for each fact.

    items_I: [I, 11]. ROW; TOKEN, NUM_QUERIES, POSITION and LAST of its query tile: the first token, how many there are
    (0 beyond the last item) and the first and last one's place in the context; slots [BEGIN, END) of the context, which
    may be none, and all or some of those that any of its queries sees; PART, where the partial result goes, or
    `NOT_SPLIT` when this item is all of its tile; BEGUN, whether spans that rows share come before.
    tiles_E: [E, 11], the tiles that are in parts: TOKEN, NUM_QUERIES and BEGUN likewise, PART the first, NUM_PARTS.

    Of spans that rows share, TOKEN is a place in another order of queries (`shared_tiles.py`), those of an item are
    [FIRST_QUERY, NUM_QUERIES) of its tile, POSITION and LAST their least and greatest place in the context, and every
    item is a part.
    """

    items_I: jax.Array
    tiles_E: jax.Array


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How work is cut.

    queries: tokens in a query tile. slots: slots that a program attends to at a time. programs: as many items as
    fill the device; tiles are cut into parts until there are about as many, but no finer than `min_slots`.
    """

    queries: int
    slots: int
    programs: int
    min_slots: int

    def num_items(self, num_tiles: int) -> int:
        """The most items that `num_tiles` tiles can make."""
        return num_tiles + self.programs

    @property
    def num_parts(self) -> int:
        """The most items whose results are partial: of w units of work in parts of s, each tile makes below 2 w / s."""
        return 2 * self.programs


def make_items(
    metadata: Any,
    wanted_R: jax.Array,
    num_tiles: int,
    sizes: Sizes,
    window: int | None,
    own_R: jax.Array | None = None,
    visible_end_T: jax.Array | None = None,
) -> Items:
    """The items of the rows with `wanted_R`, whose query tiles are `num_tiles` at most; the largest come first.

    `own_R`: where that part of each row's context begins which is its own, in whole iterations; all of it if None.
    `visible_end_T`: one past the last position that each token sees; its own if None.
    """
    own_R = jnp.zeros_like(metadata.seq_lens_R) if own_R is None else own_R
    start_R, end_R = metadata.query_start_loc_R1[:-1], metadata.query_start_loc_R1[1:]
    num_queries_R = jnp.where(wanted_R, end_R - start_R, 0)
    tiles_R = ceil_div(num_queries_R, sizes.queries)
    ahead = 0
    if visible_end_T is not None:
        row_T, position_T, real_T = token_places(metadata.query_start_loc_R1, metadata.seq_lens_R, len(visible_end_T))
        ahead_T = jnp.where(real_T, visible_end_T - position_T - 1, 0)
        ahead = jnp.max(jnp.where(row_T == jnp.arange(len(start_R))[:, None], ahead_T, 0), axis=-1)
    units_R = _units(metadata.seq_lens_R - own_R, sizes, window, ahead)
    units_per_part = jnp.maximum(ceil_div(jnp.sum(tiles_R * units_R), sizes.programs), sizes.min_slots // sizes.slots)
    parts_R = ceil_div(units_R, units_per_part)
    first_part_R = _exclusive_cumsum(jnp.where(parts_R > 1, tiles_R * parts_R, 0))

    def facts(tile_end_R: jax.Array, index: jax.Array, per_tile_R: jax.Array) -> tuple[jax.Array, ...]:
        """(row, tile, part, queries) of entry `index` of a list in which each tile has `per_tile_R` entries."""
        row = jnp.minimum(jnp.sum(tile_end_R <= index[:, None], axis=-1), len(start_R) - 1)
        left = tile_end_R[row] - 1 - index  # later tiles see more: counted from the end, they come first
        tile, part = lax.div(left, per_tile_R[row]), lax.rem(left, per_tile_R[row])
        queries = jnp.minimum(num_queries_R[row] - tile * sizes.queries, sizes.queries)
        return row, tile, part, jnp.where(index < tile_end_R[-1], queries, 0)

    index_I = jnp.arange(sizes.num_items(num_tiles), dtype=jnp.int32)
    row_I, tile_I, part_I, queries_I = facts(jnp.cumsum(tiles_R * parts_R), index_I, jnp.maximum(parts_R, 1))
    token_I = start_R[row_I] + tile_I * sizes.queries
    position_I = (metadata.seq_lens_R - end_R)[row_I] + token_I
    lowest_I = jnp.maximum(first_visible(position_I, window), own_R[row_I])
    first_I = lax.div(lowest_I, jnp.int32(sizes.slots)) + part_I * units_per_part
    begin_I = first_I * sizes.slots
    end_I = begin_I + units_per_part * sizes.slots
    if visible_end_T is None:
        end_I = jnp.minimum(end_I, position_I + queries_I)
    else:
        end_I = jnp.minimum(end_I, _furthest(visible_end_T, token_I, queries_I, sizes.queries))
    index_in_row_I = tile_I * parts_R[row_I] + part_I
    part_I = jnp.where(parts_R[row_I] > 1, first_part_R[row_I] + index_in_row_I, NOT_SPLIT)
    items_I = _columns(
        {
            ROW: row_I,
            TOKEN: token_I,
            NUM_QUERIES: queries_I,
            POSITION: position_I,
            LAST: position_I + queries_I - 1,
            BEGIN: begin_I,
            END: end_I,
            PART: part_I,
            NUM_PARTS: parts_R[row_I],
            BEGUN: own_R[row_I],
        }
    )

    index_E = jnp.arange(min(sizes.programs, num_tiles), dtype=jnp.int32)
    split_tiles_R = jnp.where(parts_R > 1, tiles_R, 0)
    row_E, tile_E, _, queries_E = facts(jnp.cumsum(split_tiles_R), index_E, jnp.ones_like(tiles_R))
    token_E = start_R[row_E] + tile_E * sizes.queries
    part_E = first_part_R[row_E] + tile_E * parts_R[row_E]
    tiles_E = _columns(
        {
            ROW: row_E,
            TOKEN: token_E,
            NUM_QUERIES: queries_E,
            PART: part_E,
            NUM_PARTS: parts_R[row_E],
            BEGUN: own_R[row_E],
        }
    )
    return Items(items_I, tiles_E)


def make_span_items(runs: Runs, num_queries: jax.Array, num_tiles: int, sizes: Sizes) -> Items:
    """The items of runs of queries that share a span, in as many tiles as `num_queries` queries fill, `sizes.queries`
    each."""
    first_Z = lax.div(runs.begin_Z, jnp.int32(sizes.slots))
    units_Z = jnp.where(runs.used_Z, jnp.maximum(ceil_div(runs.end_Z, sizes.slots) - first_Z, 1), 0)
    units_per_part = jnp.maximum(ceil_div(jnp.sum(units_Z), sizes.programs), sizes.min_slots // sizes.slots)
    parts_Z = ceil_div(units_Z, units_per_part)
    end_Z = jnp.cumsum(parts_Z)
    index_I = jnp.arange(sizes.num_items(len(parts_Z)), dtype=jnp.int32)
    z_I = jnp.minimum(jnp.sum(end_Z <= index_I[:, None], axis=-1), len(parts_Z) - 1)
    begin_I = (first_Z[z_I] + (index_I - end_Z[z_I] + parts_Z[z_I]) * units_per_part) * sizes.slots
    items_I = _columns(
        {
            ROW: runs.row_Z[z_I],
            TOKEN: runs.tile_Z[z_I] * sizes.queries,
            FIRST_QUERY: runs.first_query_Z[z_I],
            NUM_QUERIES: jnp.where(index_I < end_Z[-1], runs.end_query_Z[z_I], 0),
            POSITION: runs.least_Z[z_I],
            LAST: runs.last_Z[z_I],
            BEGIN: begin_I,
            PART: index_I,
            END: jnp.minimum(begin_I + units_per_part * sizes.slots, runs.end_Z[z_I]),
        }
    )
    index_E = jnp.arange(num_tiles, dtype=jnp.int32)
    parts_E = jnp.sum(jnp.where(runs.tile_Z == index_E[:, None], parts_Z, 0), axis=-1)
    queries_E = jnp.minimum(num_queries - index_E * sizes.queries, sizes.queries)
    tiles_E = _columns(
        {
            TOKEN: index_E * sizes.queries,
            NUM_QUERIES: jnp.where(parts_E > 0, queries_E, 0),
            PART: _exclusive_cumsum(parts_E),
            NUM_PARTS: parts_E,
        }
    )
    return Items(items_I, tiles_E)


def _columns(facts: dict[int, jax.Array]) -> jax.Array:
    """Facts by the numbers of their columns, side by side; others are 0."""
    zeros = jnp.zeros_like(facts[TOKEN])
    return jnp.stack([facts.get(column, zeros) for column in range(NUM_COLUMNS)], axis=-1)


def _furthest(visible_end_T: jax.Array, token_I: jax.Array, queries_I: jax.Array, most: int) -> jax.Array:
    """The largest end of tokens [token, token + queries) of each item; 0 of none."""
    query_Q = jnp.arange(most)
    end_IQ = visible_end_T.at[token_I[:, None] + query_Q].get(mode="clip")
    return jnp.max(jnp.where(query_Q < queries_I[:, None], end_IQ, 0), axis=-1)


def _units(seq_lens_R: jax.Array, sizes: Sizes, window: int | None, ahead: Any) -> jax.Array:
    """How many runs of `sizes.slots` slots a query tile of each row sees at most; at least one. `ahead`: how many
    positions a query sees behind its own at most."""
    units_R = jnp.maximum(ceil_div(seq_lens_R, sizes.slots), 1)
    if window is None:
        return units_R
    longest = (
        window + sizes.queries - 1 + ahead
    )  # from the first slot that the first query sees to the last query's own
    return jnp.minimum(units_R, (longest - 1) // sizes.slots + 2)


def _exclusive_cumsum(x_R: jax.Array) -> jax.Array:
    return jnp.cumsum(x_R) - x_R
