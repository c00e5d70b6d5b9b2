"""The packed array of a run of decode steps."""

import numpy as np

from jaxpaged.messages import SchedulerOutput
from jaxpaged.sampling.rows import NUM_COLUMNS
from jaxpaged.worker.decode_batch import decode_layout, pack_run
from jaxpaged.worker.input_batch import StepReader
from jaxpaged.worker.request_rows import NUM_STOP_IDS, RequestRows
from tests.worker.test_input_batch import new_request


def packed_parts(rows, layout, ids, tokens, computed, updates=()):
    scheduled = SchedulerOutput(1, [], [], ids, tokens, computed, [True] * len(ids), [None] * len(ids))
    lines_SF = np.arange(layout.num_lines * NUM_COLUMNS, dtype=np.float32).reshape(layout.num_lines, NUM_COLUMNS)
    packed = pack_run(layout, StepReader(rows).read(scheduled), rows, lines_SF, list(updates))
    assert packed.shape == (layout.size,)
    return layout.split(packed), lines_SF


def test_a_run_carries_limits_stop_ids_and_sampling_parameters_of_its_rows():
    rows = RequestRows(4, 1)
    first, second = new_request("a", [3] * 5, [[1]]), new_request("b", [3] * 9, [[2]])
    first.sampling_params.stop_token_ids = [7, 9]
    second.sampling_params.stop_token_ids = list(range(20, 40))
    for request in (first, second):
        rows.add(request)
    layout = decode_layout(8, 4, (8,), 6, 1, 8)
    parts, lines_SF = packed_parts(rows, layout, ["b", "a"], [6, 2], [9, 11], [(1, 0, 5)])
    assert parts.num_seqs[0] == 2
    assert parts.rows_R.tolist() == [rows.row_of["b"], rows.row_of["a"], 4, 4]
    assert parts.seq_lens_R.tolist() == [10, 12, 0, 0]
    assert parts.num_tokens_R.tolist() == [6, 2, 0, 0]
    assert parts.token_ids_R.tolist() == [-1] * 4
    assert parts.stop_ids_RJ[0].tolist() == list(range(20, 20 + NUM_STOP_IDS)), "as many as fit"
    assert parts.stop_ids_RJ[1].tolist() == [7, 9] + [-1] * (NUM_STOP_IDS - 2)
    np.testing.assert_array_equal(parts.sampling_SF.view(np.float32), lines_SF)
    assert (parts.table_place_U[0], parts.table_idx_U[0], parts.table_block_U[0]) == (1, 0, 5)
    assert (parts.table_place_U[1:] == rows.null_row).all()


def test_the_last_token_of_a_prompt_may_begin_a_run():
    rows = RequestRows(4, 1)
    rows.add(new_request("a", [3, 4, 5], [[1]]))
    parts, _ = packed_parts(rows, decode_layout(8, 4, (8,), 6, 1, 8), ["a"], [6], [2])
    assert parts.token_ids_R.tolist() == [5, -1, -1, -1]


def test_a_row_that_is_given_to_another_request_forgets_its_stop_ids():
    rows = RequestRows(1, 1)
    request = new_request("a", [3], [[1]])
    request.sampling_params.stop_token_ids = [7, 8, 9]
    rows.add(request)
    rows.remove("a")
    row = rows.add(new_request("b", [3], [[1]]))
    assert (rows.stop_ids_RJ[row] == -1).all()


def test_a_bucket_has_room_for_the_blocks_that_a_run_begins():
    layout = decode_layout(8, 4, (8,), max_steps=20, num_groups=2, block_size=8)
    assert layout.step.num_rows == 4
    assert layout.step.num_updates == 2 * 4 * 3
    assert decode_layout(512, 4, (8,), 20, 1, 8).num_lines == 8
