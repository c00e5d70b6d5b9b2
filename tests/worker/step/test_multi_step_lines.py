"""The arrays of a multi-step decode: those of its first step, and when its rows end."""

import numpy as np

from jaxpaged.messages import SchedulerOutput
from jaxpaged.sampling.rows import NUM_COLUMNS
from jaxpaged.worker.request_rows import NUM_STOP_IDS, RequestRows
from jaxpaged.worker.step.input_batch import StepReader, multi_step_lines, pack_step
from jaxpaged.worker.step.packed import step_layout
from tests.worker.step.test_input_batch import new_request

LAYOUT = step_layout(8, 4, [8])


def first_step(rows, ids, tokens, computed, updates=()):
    scheduled = SchedulerOutput(1, [], [], ids, tokens, computed, tokens, [None] * len(ids), num_steps=max(tokens))
    packed = pack_step(LAYOUT, StepReader(rows).read(scheduled), rows, list(updates))
    return LAYOUT.split(packed)


def test_the_first_step_has_one_token_of_each_row():
    rows = RequestRows(4, 1)
    for name, length in (("a", 5), ("b", 9)):
        rows.add(new_request(name, [3] * length, [[1]]))
    parts = first_step(rows, ["b", "a"], [6, 2], [9, 11], [(1, 0, 5)])
    assert parts.num_seqs[0] == 2
    assert parts.rows_R.tolist() == [rows.row_of["b"], rows.row_of["a"], 4, 4]
    assert parts.query_start_loc_R1.tolist() == [0, 1, 2, 2, 2]
    assert parts.seq_lens_R.tolist() == [-1, -1, 0, 0], "where they stand is known to the device"
    assert parts.token_ids_T.tolist() == [-1, -1, 0, 0, 0, 0, 0, 0]
    assert parts.sample_idxs_R.tolist() == [0, 1, 0, 0]
    assert (parts.table_place_U[0], parts.table_idx_U[0], parts.table_block_U[0]) == (1, 0, 5)
    assert (parts.table_place_U[1:] == rows.null_row).all()


def test_a_run_carries_limits_stop_ids_and_sampling_parameters_of_its_rows():
    rows = RequestRows(4, 1)
    first, second = new_request("a", [3] * 5, [[1]]), new_request("b", [3] * 9, [[2]])
    first.sampling_params.stop_token_ids = [7, 9]
    second.sampling_params.stop_token_ids = list(range(20, 40))
    for request in (first, second):
        rows.add(request)
    lines_SF = np.arange(8 * NUM_COLUMNS, dtype=np.float32).reshape(8, NUM_COLUMNS)
    lines_SC = multi_step_lines(lines_SF, [6, 2], rows.stop_ids_RJ[rows.rows_of(["b", "a"])])
    assert lines_SC.dtype == np.int32
    np.testing.assert_array_equal(lines_SC[:, :NUM_COLUMNS].copy().view(np.float32), lines_SF)
    assert lines_SC[:, NUM_COLUMNS].tolist() == [6, 2, 0, 0, 0, 0, 0, 0]
    stop_ids_SJ = lines_SC[:, NUM_COLUMNS + 1 :]
    assert stop_ids_SJ[0].tolist() == list(range(20, 20 + NUM_STOP_IDS)), "as many as fit"
    assert stop_ids_SJ[1].tolist() == [7, 9] + [-1] * (NUM_STOP_IDS - 2)
    assert (stop_ids_SJ[2:] == -1).all()


def test_the_last_token_of_a_prompt_may_begin_a_run():
    rows = RequestRows(4, 1)
    rows.add(new_request("a", [3, 4, 5], [[1]]))
    parts = first_step(rows, ["a"], [6], [2])
    assert parts.token_ids_T.tolist() == [5, 0, 0, 0, 0, 0, 0, 0]
    assert parts.seq_lens_R.tolist() == [3, 0, 0, 0], "the host knows where the token stands"


def test_a_row_that_is_given_to_another_request_forgets_its_stop_ids():
    rows = RequestRows(1, 1)
    request = new_request("a", [3], [[1]])
    request.sampling_params.stop_token_ids = [7, 8, 9]
    rows.add(request)
    rows.remove("a")
    row = rows.add(new_request("b", [3], [[1]]))
    assert (rows.stop_ids_RJ[row] == -1).all()
