"""SchedulerOutput + rows -> the packed int32 array of one step, padded to a bucket.

Where a request's tokens stand is told to the device only as far as the host has the tokens themselves: the others are
drawn there, and how many there are is known there first.

The hot path is one pass of numpy over the requests of the step; only requests in prefill, whose tokens the host
must upload, are visited one by one. The array is made afresh for every step, since on a CPU the device may read
it in place.
"""

import itertools
import struct

import numpy as np

from jaxpaged.messages import SchedulerOutput
from jaxpaged.worker.request_rows import NUM_STOP_IDS, RequestRows
from jaxpaged.worker.step.packed import StepLayout, StepParts, StepRequests


class StepReader:
    """Turns the scheduler's lists into arrays. While all decode, most of them are those of the step before."""

    def __init__(self, rows: RequestRows):
        self._rows = rows
        self._counts = (
            [],
            [],
            False,
        )  # tokens in and out of the last step, whether it was a multi-step decode, and its arrays
        self._arrays = count_arrays(*self._counts)

    def read(self, scheduled: SchedulerOutput) -> StepRequests:
        counts = scheduled.num_scheduled_tokens, scheduled.max_sampled_tokens, scheduled.num_steps > 1
        if counts != self._counts:
            self._counts, self._arrays = counts, count_arrays(*counts)
        num_scheduled, ends, samples = self._arrays
        num_computed = int32_array(scheduled.num_computed_tokens)
        rows = self._rows.last_rows
        if scheduled.request_ids != self._rows.last_ids:
            rows = self._rows.rows_of(scheduled.request_ids)
        return StepRequests(rows, num_scheduled, num_computed, num_computed + num_scheduled, ends, samples)


def count_arrays(
    num_scheduled_tokens: list[int], max_sampled_tokens: list[int], multi_step: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens, where they end in the step, who samples) of the requests of a step. With `multi_step`
    all that a request may get are computed in later steps, but the last."""
    num_new, num_scheduled = int32_array(max_sampled_tokens), int32_array(num_scheduled_tokens)
    if multi_step:
        num_scheduled = num_scheduled - np.maximum(num_new - 1, 0)
    return num_scheduled, num_scheduled.cumsum(dtype=np.int32), num_new > 0


def int32_array(numbers: list[int]) -> np.ndarray:
    """A read-only array, in half of the time that `np.array` takes for hundreds of numbers."""
    return np.frombuffer(struct.pack(f"={len(numbers)}i", *numbers), np.int32)


def pack_step(
    layout: StepLayout, requests: StepRequests, rows: RequestRows, updates: list[tuple[int, int, int]]
) -> np.ndarray:
    """The packed array [layout.size] of one step."""
    packed = np.zeros(layout.slices[-1].stop, np.int32)
    parts = StepParts(*[packed[part] for part in layout.slices])
    n, ends = len(requests.rows), requests.ends
    parts.num_seqs[0] = n
    parts.rows_R[:n] = requests.rows
    parts.rows_R[n:] = rows.null_row
    parts.query_start_loc_R1[1 : n + 1] = ends
    parts.query_start_loc_R1[n + 1 :] = num_tokens = ends[-1] if n else 0
    num_uploaded = rows.num_known_R[requests.rows] - requests.num_computed
    is_uploaded = num_uploaded > 0
    parts.seq_lens_R[:n] = np.where(is_uploaded, requests.seq_lens, -1)
    sample_ends = ends[requests.samples]
    parts.sample_idxs_R[: len(sample_ends)] = sample_ends - 1
    parts.token_ids_T[:num_tokens] = -1
    if is_uploaded.any():
        fill_token_ids(parts.token_ids_T, requests, rows, num_uploaded)
    if rows.visual is not None:
        rows.visual.fill(layout, parts, requests)
    if layout.has_lora:
        parts.lora_slots_R[:n] = rows.lora_slots_R[requests.rows]
    parts.table_place_U[len(updates) :] = rows.null_row
    if updates:
        write_updates(parts, updates)
    if not (n and layout.shared_work):
        return packed
    for shared, shared_6R, work in zip(rows.shared, layout.shared_of_groups(parts), layout.shared_work):
        shared.fill(shared_6R, requests.rows, requests.num_scheduled, work)
    return packed


def multi_step_lines(lines_SF: np.ndarray, limits: list[int], stop_ids_RJ: np.ndarray) -> np.ndarray:
    """What several steps take besides one: the bits of the sampling lines, and behind them when their rows end."""
    ends_SJ = np.full((len(lines_SF), 1 + NUM_STOP_IDS), -1, np.int32)
    ends_SJ[:, 0] = 0
    ends_SJ[: len(limits), 0] = limits
    ends_SJ[: len(limits), 1:] = stop_ids_RJ
    return np.concatenate([lines_SF.view(np.int32), ends_SJ], axis=1)


def write_updates(parts: StepParts, updates: list[tuple[int, int, int]]) -> None:
    """Fill the block table entries of a packed array's parts, which are zero."""
    table = int32_array(list(itertools.chain.from_iterable(updates))).reshape(-1, 3)
    parts.table_place_U[: len(table)] = table[:, 0]
    parts.table_idx_U[: len(table)] = table[:, 1]
    parts.table_block_U[: len(table)] = table[:, 2]


def fill_token_ids(
    token_ids_T: np.ndarray, requests: StepRequests, rows: RequestRows, num_uploaded: np.ndarray
) -> None:
    """Write the tokens that the host knows. Every other one is the row's last sampled token, which only the
    device knows, and stays -1."""
    for i in (num_uploaded > 0).nonzero()[0]:
        computed, count = int(requests.num_computed[i]), min(int(num_uploaded[i]), int(requests.num_scheduled[i]))
        start = int(requests.ends[i]) - int(requests.num_scheduled[i])
        token_ids_T[start : start + count] = rows.uploaded_ids[requests.rows[i]][computed : computed + count]
