"""The work of one step, for both kernels, as lists: computed once a step by XLA, shared by all layers of a KV group.

A segment is a run of neighbouring queries of one request that lie in one grid block of a kernel: a decoding request
for the decode kernel, the part of a prompt in one query tile for the prefill kernel. A segment's items are pieces of
its context, `item_slots` slots each: what is fetched and computed at once. This module knows nothing of heads.

Letters beside the package's: Z segments, J grid blocks, P slots of one item, W entries of a page of the block table.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention.tpu.lanes import NUM_LANES, sublane_tile
from pallas_kernels.shapes import ceil_div

DECODE_ITEM_SLOTS = 256
CHUNK_SLOTS = 512
DECODE_ROWS = 32
"""Requests in one grid block of the decode kernel: their queries and outputs are in VMEM together."""
TABLE_PAGE = NUM_LANES
"""Block table entries that are fetched at once."""
SMALL_STEP = 256
SMALL_QUERY_TILE, LARGEST_QUERY_TILE = 32, 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segments:
    """Segments in the order in which they are worked on; int32 throughout, entries beyond the last one are unused.

    row_Z: whose block table. offset_Z: position of the query at index 0 of the grid block. first_query_Z,
    end_query_Z: which queries of the grid block belong to the segment. base_Z: piece of context minus number of
    item. item_end_Z: items up to and with this segment. stop_Z: items up to and with the segment's grid block.
    item_end_J: the same for each grid block.
    """

    row_Z: jax.Array
    offset_Z: jax.Array
    first_query_Z: jax.Array
    end_query_Z: jax.Array
    base_Z: jax.Array
    item_end_Z: jax.Array
    stop_Z: jax.Array
    item_end_J: jax.Array


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
    computes those that are used.
    """

    tables: jax.Array
    decode: Segments
    prefill: Segments
    writes: dict[int, Writes]
    decode_token_Z: jax.Array
    decode_segment_T: jax.Array
    query_tile: int = dataclasses.field(metadata={"static": True})
    pages_per_row: int = dataclasses.field(metadata={"static": True})


def query_tile_of(num_tokens: int) -> int:
    """Queries in one grid block of the prefill kernel: few in small steps, where most of a tile would be padding."""
    return SMALL_QUERY_TILE if num_tokens <= SMALL_STEP else LARGEST_QUERY_TILE


def item_slots_of(block_size: int, at_least: int) -> int:
    """Slots of an item: whole blocks, whole tiles of lanes, and about `at_least`."""
    unit = math.lcm(block_size, NUM_LANES)
    return unit * max(1, at_least // unit)


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
) -> Plan:
    """The plan of one step; see `make_metadata` for the arguments."""
    batch = Batch(query_start_loc_R1[:-1], query_start_loc_R1[1:], seq_lens_R, block_tables_RM, num_tokens, window)
    decode = _decode_segments(batch, item_slots_of(block_size, DECODE_ITEM_SLOTS))
    query_tile = query_tile_of(num_tokens)
    return Plan(
        tables=_paged(block_tables_RM),
        decode=decode,
        prefill=_prefill_segments(batch, query_tile, item_slots_of(block_size, CHUNK_SLOTS)),
        writes={group: _writes(batch, block_size, group) for group in _write_groups(block_size)},
        decode_token_Z=pick(batch.start_R, decode.row_Z),
        decode_segment_T=_decode_segment_of(batch, jnp.arange(num_tokens)),
        query_tile=query_tile,
        pages_per_row=pages_of(block_tables_RM.shape[1]),
    )


@dataclasses.dataclass(frozen=True)
class Batch:
    """The rows of a step; some have no new token, or none at all."""

    start_R: jax.Array
    end_R: jax.Array
    seq_lens_R: jax.Array
    tables_RM: jax.Array
    num_tokens: int
    window: int | None

    @property
    def num_rows(self) -> int:
        return len(self.seq_lens_R)

    @property
    def decodes_up_to_R(self) -> jax.Array:
        """Rows with a single new token, up to and with row r."""
        return jnp.cumsum(self.end_R - self.start_R == 1)


def pick(x_R: jax.Array, index: jax.Array) -> jax.Array:
    """x_R[index], 0 where the index is out of range. Comparisons, because small gathers are slow on TPUs."""
    return jnp.sum(jnp.where(index[..., None] == jnp.arange(len(x_R)), x_R, 0), axis=-1, dtype=x_R.dtype)


def _decode_segment_of(batch: Batch, token_T: jax.Array) -> jax.Array:
    """The decode segment of each token, or -1."""
    row_T = jnp.sum(batch.end_R <= token_T[:, None], axis=-1)
    is_decode_T = pick(batch.end_R - batch.start_R, row_T) == 1
    return jnp.where(is_decode_T, pick(batch.decodes_up_to_R, row_T) - 1, -1)


def rows_per_block(num_rows: int) -> int:
    """Requests in one grid block of the decode kernel."""
    return min(DECODE_ROWS, num_rows)


def _paged(tables_RM: jax.Array) -> jax.Array:
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
    ones_Z = jnp.ones_like(z_Z)
    return _segments(
        batch, item_slots, row_Z, row_Z < batch.num_rows,
        pick(batch.seq_lens_R, row_Z) - 1, 0 * ones_Z, ones_Z, z_Z // rows, num_blocks,
    )  # fmt: skip


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
    return _segments(
        batch, item_slots, row_Z, used_Z,
        pick(batch.seq_lens_R - batch.end_R, row_Z) + start_Z,
        jnp.maximum(pick(batch.start_R, row_Z) - start_Z, 0),
        jnp.minimum(pick(batch.end_R, row_Z) - start_Z, query_tile),
        tile_Z, num_tiles,
    )  # fmt: skip


def _segments(
    batch: Batch,
    item_slots: int,
    row_Z: jax.Array,
    used_Z: jax.Array,
    offset_Z: jax.Array,
    first_query_Z: jax.Array,
    end_query_Z: jax.Array,
    block_Z: jax.Array,
    num_blocks: int,
) -> Segments:
    """Count the items of segments, which are sorted by `block_Z`; only the first ones are in use."""
    first_position_Z = offset_Z + first_query_Z
    if batch.window is not None:
        lowest_Z = jnp.maximum(first_position_Z - batch.window + 1, 0)
    else:
        lowest_Z = jnp.zeros_like(first_position_Z)
    first_Z = lowest_Z // item_slots
    num_Z = jnp.where(used_Z, (offset_Z + end_query_Z - 1) // item_slots - first_Z + 1, 0)
    item_end_Z = jnp.cumsum(num_Z)
    in_block_JZ = block_Z <= jnp.arange(num_blocks)[:, None]
    item_end_J = jnp.sum(jnp.where(in_block_JZ, num_Z, 0), axis=1)
    stop_Z = pick(item_end_J, block_Z)
    arrays = (row_Z, offset_Z, first_query_Z, end_query_Z, first_Z - item_end_Z + num_Z, item_end_Z, stop_Z, item_end_J)
    return Segments(*(x.astype(jnp.int32) for x in arrays))


def _writes(batch: Batch, block_size: int, group: int) -> Writes:
    """Groups of slots with new tokens, row by row."""
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
    arrays = (
        end_R[-1],
        batch.tables_RM.at[row_Z, position_Z // block_size].get(mode="clip"),
        position_Z % block_size,
        first_Z,
        jnp.minimum(pick(batch.seq_lens_R, row_Z) - position_Z, group),
        pick(batch.start_R, row_Z) + position_Z + first_Z - cached_Z,
    )
    return Writes(*(x.astype(jnp.int32) for x in arrays))
