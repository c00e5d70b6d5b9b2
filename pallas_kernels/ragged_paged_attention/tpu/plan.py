"""The work of one step, for all kernels, as lists: computed once a step by XLA, shared by all layers of a KV group.

Segments (`segments.py`) are decoding requests for the decode kernel, and parts of prompts for the prefill kernel, in
the order of tokens; where rows share spans, they read what is the row's own. This module knows nothing of heads.

Letters beside the package's: Z segments, J grid blocks, W entries of a page of the block table.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.context_share import ContextShare
from pallas_kernels.ragged_paged_attention import sharing
from pallas_kernels.ragged_paged_attention.shared_tiles import Runs, runs_of_rows
from pallas_kernels.ragged_paged_attention.tpu.lanes import NUM_LANES, over_lanes, sublane_tile
from pallas_kernels.ragged_paged_attention.tpu.segments import (
    CHUNK_SLOTS,
    DECODE_ITEM_SLOTS,
    Segments,
    item_slots_of,
    segments_of,
)
from pallas_kernels.ragged_paged_attention.tpu.spans import Spans, make_spans, query_tile_of
from pallas_kernels.shapes import ceil_div
from pallas_kernels.token_places import first_visible, pick, token_places

DECODE_ROWS = 32
"""Requests in one grid block of the decode kernel: their queries and outputs are in VMEM together."""
TABLE_PAGE = NUM_LANES
"""Block table entries that are fetched at once."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Writes:
    """Which slots of the cache get new tokens, in groups of neighbouring slots of one block; unused entries at the end.

    count: scalar, groups in use. block_Z, slot_Z: where group z begins. first_Z, end_Z: which of its slots are
    written, counted from there. token_Z: the token of the first of these; the others follow.
    """

    count: jax.Array
    block_Z: jax.Array
    slot_Z: jax.Array
    first_Z: jax.Array
    end_Z: jax.Array
    token_Z: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """What all layers of a group share in one step.

    tables: block tables in pages, [R * pages per row, 1, W]. decode, prefill: the work of both kernels.
    decode_token_Z: the token of each decode segment. decode_segment_T: the decode segment of each token, or -1 where
    prefill computes the output. query_tile: queries in one grid block of the prefill kernel. pages_per_row: of the
    block table. writes: where new tokens go, by slots of a group: those of every type of cache, and whole blocks. XLA
    computes those that are used. spans: those that rows share; None where nobody looked for any. end_YL: one past the
    last position that each token sees, all lanes alike, padded to whole tiles; None where attention is causal.
    """

    tables: jax.Array
    decode: Segments
    prefill: Segments
    writes: dict[int, Writes]
    decode_token_Z: jax.Array
    decode_segment_T: jax.Array
    spans: Spans | None
    end_YL: jax.Array | None
    query_tile: int = dataclasses.field(metadata={"static": True})
    pages_per_row: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PartPlan:
    """The same where others hold the rest of every context: the prefill kernel attends from all queries, in the order
    of tokens, and `position_YL`, all lanes alike, is the last slot that each sees of what is held, or -1."""

    tables: jax.Array
    segments: Segments
    position_YL: jax.Array
    writes: dict[int, Writes]
    query_tile: int = dataclasses.field(metadata={"static": True})
    pages_per_row: int = dataclasses.field(metadata={"static": True})


def write_group_of(block_size: int, kv_dtype: Any) -> int:
    """Slots of a group that is written at once: a tile of the cache, if blocks consist of such tiles.

    Of a group in which not all is new the old slots are read too, so a larger one costs a decode step twice its size.
    """
    return math.gcd(block_size, sublane_tile(kv_dtype))


def _write_groups(block_size: int) -> list[int]:
    return sorted({block_size, *(write_group_of(block_size, dtype) for dtype in (jnp.int8, jnp.bfloat16, jnp.float32))})


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
) -> Plan | PartPlan:
    """The plan of one step; see `make_metadata` for the arguments. With a `share` each row reads by itself."""
    own_R = None if shared_6R is None or share is not None else shared_6R[sharing.OWN]
    start_R, end_R = query_start_loc_R1[:-1], query_start_loc_R1[1:]
    batch = Batch(start_R, end_R, seq_lens_R, block_tables_RM, num_tokens, window, own_R, visible_end_T)
    if share is not None:
        return _part_plan(batch, query_start_loc_R1, share)
    settings = {"num_tokens": num_tokens, "block_size": block_size, "window": window, "visible_end_T": visible_end_T}
    decode = _decode_segments(batch, item_slots_of(block_size, DECODE_ITEM_SLOTS))
    query_tile = query_tile_of(num_tokens)
    return Plan(
        tables=paged(block_tables_RM),
        decode=decode,
        prefill=_prefill_segments(batch, query_tile, item_slots_of(block_size, CHUNK_SLOTS)),
        writes={group: _writes(batch, block_size, group) for group in _write_groups(block_size)},
        decode_token_Z=pick(batch.start_R, decode.row_Z),
        decode_segment_T=_decode_segment_of(batch, jnp.arange(num_tokens)),
        spans=None if shared_6R is None else make_spans(shared_6R, query_start_loc_R1, seq_lens_R, **settings),
        end_YL=None if visible_end_T is None else over_lanes(jnp.pad(visible_end_T, (0, -num_tokens % query_tile))),
        query_tile=query_tile,
        pages_per_row=pages_of(block_tables_RM.shape[1]),
    )


