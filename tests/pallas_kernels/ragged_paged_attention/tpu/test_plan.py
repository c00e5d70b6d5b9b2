"""The lists of work cover every query, every visible piece of its context and every new slot, each once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention.cases import CASES
from pallas_kernels.ragged_paged_attention.tpu.plan import (
    CHUNK_SLOTS,
    DECODE_ITEM_SLOTS,
    TABLE_PAGE,
    item_slots_of,
    make_plan,
    pick,
    rows_per_block,
    write_group_of,
)
from pallas_kernels.testing import QUICK_COMPILE, make_step
from tests.pallas_kernels.ragged_paged_attention.one_step import marks

QUICK = (
    "decodes and prompts in any order",
    "block_size 48, which divides no tile",
    "window, no multiple of the block",
    "window of one token",
    "long tail",
    "chunk that continues a context, window",
    "rows with no new token",
    "padded far beyond the total",
    "nothing at all",
)
SOME_CASES = [pytest.param(case, id=case.name, marks=marks(case.name in QUICK)) for case in CASES]


@functools.cache
def plan_of(case):
    step = make_step(case, jnp.float32)
    settings = {"num_tokens": len(step.q_TNH), "block_size": case.block_size, "window": case.window}
    plan = jax.jit(functools.partial(make_plan, **settings), compiler_options=QUICK_COMPILE)
    return step, plan(step.query_start_loc_R1, step.seq_lens_R, step.block_tables_RM)


def pieces_of(segments, queries_per_block, item_slots):
    """(grid block, row, position of a query, first slot of a piece) of every query and item, in order."""
    found, item = [], 0
    arrays = (
        np.asarray(x)
        for x in (
            segments.row_Z,
            segments.least_Z - segments.first_query_Z,
            segments.first_query_Z,
            segments.end_query_Z,
            segments.base_Z,
            segments.item_end_Z,
            segments.stop_Z,
        )
    )
    item_end_J = np.asarray(segments.item_end_J)
    for row, offset, first, end, base, item_end, stop in zip(*arrays):
        while item < item_end:
            block = int(np.sum(item_end_J <= item))
            assert stop == item_end_J[block]
            assert 0 <= first < end <= queries_per_block
            found += [(block, row, offset + query, (item + base) * item_slots) for query in range(first, end)]
            item += 1
    assert item == (item_end_J[-1] if len(item_end_J) else 0)
    return found


def wanted_pieces(case, wanted_row, item_slots):
    """Every (row, position of a query, piece) with something that a query of the same run may see."""
    wanted = set()
    for row, (cached, new) in enumerate(case.rows):
        for position in range(cached, cached + new) if wanted_row(new) else ():
            first = 0 if case.window is None else max(0, position - case.window + 1)
            wanted |= {
                (row, position, piece * item_slots) for piece in range(first // item_slots, position // item_slots + 1)
            }
    return wanted


@pytest.mark.parametrize("case", SOME_CASES)
def test_every_decode_meets_the_pieces_that_it_may_see_and_no_others(case):
    _, plan = plan_of(case)
    slots = item_slots_of(case.block_size, DECODE_ITEM_SLOTS)
    found = pieces_of(plan.decode, 1, slots)
    rows = rows_per_block(max(1, len(case.rows) + case.empty_rows))
    decoding = [row for row, (_, new) in enumerate(case.rows) if new == 1]
    assert all(block == decoding.index(row) // rows for block, row, _, _ in found)
    assert len(found) == len(set(found))
    assert {piece[1:] for piece in found} == wanted_pieces(case, lambda new: new == 1, slots)


@pytest.mark.parametrize("case", SOME_CASES)
def test_every_query_of_a_chunk_meets_the_pieces_that_it_may_see_in_its_own_tile(case):
    step, plan = plan_of(case)
    slots = item_slots_of(case.block_size, CHUNK_SLOTS)
    found = pieces_of(plan.prefill, plan.query_tile, slots)
    assert len(found) == len(set(found))
    assert {piece[1:] for piece in found} >= wanted_pieces(case, lambda new: new > 1, slots)
    for block, row, position, piece in found:
        token = step.query_start_loc_R1[row] + position - case.rows[row][0]
        assert block == token // plan.query_tile
        assert piece <= step.seq_lens_R[row] - 1


@pytest.mark.parametrize(
    ("block_size", "groups"), [(8, (8, 8, 8)), (16, (8, 16, 16)), (48, (8, 16, 16)), (128, (8, 16, 32))]
)
def test_no_more_slots_are_written_at_once_than_a_tile_of_the_cache_has(block_size, groups):
    assert groups == tuple(write_group_of(block_size, dtype) for dtype in (jnp.float32, jnp.bfloat16, jnp.int8))


@pytest.mark.parametrize("case", SOME_CASES)
def test_every_new_token_is_written_once_to_its_slot(case):
    step, plan = plan_of(case)
    for group, writes in plan.writes.items():
        check_writes(case, step, group, writes)


def check_writes(case, step, group, writes):
    written = {}
    lists = [np.asarray(x) for x in (writes.block_Z, writes.slot_Z, writes.first_Z, writes.end_Z)]
    tokens = np.asarray(writes.token_Z)
    for z in range(int(writes.count)):
        block, slot, first, end = (x[z] for x in lists)
        assert slot % group == 0 and 0 <= first < end <= group
        for i in range(end - first):
            assert tokens[z] + i not in written
            written[tokens[z] + i] = (block, slot + first + i)
    for row, (cached, new) in enumerate(case.rows):
        for i in range(new):
            block = step.block_tables_RM[row, (cached + i) // case.block_size]
            assert written.pop(step.query_start_loc_R1[row] + i) == (block, (cached + i) % case.block_size)
    assert not written


def test_tokens_know_whether_the_decode_kernel_has_their_output():
    case = next(case for case in CASES if case.name == "rows with no new token")
    step, plan = plan_of(case)
    assert np.asarray(plan.decode_segment_T).tolist() == [0] + [-1] * (len(step.q_TNH) - 1)
    assert plan.decode_token_Z[0] == 0
    assert plan.decode.row_Z[0] == 1


def test_block_tables_are_cut_into_pages_of_one_row():
    tables_RM = jnp.arange(3 * 150).reshape(3, 150)
    plan = jax.jit(functools.partial(make_plan, num_tokens=8, block_size=16, window=None))(
        jnp.array([0, 1, 2, 3]), jnp.array([9, 9, 9]), tables_RM
    )
    assert plan.tables.shape == (6, 1, TABLE_PAGE)
    assert plan.pages_per_row == 2
    assert (plan.tables[3, 0, :22] == tables_RM[1, 128:]).all()


@pytest.mark.parametrize("block_size", range(8, 257, 8))
def test_an_item_is_whole_blocks_and_its_entries_lie_in_one_page(block_size):
    for at_least in (DECODE_ITEM_SLOTS, CHUNK_SLOTS):
        slots = item_slots_of(block_size, at_least)
        assert slots % block_size == 0 and slots % 128 == 0
        assert TABLE_PAGE % (slots // block_size) == 0


def test_picking_beyond_the_end_gives_zero():
    assert pick(jnp.array([5, 7]), jnp.array([1, 0, 2, -1])).tolist() == [7, 5, 0, 0]
