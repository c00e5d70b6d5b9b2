"""The packed array of a step: what the host writes is what the program reads."""

import numpy as np

from jaxpaged.messages import NewRequestData, SchedulerOutput
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.worker.request_rows import RequestRows
from jaxpaged.worker.step.input_batch import StepReader, pack_step
from jaxpaged.worker.step.packed import step_layout


def new_request(request_id, token_ids, blocks, computed=0):
    return NewRequestData(request_id, token_ids, len(token_ids), computed, blocks, SamplingParams())


def scheduled(ids, tokens, computed, samples):
    return SchedulerOutput(1, [], [], ids, tokens, computed, samples, [None] * len(ids), sum(tokens))


def packed_parts(rows, layout, output, updates=()):
    packed = pack_step(layout, StepReader(rows).read(output), rows, list(updates))
    return layout.split(packed)


def test_a_mixed_step_uploads_prompt_tokens_and_leaves_sampled_ones_to_the_device():
    rows = RequestRows(max_num_seqs=4, num_groups=1)
    for request_id, prompt in (("a", [5, 6, 7, 8, 9]), ("b", [1, 2])):
        rows.add(new_request(request_id, prompt, ([],)))
    layout = step_layout(8, 4, [4])
    # "a" computes prompt tokens 1..3, "b" decodes the second token that it sampled
    parts = packed_parts(rows, layout, scheduled(["a", "b"], [3, 1], [1, 3], [False, True]))
    assert parts.num_seqs[0] == 2
    assert parts.rows_R.tolist() == [rows.row_of["a"], rows.row_of["b"], 4, 4]
    assert parts.query_start_loc_R1.tolist() == [0, 3, 4, 4, 4]
    assert parts.seq_lens_R.tolist() == [4, -1, 0, 0], "where the sampled one stands is known to the device"
    assert parts.token_ids_T.tolist() == [6, 7, 8, -1, 0, 0, 0, 0]
    assert parts.sample_idxs_R.tolist() == [3, 0, 0, 0]


def test_a_chunk_that_ends_in_a_sampled_token_takes_only_that_one_from_the_device():
    rows = RequestRows(max_num_seqs=2, num_groups=1)
    rows.add(new_request("a", [5, 6, 7], ([],)))
    parts = packed_parts(rows, step_layout(8, 2, [4]), scheduled(["a"], [3], [1], [True]))
    assert parts.token_ids_T.tolist()[:3] == [6, 7, -1]


def test_unused_updates_write_to_the_null_row_only():
    rows = RequestRows(max_num_seqs=2, num_groups=2)
    rows.add(new_request("a", [1], ([], [])))
    layout = step_layout(8, 2, [4, 4])
    parts = packed_parts(rows, layout, scheduled(["a"], [1], [0], [True]), [(3, 0, 7)])
    assert (parts.table_place_U[0], parts.table_idx_U[0], parts.table_block_U[0]) == (3, 0, 7)
    assert set(parts.table_place_U[1:].tolist()) == {rows.null_row}


def test_blocks_are_appended_to_the_tables_of_every_group_in_order():
    rows = RequestRows(max_num_seqs=2, num_groups=2)
    row = rows.add(new_request("a", [1], ([], [])))
    updates = []
    rows.append_blocks(row, ([3, 4], [5]), updates)
    rows.append_blocks(row, ([6], []), updates)
    other = 3 + row  # group 1, with two rows and the null row per group
    assert updates == [(row, 0, 3), (row, 1, 4), (other, 0, 5), (row, 2, 6)]


def test_a_row_is_given_back_and_starts_empty():
    rows = RequestRows(max_num_seqs=1, num_groups=1)
    row = rows.add(new_request("a", [1, 2], ([],)))
    rows.append_blocks(row, ([3],), [])
    rows.remove("a")
    rows.remove("never seen")
    assert rows.add(new_request("b", [4], ([],))) == row
    assert rows.num_blocks_GR[0][row] == 0 and rows.num_known_R[row] == 1


def test_rows_are_found_again_when_the_same_requests_come_back_elsewhere():
    rows = RequestRows(max_num_seqs=3, num_groups=1)
    for request_id in "abc":
        rows.add(new_request(request_id, [1], ([],)))
    ids = ["a", "b", "c"]
    assert rows.rows_of(ids).tolist() == [0, 1, 2]
    rows.remove("a")
    rows.remove("c")
    rows.add(new_request("a", [1], ([],)))
    rows.add(new_request("c", [1], ([],)))
    assert rows.rows_of(ids).tolist() == [rows.row_of[i] for i in ids] == [2, 1, 0]
    assert rows.rows_of(["b"]).tolist() == [1]


def test_parts_of_a_layout_cover_the_array_without_overlap():
    layout = step_layout(64, 8, [16] * 3)
    packed = np.zeros(layout.size, np.int32)
    for i, part in enumerate(layout.split(packed)):
        part += 1
        assert part.size or i > 5
    assert (packed == 1).all()


def test_a_reader_gives_for_every_step_what_a_fresh_one_gives():
    rows = RequestRows(max_num_seqs=4, num_groups=1)
    for request_id in "abc":
        rows.add(new_request(request_id, [1, 2], ([],)))
    steps = [
        scheduled(["a", "b"], [2, 2], [0, 0], [True, True]),
        scheduled(["a", "b"], [1, 1], [2, 2], [True, True]),
        scheduled(["a", "b"], [1, 1], [3, 3], [True, True]),
        scheduled(["b", "c"], [1, 1], [4, 0], [True, False]),
        scheduled(["b", "c"], [1, 1], [5, 1], [True, True]),
    ]
    reader = StepReader(rows)
    for step in steps:
        kept, fresh = reader.read(step), StepReader(rows).read(step)
        assert all((one == other).all() for one, other in zip(kept, fresh, strict=True))
