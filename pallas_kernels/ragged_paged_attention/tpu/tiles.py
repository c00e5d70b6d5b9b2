"""How much of a problem the kernels hold in VMEM at once. Knows shapes only."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention.tpu.lanes import NUM_LANES, Lanes, round_up
from pallas_kernels.ragged_paged_attention.tpu.segments import CHUNK_SLOTS, DECODE_ITEM_SLOTS, item_slots_of

VMEM_LIMIT_BYTES = 56 * 2**20
"""What a kernel may take. A TPU7x core has 64 MiB, v5e and v6e have 128."""
VMEM_GOAL_BYTES = 40 * 2**20
"""What the sizes below are chosen for: the compiler needs some more for temporaries."""
SUBLANES = 8
"""Query rows of a tile of registers, and of queries in memory."""
PARTS_AT_ONCE = 32
"""Items times heads in a step of the decode kernel: independent products, enough to hide the latency of each."""
MAX_DECODE_ITEMS = 8
MAX_TILE_ROWS = 512
"""Query rows that the prefill kernel multiplies with keys at once."""
MAX_PART_ROWS = 256
"""Query rows that it multiplies with values at once: the powers of some rows are taken beside the product of others."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call: K kv heads with G query heads each."""

    num_kv_heads: int
    group_size: int
    head_dim: int
    block_size: int
    q_dtype: Any
    kv_dtype: Any

    @property
    def lanes(self) -> Lanes:
        return Lanes(self.head_dim)

    @property
    def decode_rows(self) -> int:
        """Query rows that one kv head meets in the decode kernel: whole sublanes."""
        return round_up(self.group_size, SUBLANES)

    def heads_per_tile(self, heads: int) -> int:
        """kv heads whose queries fill the sublanes together, where the decode kernel holds so many heads: each meets
        the queries of all of them and keeps its own, so queries lie as tokens have them. 1: they are padded."""
        together = SUBLANES // self.group_size if SUBLANES % self.group_size == 0 else 1
        return together if heads % together == 0 else 1


def decode_items(problem: Problem, heads: int) -> int:
    """Items in a step of the decode kernel."""
    return max(1, min(MAX_DECODE_ITEMS, PARTS_AT_ONCE // heads))


def tile_groups(group_size: int, query_tile: int) -> int:
    """Query heads of one kv head that the prefill kernel multiplies together."""
    fitting = [g for g in range(1, group_size + 1) if group_size % g == 0 and g * query_tile <= MAX_TILE_ROWS]
    return max(fitting)


def part_rows(rows: int) -> int:
    """Query rows of one product with values, of so many that were multiplied with keys."""
    return next(rows // n for n in range(1, rows + 1) if rows % n == 0 and rows // n <= MAX_PART_ROWS)


def decode_heads(problem: Problem, rows: int) -> int | None:
    """kv heads that the decode kernel holds at once; None if not even one fits."""
    return _most_heads(problem.num_kv_heads, lambda heads: decode_bytes(problem, heads, rows))


def prefill_heads(problem: Problem, query_tile: int) -> int | None:
    """kv heads that the prefill kernel holds at once; None if not even one fits."""
    return _most_heads(problem.num_kv_heads, lambda heads: prefill_bytes(problem, heads, query_tile))


def decode_bytes(problem: Problem, heads: int, rows: int) -> int:
    """VMEM of the decode kernel: what it allocates, and about what the compiler adds."""
    D, X, P = problem.lanes.operand, problem.decode_rows, item_slots_of(problem.block_size, DECODE_ITEM_SLOTS)
    parts = decode_items(problem, heads) * heads
    blocks = 2 * parts * P * problem.lanes.slot * _size(problem.kv_dtype)
    query_rows = rows * heads // problem.heads_per_tile(heads) * X
    queries_and_outputs = 4 * query_rows * D * _size(problem.q_dtype)
    begun = 2 * query_rows * (D + NUM_LANES) * 4
    return blocks + queries_and_outputs + begun + (parts + heads) * X * (2 * D + 2 * NUM_LANES + 3 * P) * 4


def prefill_bytes(problem: Problem, heads: int, query_tile: int) -> int:
    """VMEM of the prefill kernel, likewise."""
    D, P = problem.lanes.operand, item_slots_of(problem.block_size, CHUNK_SLOTS)
    X = problem.group_size * query_tile
    blocks = 2 * heads * P * problem.lanes.slot * _size(problem.kv_dtype)
    queries_and_outputs = 4 * heads * X * D * _size(problem.q_dtype)
    state = heads * X * (D + 2 * NUM_LANES) * 4
    begun = 2 * heads * X * (D + NUM_LANES) * 4
    scores = 3 * tile_groups(problem.group_size, query_tile) * query_tile * P * 4
    return blocks + queries_and_outputs + begun + state + scores


def _most_heads(num_heads: int, bytes_of: Any) -> int | None:
    divisors = [heads for heads in range(1, num_heads + 1) if num_heads % heads == 0]
    return max((heads for heads in divisors if bytes_of(heads) <= VMEM_GOAL_BYTES), default=None)


def _size(dtype: Any) -> int:
    return jnp.dtype(dtype).itemsize
