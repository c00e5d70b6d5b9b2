"""A run of decode steps as one packed int32 array: where its parts lie, and how the host fills them.

A run is several steps in one program: every row computes one token a step and the sampled one feeds the next, until
the row has as many as it may, or ends. Everything that the steps need travels in this one array, before the first.
What the program does with it is in `decode_loop.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from jaxpaged.sampling.rows import NUM_COLUMNS
from jaxpaged.worker.input_batch import StepRequests, write_updates
from jaxpaged.worker.packed import StepLayout, slices_of
from jaxpaged.worker.request_rows import NUM_STOP_IDS, RequestRows


class DecodeParts(NamedTuple):
    """The parts of a run, all int32. Unused entries are zero, unused rows the null row.

    rows_R: the row of each request. seq_lens_R: tokens of each request once the first step is done. num_tokens_R: how
    many tokens it may compute, 0 for unused rows. token_ids_R: its first token; -1 means the row's last sampled one.
    stop_ids_RJ: tokens that end it, padded with -1. sampling_SF: the bits of the lines of `SamplingRows.pack`.
    The tables' updates are those of `StepParts`.
    """

    num_seqs: Any
    rows_R: Any
    seq_lens_R: Any
    num_tokens_R: Any
    token_ids_R: Any
    stop_ids_RJ: Any
    sampling_SF: Any
    table_place_U: Any
    table_idx_U: Any
    table_block_U: Any


@dataclass(frozen=True)
class DecodeLayout:
    """The sizes of one bucket. Its steps are those of `step`; `num_lines` rows are sampled, `max_steps` times."""

    step: StepLayout
    num_lines: int
    max_steps: int

    @property
    def sizes(self) -> DecodeParts:
        R, U = self.step.num_rows, self.step.num_updates
        return DecodeParts(1, R, R, R, R, R * NUM_STOP_IDS, self.num_lines * NUM_COLUMNS, U, U, U)

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        return slices_of(self.sizes)

    @property
    def size(self) -> int:
        return self.slices[-1].stop

    def split(self, packed: Any) -> DecodeParts:
        """The parts of numpy or jax arrays; the two with two axes in their shape."""
        parts = DecodeParts(*[packed[part] for part in self.slices])
        return parts._replace(
            stop_ids_RJ=parts.stop_ids_RJ.reshape(self.step.num_rows, NUM_STOP_IDS),
            sampling_SF=parts.sampling_SF.reshape(self.num_lines, NUM_COLUMNS),
        )


def decode_layout(
    num_tokens: int, max_num_seqs: int, sample_buckets: Sequence[int], max_steps: int, num_groups: int, block_size: int
) -> DecodeLayout:
    """The layout of the bucket of `num_tokens`. A row needs at most `max_steps` slots more than it has."""
    num_rows = min(num_tokens, max_num_seqs)
    num_updates = num_groups * num_rows * (max_steps // block_size + 1)
    num_lines = next(size for size in sample_buckets if size >= num_rows)
    return DecodeLayout(StepLayout(num_tokens, num_rows, num_updates), num_lines, max_steps)


def pack_run(
    layout: DecodeLayout,
    requests: StepRequests,
    rows: RequestRows,
    sampling_SF: np.ndarray,
    updates: list[tuple[int, int, int]],
) -> np.ndarray:
    """The packed array [layout.size] of one run. `sampling_SF` are the lines of its first step."""
    packed = np.zeros(layout.size, np.int32)
    parts = layout.split(packed)
    n, computed = len(requests.rows), requests.num_computed
    parts.num_seqs[0] = n
    parts.rows_R[:] = rows.null_row
    parts.rows_R[:n] = requests.rows
    parts.seq_lens_R[:n] = computed + 1
    parts.num_tokens_R[:n] = requests.num_scheduled
    parts.token_ids_R[:] = -1
    for i in np.flatnonzero(rows.num_known_R[requests.rows] > computed):
        parts.token_ids_R[i] = rows.token_ids[requests.rows[i]][computed[i]]
    parts.stop_ids_RJ[:n] = rows.stop_ids_RJ[requests.rows]
    parts.sampling_SF[:] = sampling_SF.view(np.int32)
    write_updates(parts, rows, updates)
    return packed
