"""What one step moves and multiplies: at least, whatever the kernel, and in the kernels of this package.

Counted from shapes and from the very work list that the kernels follow; nothing is measured. Knows no device.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_kernels.ragged_paged_attention.tpu import plan as work
from pallas_kernels.ragged_paged_attention.tpu import tiles


@dataclasses.dataclass(frozen=True)
class Cost:
    """`num_bytes` to and from HBM, `flops` in matrix products, for one layer."""

    num_bytes: int
    flops: int

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.num_bytes + other.num_bytes, self.flops + other.flops)

    def seconds(self, bandwidth: float, flops_rate: float) -> float:
        """The roofline: the slower of both, taken to overlap (Williams, Waterman and Patterson, 2009)."""
        return max(self.num_bytes / bandwidth, self.flops / flops_rate)


Rows = tuple[tuple[int, int], ...]
"""(cached, new) tokens of each request."""


def least_cost(rows: Rows, problem: tiles.Problem, window: int | None) -> Cost:
    """Every key and value that somebody sees is read once, new ones are written once, and no product is in vain."""
    heads, H = problem.num_kv_heads, problem.head_dim
    read = sum(min(cached, (window or cached + 1) - 1) for cached, _ in rows)
    new = sum(new for _, new in rows)
    slot_bytes = 2 * heads * H * problem.kv_dtype.itemsize
    query_bytes = 2 * heads * problem.group_size * H * problem.q_dtype.itemsize
    return Cost((read + new) * slot_bytes + new * query_bytes, 4 * seen(rows, window) * heads * problem.group_size * H)


def seen(rows: Rows, window: int | None) -> int:
    """Pairs of a new token and one that it sees."""
    return sum(min(position + 1, window or position + 1) for c, n in rows for position in range(c, c + n))


def kernel_cost(rows: Rows, problem: tiles.Problem, window: int | None) -> dict[str, Cost]:
    """What the kernels "write", "decode" and "prefill" do with that step."""
    plan = _plan(rows, problem.block_size, window)
    decode_slots = work.item_slots_of(problem.block_size, work.DECODE_ITEM_SLOTS)
    chunk_slots = work.item_slots_of(problem.block_size, work.CHUNK_SLOTS)
    tile_rows = problem.group_size * plan.query_tile
    return {
        "write": _write_cost(plan.writes[work.write_group_of(problem.block_size, problem.kv_dtype)], problem),
        "decode": _attention_cost(plan.decode, problem, window, decode_slots, problem.decode_rows),
        "prefill": _attention_cost(plan.prefill, problem, window, chunk_slots, tile_rows),
    }


def _plan(rows: Rows, block_size: int, window: int | None) -> work.Plan:
    start_R1 = np.cumsum([0] + [new for _, new in rows])
    seq_lens_R = np.array([cached + new for cached, new in rows])
    tables_RM = np.zeros((len(rows), max(-(-seq_lens_R // block_size))))
    arrays = (jnp.asarray(x, jnp.int32) for x in (start_R1, seq_lens_R, tables_RM))
    return work.make_plan(*arrays, num_tokens=int(start_R1[-1]), block_size=block_size, window=window)


def _write_cost(writes: work.Writes, problem: tiles.Problem) -> Cost:
    """A group is written, and read before unless all of it is new; new tokens come as float32."""
    count, group = int(writes.count), work.write_group_of(problem.block_size, problem.kv_dtype)
    num_Z = np.asarray(writes.end_Z - writes.first_Z)[:count]
    slots = group * (count + int((num_Z < group).sum()))
    slot = problem.num_kv_heads * problem.lanes.slot
    return Cost(slots * slot * problem.kv_dtype.itemsize + int(num_Z.sum()) * slot * 4, 0)


def _attention_cost(
    segments: work.Segments, problem: tiles.Problem, window: int | None, item_slots: int, rows: int
) -> Cost:
    """`rows` query rows of each kv head take part in every item."""
    item_end_Z = np.asarray(segments.item_end_Z)
    num_Z = np.diff(item_end_Z, prepend=0)
    first_Z = np.asarray(segments.offset_Z + segments.first_query_Z) + 1 - (window or 2**30)
    end_Z = np.asarray(segments.offset_Z + segments.end_query_Z)
    S = problem.block_size
    blocks_Z = np.where(num_Z > 0, (end_Z - 1) // S - np.maximum(first_Z, 0) // S + 1, 0)
    block_bytes = problem.num_kv_heads * S * problem.lanes.slot * problem.kv_dtype.itemsize
    queries = np.asarray(segments.end_query_Z - segments.first_query_Z)[num_Z > 0].sum()
    query_heads = problem.num_kv_heads * problem.group_size
    query_bytes = 2 * queries * query_heads * problem.lanes.operand * problem.q_dtype.itemsize
    flops = 4 * num_Z.sum() * item_slots * rows * problem.lanes.operand * problem.num_kv_heads
    return Cost(int(blocks_Z.sum() * block_bytes + query_bytes), int(flops))
