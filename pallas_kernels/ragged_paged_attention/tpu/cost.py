"""What one step moves and multiplies: at least, whatever the kernel, and in the kernels of this package.

Counted from shapes and from the very work list that the kernels follow; nothing is measured. Knows no device.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_kernels.ragged_paged_attention.sharing import NUM_LINES, fill_spans
from pallas_kernels.ragged_paged_attention.tpu import plan as work
from pallas_kernels.ragged_paged_attention.tpu import tiles
from pallas_kernels.ragged_paged_attention.tpu.lanes import NUM_LANES
from pallas_kernels.ragged_paged_attention.tpu.segments import (
    CHUNK_SLOTS,
    DECODE_ITEM_SLOTS,
    Segments,
    item_slots_of,
)
from pallas_kernels.ragged_paged_attention.tpu.spans import shared_work


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


def least_cost(rows: Rows, problem: tiles.Problem, window: int | None, shared: int = 0) -> Cost:
    """Every key and value that somebody sees is read once, new ones are written once, and no product is in vain.
    `shared` tokens, all within any window, are the same at the beginnings of all rows."""
    heads, H = problem.num_kv_heads, problem.head_dim
    read = sum(min(cached, (window or cached + 1) - 1) for cached, _ in rows) - (len(rows) - 1) * shared
    new = sum(new for _, new in rows)
    slot_bytes = 2 * heads * H * problem.kv_dtype.itemsize
    query_bytes = 2 * heads * problem.group_size * H * problem.q_dtype.itemsize
    return Cost((read + new) * slot_bytes + new * query_bytes, 4 * seen(rows, window) * heads * problem.group_size * H)


def seen(rows: Rows, window: int | None) -> int:
    """Pairs of a new token and one that it sees."""
    return sum(min(position + 1, window or position + 1) for c, n in rows for position in range(c, c + n))


def spans_of(rows: Rows, shared: int, block_size: int) -> np.ndarray:
    """What the host finds in a step whose rows all begin with the same `shared` tokens."""
    num_queries = np.array([new for _, new in rows])
    spans = np.zeros((NUM_LINES, len(rows)), np.int32)
    cost = shared_work(int(num_queries.sum()), block_size)
    if cost is not None:
        units = [0, *[shared // cost.unit] * (len(rows) - 1)]
        fill_spans(spans, range(len(rows)), units, num_queries, cost)
    return spans


def kernel_cost(
    rows: Rows, problem: tiles.Problem, window: int | None, shared_6R: np.ndarray | None = None
) -> dict[str, Cost]:
    """What the kernels "write", "spans", "decode" and "prefill" do with that step, of which `shared_6R` says what rows
    share. To "spans" belongs what takes its results to the other kernels."""
    plan = _plan(rows, problem.block_size, window, shared_6R)
    decode_slots = item_slots_of(problem.block_size, DECODE_ITEM_SLOTS)
    chunk_slots = item_slots_of(problem.block_size, CHUNK_SLOTS)
    tile_rows = problem.group_size * plan.query_tile
    spans = Cost(0, 0)
    if plan.spans is not None and int(plan.spans.segments.item_end_J[-1]):
        spans = _attention_cost(plan.spans.segments, problem, chunk_slots, tile_rows) + _begun_cost(plan, problem)
    return {
        "write": _write_cost(plan.writes[work.write_group_of(problem.block_size, problem.kv_dtype)], problem),
        "spans": spans,
        "decode": _attention_cost(plan.decode, problem, decode_slots, problem.decode_rows),
        "prefill": _attention_cost(plan.prefill, problem, chunk_slots, tile_rows),
    }


def _begun_cost(plan: work.Plan, problem: tiles.Problem) -> Cost:
    """Results are written in tiles, put in the order of tokens, then in that of decodes, in their tiles of query rows,
    and again in tiles if there are prompts; and read."""
    tiled, tokens, decodes = len(plan.spans.token_Y), len(plan.spans.place_T), len(plan.decode_token_Z)
    passes = 4 if int(plan.prefill.item_end_J[-1]) else 2
    heads = tiles.decode_heads(problem, work.rows_per_block(decodes)) or 1
    rows = problem.decode_rows // problem.heads_per_tile(heads)
    lines = (passes * tiled + tokens) * problem.group_size + 2 * decodes * rows
    return Cost(lines * problem.num_kv_heads * (problem.lanes.operand + NUM_LANES) * 4, 0)


def _plan(rows: Rows, block_size: int, window: int | None, shared_6R: np.ndarray | None) -> work.Plan:
    start_R1 = np.cumsum([0] + [new for _, new in rows])
    seq_lens_R = np.array([cached + new for cached, new in rows])
    tables_RM = np.zeros((len(rows), max(-(-seq_lens_R // block_size))))
    arrays = (jnp.asarray(x, jnp.int32) for x in (start_R1, seq_lens_R, tables_RM))
    settings = {"num_tokens": int(start_R1[-1]), "block_size": block_size, "window": window}
    return work.make_plan(*arrays, **settings, shared_6R=None if shared_6R is None else jnp.asarray(shared_6R))


def _write_cost(writes: work.Writes, problem: tiles.Problem) -> Cost:
    """A group is written, and read before unless all of it is new; new tokens come as float32."""
    count, group = int(writes.count), work.write_group_of(problem.block_size, problem.kv_dtype)
    num_Z = np.asarray(writes.end_Z - writes.first_Z)[:count]
    slots = group * (count + int((num_Z < group).sum()))
    slot = problem.num_kv_heads * problem.lanes.slot
    return Cost(slots * slot * problem.kv_dtype.itemsize + int(num_Z.sum()) * slot * 4, 0)


def _attention_cost(segments: Segments, problem: tiles.Problem, item_slots: int, rows: int) -> Cost:
    """`rows` query rows of each kv head take part in every item."""
    item_end_Z = np.asarray(segments.item_end_Z)
    num_Z = np.diff(item_end_Z, prepend=0)
    S, begin_Z, end_Z = problem.block_size, np.asarray(segments.begin_Z), np.asarray(segments.end_Z)
    blocks_Z = np.where((num_Z > 0) & (begin_Z < end_Z), (end_Z - 1) // S - begin_Z // S + 1, 0)
    block_bytes = problem.num_kv_heads * S * problem.lanes.slot * problem.kv_dtype.itemsize
    queries = np.asarray(segments.end_query_Z - segments.first_query_Z)[num_Z > 0].sum()
    query_heads = problem.num_kv_heads * problem.group_size
    query_bytes = 2 * queries * query_heads * problem.lanes.operand * problem.q_dtype.itemsize
    flops = 4 * num_Z.sum() * item_slots * rows * problem.lanes.operand * problem.num_kv_heads
    return Cost(int(blocks_Z.sum() * block_bytes + query_bytes), int(flops))
