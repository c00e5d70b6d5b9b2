"""Which rows hold the same blocks, as they come, grow and go."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.worker import shared_blocks
from jaxpaged.worker.shared_blocks import SharedBlocks
from pallas_kernels.ragged_paged_attention.sharing import NUM_LINES, SharedWork

WORK = SharedWork(unit=8, tile=1000, break_even=1)
BLOCK_SIZE = 4


def filled(shared, rows, num_queries=None):
    shared_6R = np.zeros((NUM_LINES, len(rows)), np.int32)
    queries = np.ones(len(rows), np.int32) if num_queries is None else np.array(num_queries, np.int32)
    shared.fill(shared_6R, np.array(rows, np.int32), queries, WORK)
    return shared_6R


def fresh(tables):
    """The same rows, all of which come at once."""
    shared = SharedBlocks(BLOCK_SIZE, WORK.unit)
    for row, table in tables.items():
        shared.begin(row, BLOCK_SIZE * len(table))
        shared.append(row, table)
    return shared


moves = st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(1, 2), max_size=5), st.booleans()), max_size=25)


@given(moves, st.permutations(range(6)), st.integers(0, 6))
def test_rows_that_came_grew_and_went_share_what_they_would_if_they_had_just_come(moves, order, num_rows):
    shared, tables = SharedBlocks(BLOCK_SIZE, WORK.unit), {}
    for row, blocks, goes in moves:
        if goes and row in tables:
            shared.end(row)
            del tables[row]
        elif row in tables:
            shared.append(row, blocks)
            tables[row] = (tables[row] + blocks)[:6]
        else:
            shared.begin(row, 6 * BLOCK_SIZE)
            shared.append(row, blocks)
            tables[row] = blocks
        filled(shared, list(tables))
    rows = [row for row in order if row in tables][:num_rows]
    shared_6R = filled(shared, rows)
    of_these = fresh({row: tables[row] for row in rows})
    own = lambda array_6R: dict(zip(rows, array_6R[1].tolist()))
    assert own(shared_6R) == own(filled(of_these, rows))
    for first, last, begin, end in shared_6R[2:].T:
        held = {
            tuple(tables[rows[place]][begin // BLOCK_SIZE : end // BLOCK_SIZE]) for place in shared_6R[0, first:last]
        }
        assert len(held) == (last > first)


def test_blocks_behind_the_prompt_and_half_units_are_not_shared():
    shared = SharedBlocks(BLOCK_SIZE, WORK.unit)
    for row in (3, 7):
        shared.begin(row, 5 * BLOCK_SIZE)
        shared.append(row, [1, 2, 3, 4])
        shared.append(row, [5, 6, 7, 8])
    assert filled(shared, [7, 3])[1].tolist() == [16, 16]
    assert filled(shared, [3]).any() == 0, "the other one is not in the step"


def test_rows_whose_windows_began_elsewhere_do_not_share_what_lies_behind():
    null, blocks = [0, 0], [7, 8, 5, 6]
    shared = fresh({0: [1, 2, *blocks], 1: null + blocks, 2: null + blocks, 3: [1, 2, *blocks]})
    assert filled(shared, [0, 1])[1].tolist() == [0, 0], "null blocks are no block that the other one holds"
    shared_6R = filled(shared, [0, 1, 2, 3])
    assert shared_6R[1].tolist() == [24] * 4 and (shared_6R[3] > shared_6R[2]).sum() == 2, "two spans, two rows each"


def test_a_step_like_the_one_before_costs_nothing(monkeypatch):
    shared = fresh({0: [1, 2, 3, 4], 1: [1, 2, 5, 6]})
    first = filled(shared, [0, 1])
    monkeypatch.setattr(shared_blocks, "fill_spans", None)
    np.testing.assert_array_equal(filled(shared, [0, 1]), first)
    monkeypatch.undo()
    shared.end(1)
    assert not filled(shared, [0]).any()
    shared.begin(1, 16)
    shared.append(1, [1, 2, 3, 4])
    assert filled(shared, [0, 1])[1].tolist() == [16, 16], "preempted, and back with more in common"
