"""What a step is on the host, and where each part of it lies in its one int32 array.

`StepLayout.split` slices an array into named parts. The host splits a numpy array and writes into the views;
the program splits the array that it received and reads. One definition serves both.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from pallas_kernels.ragged_paged_attention import shared_work
from pallas_kernels.ragged_paged_attention.sharing import NUM_LINES, SharedWork


class StepRequests(NamedTuple):
    """The requests of one step as arrays, in the order of the scheduler's lists; of the first of several."""

    rows: np.ndarray
    num_scheduled: np.ndarray
    num_computed: np.ndarray  # before the step
    seq_lens: np.ndarray  # after it
    ends: np.ndarray  # where each request's tokens end in the step
    samples: np.ndarray  # bool


class StepParts(NamedTuple):
    """The parts of a step, all int32. Unused entries are zero, unused rows the null row.

    rows_R: the row of each request. query_start_loc_R1: where each request's tokens start, then the total.
    seq_lens_R: tokens of each request once this step is done; -1: its new tokens follow those that are computed.
    token_ids_T: -1 means the row's last sampled token, or behind it a draft, and -2 - s what lies in slot s of the
    encoder cache.
    sample_idxs_R: position in the step of the token whose logits are sampled, for the requests that sample.
    table_place_U, table_idx_U, table_block_U: block table entries to write; a place is group * (rows + 1) + row.
    shared: what rows share in each KV group, as `shared_of_groups` takes it apart.
    visible_ends_T: one past the last position that a token sees, where that is not its own; 0: it is.
    rope_offsets_3T: what is added to positions in time, rows and columns, one after the other.
    lora_slots_R: the slot of each request's adapter, 0 for none.
    """

    num_seqs: Any
    rows_R: Any
    query_start_loc_R1: Any
    seq_lens_R: Any
    token_ids_T: Any
    sample_idxs_R: Any
    table_place_U: Any
    table_idx_U: Any
    table_block_U: Any
    shared: Any
    visible_ends_T: Any
    rope_offsets_3T: Any
    lora_slots_R: Any


@dataclass(frozen=True)
class StepLayout:
    """The sizes of one forward bucket: tokens, requests, and block table updates that travel with the step; and for
    each KV group what shared spans cost, or nothing where attention does not look for them in steps of this size.
    `reads_shared`: the program reads shared spans once; without it each row reads them, from the same array.
    `has_visible_ends`, `has_rope_offsets`: steps have these parts, in engines that see and need them. `has_lora`: so
    have those of engines with adapters; `lora_level`: how much of the stacks the program takes, 0 for none of it."""

    num_tokens: int
    num_rows: int
    num_updates: int
    shared_work: tuple[SharedWork, ...] = ()
    reads_shared: bool = True
    has_visible_ends: bool = False
    has_rope_offsets: bool = False
    has_lora: bool = False
    lora_level: int = 0

    @cached_property
    def has_two_programs(self) -> bool:
        """Whether steps in which rows share nothing are worth a program of their own."""
        return any(work.is_launched for work in self.shared_work)

    def at_level(self, lora_level: int) -> "StepLayout":
        """The same step, for a program that takes so much of the stacks."""
        return replace(self, lora_level=lora_level)

    @property
    def sizes(self) -> StepParts:
        T, R, U = self.num_tokens, self.num_rows, self.num_updates
        shared = len(self.shared_work) * NUM_LINES * R
        optional = T * self.has_visible_ends, 3 * T * self.has_rope_offsets, R * self.has_lora
        return StepParts(1, R, R + 1, R, T, R, U, U, U, shared, *optional)

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        return slices_of(self.sizes)

    @property
    def size(self) -> int:
        return self.slices[-1].stop

    def split(self, packed: Any) -> StepParts:
        return StepParts(*[packed[part] for part in self.slices])

    def shared_of_groups(self, parts: StepParts) -> Any:
        """[groups, 6, rows]: for each KV group the array of `pallas_kernels`' `sharing.py`."""
        return parts.shared.reshape(len(self.shared_work), NUM_LINES, self.num_rows)


@dataclass(frozen=True)
class MultiStepLayout:
    """The sizes of a multi-step decode: up to `max_steps` steps of `step`, in each of which `num_lines` rows are
    sampled."""

    step: StepLayout
    num_lines: int
    max_steps: int

    def at_level(self, lora_level: int) -> "MultiStepLayout":
        """The same steps, for a program that takes so much of the stacks."""
        return replace(self, step=self.step.at_level(lora_level))


def slices_of(sizes: Iterable[int]) -> tuple[slice, ...]:
    """Slices of the given sizes, one after the other."""
    sizes = tuple(sizes)
    ends = itertools.accumulate(sizes)
    return tuple(slice(end - size, end) for end, size in zip(ends, sizes, strict=True))


def step_layout(
    num_tokens: int,
    max_num_seqs: int,
    block_sizes: Sequence[int],
    backend: str | None = None,
    device_slots: Sequence[int] | None = None,
) -> StepLayout:
    """The layout of the forward bucket of `num_tokens`, with a block table for each of `block_sizes`. `backend`: that
    of attention, which may read once what rows share. `device_slots`: of each block, the slots that a device has,
    unless it has all.

    A request gets at most one block more than its tokens fill, so the updates of ordinary steps fit; what an
    admission with a long prefix hit adds beyond, or one of many steps, goes through the table program first.
    """
    num_rows = min(num_tokens, max_num_seqs)
    works = [backend and shared_work(backend, num_tokens, size) for size in device_slots or block_sizes]
    num_updates = sum(num_tokens // size + num_rows for size in block_sizes)
    return StepLayout(num_tokens, num_rows, num_updates, tuple(works) if all(works) else ())
