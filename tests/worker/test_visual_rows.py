"""What rows with pictures bring to steps: the same for every way in which a prompt is cut."""

from dataclasses import replace

import numpy as np
import pytest

from jaxpaged.messages import MultiModalFeature, NewRequestData, SchedulerOutput
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.worker.request_rows import RequestRows
from jaxpaged.worker.step.input_batch import StepReader, pack_step
from jaxpaged.worker.step.packed import step_layout
from jaxpaged.worker.visual_rows import VisualRows, slots_of

PAGE = 2
FEATURES = [
    MultiModalFeature(b"a" * 32, "image", 2, 3, [(2, 3)], (1, 1, 3)),
    MultiModalFeature(b"b" * 32, "image", 7, 5, [(7, 2), (10, 2)], (1, 2, 2)),
]
PROMPT = [1, 2, 99, 99, 99, 3, 4, 99, 99, 5, 99, 99, 6]
PAGES = [[4, 1], [0, 7]]
IDS = [1, 2, -10, -11, -4, 3, 4, -2, -3, 5, -16, -17, 6]
ENDS = [0, 0, 5, 5, 5, 0, 0, 9, 9, 0, 12, 12, 0]
DELTA = -3


def rope_offsets(features, num_prompt):
    places = np.arange(num_prompt, dtype=np.int32)
    return np.stack([places, 10 * places, 100 * places + len(features)]), DELTA


def rows_with(features, prompt=PROMPT, pages=PAGES):
    rows = RequestRows(4, 1, visual=VisualRows(4, PAGE, True, rope_offsets))
    for request_id, own in (("text", []), ("a", features)):
        rows.add(NewRequestData(request_id, prompt, len(PROMPT), 0, ([],), SamplingParams(), mm_features=own))
    for index, page_ids in enumerate(pages[: len(features)]):
        rows.visual.place(rows.row_of["a"], index, page_ids)
    return rows


def parts_of(rows, ids, tokens, computed):
    layout = replace(step_layout(16, 4, [4]), has_visible_ends=True, has_rope_offsets=True)
    output = SchedulerOutput(1, [], [], ids, tokens, computed, [1] * len(ids), [None] * len(ids), sum(tokens))
    return layout.split(pack_step(layout, StepReader(rows).read(output), rows, []))


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 13])
@pytest.mark.parametrize("cached", [0, 3, 8, 12])
def test_every_chunk_from_every_cached_beginning_says_the_same(chunk, cached):
    rows = rows_with(FEATURES)
    wanted, _ = rope_offsets(FEATURES, len(PROMPT))
    ids, ends, offsets = [], [], []
    for start in range(cached, len(PROMPT), chunk):
        count = min(chunk, len(PROMPT) - start)
        parts = parts_of(rows, ["text", "a"], [1, count], [start, start])
        own = slice(1, 1 + count)
        assert parts.token_ids_T[0] == PROMPT[start], "a row without pictures uploads its tokens"
        assert not parts.visible_ends_T[0] and not parts.rope_offsets_3T.reshape(3, 16)[:, 0].any()
        ids += parts.token_ids_T[own].tolist()
        ends += parts.visible_ends_T[own].tolist()
        offsets.append(parts.rope_offsets_3T.reshape(3, 16)[:, own])
        assert (
            not parts.visible_ends_T[1 + count :].any()
            and not parts.rope_offsets_3T.reshape(3, 16)[:, 1 + count :].any()
        )
    assert ids == IDS[cached:] and ends == ENDS[cached:]
    assert np.array_equal(np.concatenate(offsets, axis=1), wanted[:, cached:])


def test_behind_the_prompt_offsets_are_the_same_for_all_tokens():
    rows = rows_with(FEATURES, prompt=[*PROMPT, 20, 21])  # preempted with two tokens
    parts = parts_of(rows, ["a", "text"], [3, 1], [12, 15])
    offsets = parts.rope_offsets_3T.reshape(3, 16)
    assert offsets[:, 0].tolist() == [12, 120, 1202] and (offsets[:, 1:3] == DELTA).all() and not offsets[:, 3:].any()
    assert parts.token_ids_T[:4].tolist() == [6, 20, 21, -1] and not parts.visible_ends_T.any()
    decode = parts_of(rows, ["text", "a"], [1, 1], [15, 15])
    assert decode.rope_offsets_3T.reshape(3, 16)[:, :3].tolist() == [[0, DELTA, 0]] * 3


def test_steps_in_which_all_decode_say_the_same_until_one_changes():
    rows, layout = rows_with(FEATURES), replace(step_layout(16, 4, [4]), has_rope_offsets=True)
    reader, offsets = StepReader(rows), []
    for ids, counts, computed in [
        (["text", "a"], [1, 1], [13, 13]),
        (["text", "a"], [1, 1], [14, 14]),
        (["a", "text"], [1, 1], [15, 15]),
        (["a", "text"], [2, 1], [16, 16]),
        (["a", "text"], [2, 1], [18, 17]),
    ]:
        output = SchedulerOutput(1, [], [], ids, counts, computed, [1, 1], [None] * 2, sum(counts))
        parts = layout.split(pack_step(layout, reader.read(output), rows, []))
        offsets.append(parts.rope_offsets_3T.reshape(3, 16)[:, :4].tolist())
    assert offsets == [
        [line] * 3 for line in ([0, DELTA, 0, 0],) * 2 + ([DELTA, 0, 0, 0],) + ([DELTA, DELTA, 0, 0],) * 2
    ]
    rows.remove("a")
    rows.add(NewRequestData("b", PROMPT, len(PROMPT), 0, ([],), SamplingParams()))
    output = SchedulerOutput(1, [], [], ["b", "text"], [2, 1], [16, 19], [1, 1], [None] * 2, 3)
    parts = layout.split(pack_step(layout, reader.read(output), rows, []))
    assert not parts.rope_offsets_3T.any()


def test_a_row_that_was_given_back_is_one_without_pictures():
    rows = rows_with(FEATURES)
    row = rows.row_of["a"]
    assert rows.token_ids[row].tolist() == PROMPT, "scores of prompts and penalties are of the tokens themselves"
    rows.remove("a")
    rows.remove("text")
    for request_id in "bcde":
        rows.add(NewRequestData(request_id, PROMPT, len(PROMPT), 0, ([],), SamplingParams()))
    parts = parts_of(rows, list("bcde"), [3] * 4, [1] * 4)
    assert parts.token_ids_T[:12].tolist() == PROMPT[1:4] * 4
    assert not parts.visible_ends_T.any() and not parts.rope_offsets_3T.any()


def test_engines_without_pictures_have_no_such_parts():
    layout = step_layout(8, 4, [4])
    parts = layout.split(np.zeros(layout.size, np.int32))
    assert not parts.visible_ends_T.size and not parts.rope_offsets_3T.size


def test_slots_follow_pages_in_their_order():
    assert slots_of([3, 0], 4, 6).tolist() == [12, 13, 14, 15, 0, 1]
    with pytest.raises(AssertionError, match="too few"):
        slots_of([3], 4, 5)
