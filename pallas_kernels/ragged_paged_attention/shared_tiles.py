"""Spans that rows share as lists of work: a run for each span and each tile of the queries of all rows that hold it.

Queries are put in another order, in which the rows of each span are side by side (`sharing.py`), and cut into tiles. A
kernel reads the span of a run once for all of its queries. Where others hold parts of all contexts, what is held of a
row's is such a piece, too, for queries in the order of tokens. This module knows neither heads nor kernels.

Letters beside the package's: L spans, as many as rows; Y places of queries in that order, padded to whole tiles of Q; J
tiles; Z runs.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention import sharing
from pallas_kernels.shapes import ceil_div
from pallas_kernels.token_places import first_visible, pick, token_places


class SharedQueries(NamedTuple):
    """token_Y: the token at each place, anything behind the last. position_Y: where it stands. before_R1: queries
    before those of the r-th row of the order, then their number. end_Y: one past the last position that each sees, if
    that is not its own."""

    token_Y: jax.Array
    position_Y: jax.Array
    before_R1: jax.Array
    end_Y: jax.Array | None = None


class Runs(NamedTuple):
    """Runs of queries of one tile that read one piece of a context, tile by tile; those in use are the first ones.

    tile_Z: the number of tiles where not in use. row_Z: a row whose block table leads to the piece. first_query_Z,
    end_query_Z: which queries of the tile read it. least_Z, last_Z: the least and the greatest of their positions.
    begin_Z, end_Z: slots of the piece that some of them may see.
    """

    used_Z: jax.Array
    tile_Z: jax.Array
    row_Z: jax.Array
    first_query_Z: jax.Array
    end_query_Z: jax.Array
    least_Z: jax.Array
    last_Z: jax.Array
    begin_Z: jax.Array
    end_Z: jax.Array


def shared_queries(
    shared_6R: jax.Array,
    query_start_loc_R1: jax.Array,
    seq_lens_R: jax.Array,
    num_tokens: int,
    query_tile: int,
    visible_end_T: jax.Array | None = None,
) -> SharedQueries:
    """The order of the queries of a step of `num_tokens`, padding included."""
    rows_R = shared_6R[sharing.ROWS]
    listed_R = jnp.arange(len(rows_R)) < jnp.max(shared_6R[sharing.LAST])
    start_R, end_R = (pick(x_R, rows_R) for x_R in (query_start_loc_R1[:-1], query_start_loc_R1[1:]))
    before_R1 = jnp.pad(jnp.cumsum(jnp.where(listed_R, end_R - start_R, 0)), (1, 0))
    place_Y = jnp.arange(ceil_div(num_tokens, query_tile) * query_tile, dtype=jnp.int32)
    sorted_Y = jnp.sum(before_R1[1:] <= place_Y[:, None], axis=-1)
    token_Y = pick(start_R - before_R1[:-1], sorted_Y) + place_Y
    _, position_T, _ = token_places(query_start_loc_R1, seq_lens_R, num_tokens)
    position_Y = position_T.at[token_Y].get(mode="clip")
    end_Y = None if visible_end_T is None else visible_end_T.at[token_Y].get(mode="clip")
    return SharedQueries(token_Y, position_Y, before_R1, end_Y)


def place_of_rows(shared_6R: jax.Array, before_R1: jax.Array) -> jax.Array:
    """The place of the first query of each row of the step; 0 of rows that share nothing."""
    rows_R, index_R = shared_6R[sharing.ROWS], jnp.arange(shared_6R.shape[1])
    listed_R = index_R < jnp.max(shared_6R[sharing.LAST])
    return jnp.where(listed_R & (rows_R == index_R[:, None]), before_R1[:-1], 0).sum(axis=-1)


def runs_of_rows(query_start_loc_R1: jax.Array, seen_T: jax.Array, query_tile: int) -> Runs:
    """A run for every tile of tokens, in their order, and every row with some of them, where each token sees the first
    slots of its row up to `seen_T`: none if that is -1."""
    start_R, end_R = query_start_loc_R1[:-1], query_start_loc_R1[1:]
    J, R = ceil_div(len(seen_T), query_tile), len(start_R)
    first_tile_R = start_R // query_tile
    num_R = jnp.where(end_R > start_R, (end_R - 1) // query_tile - first_tile_R + 1, 0)
    runs_up_to_R = jnp.cumsum(num_R)
    z_Z = jnp.arange(J + min(R, len(seen_T)), dtype=jnp.int32)
    row_Z = jnp.minimum(jnp.sum(runs_up_to_R <= z_Z[:, None], axis=-1), R - 1)
    used_Z = z_Z < runs_up_to_R[-1]
    tile_Z = jnp.where(used_Z, pick(first_tile_R - runs_up_to_R + num_R, row_Z) + z_Z, J)
    first_Z = jnp.maximum(pick(start_R, row_Z) - tile_Z * query_tile, 0)
    end_Z = jnp.minimum(pick(end_R, row_Z) - tile_Z * query_tile, query_tile)
    least_Z, last_Z = (seen_T.at[tile_Z * query_tile + nth_Z].get(mode="clip") for nth_Z in (first_Z, end_Z - 1))
    return Runs(used_Z, tile_Z, row_Z, first_Z, end_Z, least_Z, last_Z, jnp.zeros_like(last_Z), last_Z + 1)


def runs_of(shared_6R: jax.Array, queries: SharedQueries, query_tile: int, window: int | None, most_runs: int) -> Runs:
    """A run for every tile of queries and every span that some of them share."""
    Q, L, before_R1 = query_tile, shared_6R.shape[1], queries.before_R1
    position_JQ = queries.position_Y.reshape(-1, Q)
    J = len(position_JQ)
    first_L, last_L = (before_R1[shared_6R[line]] for line in (sharing.FIRST, sharing.LAST))
    tile_J1 = jnp.arange(J)[:, None]
    first_JL, end_JL = jnp.maximum(first_L - tile_J1 * Q, 0), jnp.minimum(last_L - tile_J1 * Q, Q)
    runs_up_to = jnp.cumsum((first_JL < end_JL).reshape(-1))
    z_Z = jnp.arange(most_runs)
    pair_Z = jnp.minimum(jnp.sum(runs_up_to <= z_Z[:, None], axis=-1), J * L - 1)
    used_Z, tile_Z, span_Z = z_Z < runs_up_to[-1], pair_Z // L, pair_Z % L

    first_Z, end_Z = first_JL.reshape(-1)[pair_Z], end_JL.reshape(-1)[pair_Z]
    query_Q = jnp.arange(Q)
    mine_ZQ = (query_Q >= first_Z[:, None]) & (query_Q < end_Z[:, None])
    least_Z = jnp.where(mine_ZQ, position_JQ[tile_Z], 2**30).min(axis=-1)
    last_Z = jnp.where(mine_ZQ, position_JQ[tile_Z], -1).max(axis=-1)
    seen_Z = None
    if queries.end_Y is not None:
        seen_Z = jnp.where(mine_ZQ, queries.end_Y.reshape(-1, Q)[tile_Z], 0).max(axis=-1)
    begin_Z, row_L = pick(shared_6R[sharing.BEGIN], span_Z), pick(shared_6R[sharing.ROWS], shared_6R[sharing.FIRST])
    return Runs(
        used_Z=used_Z,
        tile_Z=jnp.where(used_Z, tile_Z, J),
        row_Z=pick(row_L, span_Z),
        first_query_Z=first_Z,
        end_query_Z=end_Z,
        least_Z=least_Z,
        last_Z=last_Z,
        begin_Z=jnp.maximum(begin_Z, first_visible(least_Z, window)),
        end_Z=jnp.minimum(pick(shared_6R[sharing.END], span_Z), last_Z + 1 if seen_Z is None else seen_Z),
    )
