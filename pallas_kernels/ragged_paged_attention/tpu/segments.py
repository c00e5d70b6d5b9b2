"""What a kernel works through: runs of queries that read one piece of a context each, cut into items.

A segment is a run of neighbouring queries in one grid block of a kernel: a decoding request for the decode kernel, the
part of a prompt in one query tile for the prefill kernel; or, in a call of its own with the queries in another order,
those of one tile whose rows share a span (`spans.py`). A segment's items are pieces of its context, `item_slots` slots
each: what is fetched and computed at once. This module knows neither heads nor how a step becomes segments.

Letters beside the package's: Z segments, J grid blocks.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention.shared_tiles import Runs
from pallas_kernels.ragged_paged_attention.tpu.lanes import NUM_LANES
from pallas_kernels.token_places import pick

DECODE_ITEM_SLOTS = 256
CHUNK_SLOTS = 512


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segments:
    """Segments in the order in which they are worked on; int32 throughout, entries beyond the last one are unused.

    row_Z: whose block table. first_query_Z, end_query_Z: which queries of the grid block belong to the segment.
    least_Z, last_Z: the least and the greatest of their positions. begin_Z, end_Z: slots that some of them may see.
    base_Z: piece of context minus number of item. item_end_Z: items up to and with this segment. stop_Z: items up to
    and with the segment's grid block. item_end_J: the same for each grid block. begun_Z, begun_J: whether spans that
    rows share come before the segment, and before any of the grid block; None where nobody looked for spans.
    """

    row_Z: jax.Array
    first_query_Z: jax.Array
    end_query_Z: jax.Array
    least_Z: jax.Array
    last_Z: jax.Array
    begin_Z: jax.Array
    end_Z: jax.Array
    base_Z: jax.Array
    item_end_Z: jax.Array
    stop_Z: jax.Array
    item_end_J: jax.Array
    begun_Z: jax.Array | None = None
    begun_J: jax.Array | None = None


def segments_of(runs: Runs, num_blocks: int, item_slots: int, begun_Z: jax.Array | None = None) -> Segments:
    """Count the items of runs, whose tiles are grid blocks; one that sees nothing has an item all the same."""
    first_Z = runs.begin_Z // item_slots
    num_Z = jnp.where(runs.used_Z, jnp.maximum((runs.end_Z - 1) // item_slots - first_Z + 1, 1), 0)
    item_end_Z = jnp.cumsum(num_Z)
    in_block_JZ = runs.tile_Z <= jnp.arange(num_blocks)[:, None]
    item_end_J = jnp.sum(jnp.where(in_block_JZ, num_Z, 0), axis=1)
    arrays = (
        runs.row_Z,
        runs.first_query_Z,
        runs.end_query_Z,
        runs.least_Z,
        runs.last_Z,
        runs.begin_Z,
        runs.end_Z,
        first_Z - item_end_Z + num_Z,
        item_end_Z,
        pick(item_end_J, runs.tile_Z),
        item_end_J,
    )
    if begun_Z is not None:
        here_JZ = (runs.tile_Z == jnp.arange(num_blocks)[:, None]) & runs.used_Z
        arrays += begun_Z, jnp.max(jnp.where(here_JZ, begun_Z, 0), axis=1, initial=0)
    return Segments(*(x.astype(jnp.int32) for x in arrays))


def item_slots_of(block_size: int, at_least: int) -> int:
    """Slots of an item: whole blocks, whole tiles of lanes, and about `at_least`."""
    unit = math.lcm(block_size, NUM_LANES)
    return unit * max(1, at_least // unit)