def _part_plan(batch: "Batch", query_start_loc_R1: jax.Array, share: ContextShare) -> PartPlan:
    query_tile = query_tile_of(batch.num_tokens)
    _, position_T, _ = token_places(query_start_loc_R1, batch.seq_lens_R, batch.num_tokens)
    seen_T = share.num_held(position_T + 1) - 1
    runs = runs_of_rows(query_start_loc_R1, seen_T, query_tile)
    seen_Y = jnp.pad(seen_T, (0, -batch.num_tokens % query_tile))
    return PartPlan(
        tables=paged(batch.tables_RM),
        segments=segments_of(runs, len(seen_Y) // query_tile, item_slots_of(share.slots, CHUNK_SLOTS)),
        position_YL=over_lanes(seen_Y),
        writes={group: _writes(batch, share.slots, group, share) for group in _write_groups(share.slots)},
        query_tile=query_tile,
        pages_per_row=pages_of(batch.tables_RM.shape[1]),
    )


@dataclasses.dataclass(frozen=True)
class Batch:
    """The rows of a step; some have no new token, or none at all. own_R: where that part of each row's context begins
    which is its own; None where nobody looked for spans that rows share. visible_end_T: of tokens that see what stands
    behind them; None where attention is causal."""

    start_R: jax.Array
    end_R: jax.Array
    seq_lens_R: jax.Array
    tables_RM: jax.Array
    num_tokens: int
    window: int | None
    own_R: jax.Array | None
    visible_end_T: jax.Array | None

    @property
    def num_rows(self) -> int:
        return len(self.seq_lens_R)

    @property
    def decodes_up_to_R(self) -> jax.Array:
        """Rows with a single new token, up to and with row r."""
        return jnp.cumsum(self.end_R - self.start_R == 1)


def _decode_segment_of(batch: Batch, token_T: jax.Array) -> jax.Array:
    """The decode segment of each token, or -1."""
    row_T = jnp.sum(batch.end_R <= token_T[:, None], axis=-1)
    is_decode_T = pick(batch.end_R - batch.start_R, row_T) == 1
    return jnp.where(is_decode_T, pick(batch.decodes_up_to_R, row_T) - 1, -1)


def rows_per_block(num_rows: int) -> int:
    """Requests in one grid block of the decode kernel."""
    return min(DECODE_ROWS, num_rows)


def paged(tables_RM: jax.Array) -> jax.Array:
    R, M = tables_RM.shape
    pages = pages_of(M)
    return jnp.pad(tables_RM, ((0, 0), (0, pages * TABLE_PAGE - M))).reshape(R * pages, 1, TABLE_PAGE)


def pages_of(max_blocks: int) -> int:
    """Pages of the block table of one row."""
    return ceil_div(max_blocks, TABLE_PAGE)


def _decode_segments(batch: Batch, item_slots: int) -> Segments:
    """One segment for each row with a single new token, in the order of rows."""
    rows = rows_per_block(batch.num_rows)
    num_blocks = ceil_div(batch.num_rows, rows)
    z_Z = jnp.arange(num_blocks * rows, dtype=jnp.int32)
    row_Z = jnp.sum(batch.decodes_up_to_R <= z_Z[:, None], axis=-1)
    position_Z, ones_Z = pick(batch.seq_lens_R, row_Z) - 1, jnp.ones_like(z_Z)
    blocks = z_Z // rows, num_blocks
    return _own_segments(
        batch, item_slots, row_Z, row_Z < batch.num_rows, 0 * ones_Z, ones_Z, position_Z, position_Z, *blocks
    )


def _prefill_segments(batch: Batch, query_tile: int, item_slots: int) -> Segments:
    """One segment for each row with several new tokens, and query tile with some of them."""
    num_tiles = ceil_div(batch.num_tokens, query_tile)
    first_tile_R, last_tile_R = batch.start_R // query_tile, (batch.end_R - 1) // query_tile
    is_chunk_R = batch.end_R - batch.start_R > 1
    num_R = jnp.where(is_chunk_R, last_tile_R - first_tile_R + 1, 0)
    end_R = jnp.cumsum(num_R)
    z_Z = jnp.arange(num_tiles + min(batch.num_rows, batch.num_tokens // 2), dtype=jnp.int32)
    row_Z = jnp.minimum(jnp.sum(end_R <= z_Z[:, None], axis=-1), batch.num_rows - 1)
    used_Z = z_Z < end_R[-1]
    tile_Z = jnp.where(used_Z, pick(first_tile_R - end_R + num_R, row_Z) + z_Z, num_tiles)
    start_Z = tile_Z * query_tile
    first_Z = jnp.maximum(pick(batch.start_R, row_Z) - start_Z, 0)
    end_Z = jnp.minimum(pick(batch.end_R, row_Z) - start_Z, query_tile)
    offset_Z = pick(batch.seq_lens_R - batch.end_R, row_Z) + start_Z
    least_Z, last_Z, seen_Z = offset_Z + first_Z, offset_Z + end_Z - 1, None
    if batch.visible_end_T is not None:
        query_ZT = jnp.arange(batch.num_tokens) - start_Z[:, None]
        mine_ZT = (query_ZT >= first_Z[:, None]) & (query_ZT < end_Z[:, None])
        seen_Z = jnp.max(jnp.where(mine_ZT, batch.visible_end_T, 0), axis=-1)
    return _own_segments(batch, item_slots, row_Z, used_Z, first_Z, end_Z, least_Z, last_Z, tile_Z, num_tiles, seen_Z)


def _own_segments(
    batch: Batch,
    item_slots: int,
    row_Z: jax.Array,
    used_Z: jax.Array,
    first_query_Z: jax.Array,
    end_query_Z: jax.Array,
    least_Z: jax.Array,
    last_Z: jax.Array,
    block_Z: jax.Array,
    num_blocks: int,
    seen_Z: jax.Array | None = None,
) -> Segments:
    """Segments that read what is their row's own, up to `seen_Z`, or to the last of their queries."""
    begin_Z, begun_Z = first_visible(least_Z, batch.window), None
    if batch.own_R is not None:
        own_Z = pick(batch.own_R, row_Z)
        begin_Z, begun_Z = jnp.maximum(begin_Z, own_Z), own_Z > 0
    seen_Z = last_Z + 1 if seen_Z is None else seen_Z
    runs = Runs(used_Z, block_Z, row_Z, first_query_Z, end_query_Z, least_Z, last_Z, begin_Z, seen_Z)
    return segments_of(runs, num_blocks, item_slots, begun_Z)


def _writes(batch: Batch, block_size: int, group: int, share: ContextShare | None = None) -> Writes:
    """Groups of slots with new tokens, row by row; with a `share` those of them that are held."""
    num_new_R = batch.end_R - batch.start_R
    cached_R = batch.seq_lens_R - num_new_R
    first_group_R, last_group_R = cached_R // group, (batch.seq_lens_R - 1) // group
    num_R = jnp.where(num_new_R > 0, last_group_R - first_group_R + 1, 0)
    end_R = jnp.cumsum(num_R)
    most = min(batch.num_tokens, batch.num_tokens // group + 2 * batch.num_rows)
    z_Z = jnp.arange(most, dtype=jnp.int32)
    row_Z = jnp.minimum(jnp.sum(end_R <= z_Z[:, None], axis=-1), batch.num_rows - 1)
    position_Z = (pick(first_group_R - end_R + num_R, row_Z) + z_Z) * group
    cached_Z = pick(cached_R, row_Z)
    first_Z = jnp.maximum(cached_Z - position_Z, 0)
    count, block_Z = end_R[-1], position_Z // block_size
    if share is not None:
        block_Z, _, held_Z = share.place(position_Z)
        (order_Z,) = jnp.nonzero(held_Z & (z_Z < count), size=most, fill_value=0)
        count = jnp.sum(held_Z & (z_Z < count))
        lists = row_Z, position_Z, block_Z, cached_Z, first_Z
        row_Z, position_Z, block_Z, cached_Z, first_Z = (x_Z[order_Z] for x_Z in lists)
    arrays = (
        count,
        batch.tables_RM.at[row_Z, block_Z].get(mode="clip"),
        position_Z % block_size,
        first_Z,
        jnp.minimum(pick(batch.seq_lens_R, row_Z) - position_Z, group),
        pick(batch.start_R, row_Z) + position_Z + first_Z - cached_Z,
    )
    return Writes(*(x.astype(jnp.int32) for x in arrays))
