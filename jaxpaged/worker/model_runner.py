"""execute(SchedulerOutput): one step on the devices, dispatched without waiting for it.

A step is a forward pass and what its finishers make of it, or a run of such steps in one program; which programs that
are is said by the step. It reads nothing back: `PendingStep.result` does, one step later. A step with grammars stops
half way: its second half is called with the masks. A step with drafts begins with the program that drafts them.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxpaged.errors import EngineError, RequestError
from jaxpaged.messages import ModelRunnerOutput, NewRequestData, ProgramKey, SchedulerOutput, StepBuckets
from jaxpaged.worker.device import Device, start_copy
from jaxpaged.worker.programs.compile_queue import Activity
from jaxpaged.worker.request_rows import RequestRows
from jaxpaged.worker.step.functions import NOTHING, TABLE_CHUNK
from jaxpaged.worker.step.input_batch import StepReader, StepRequests, pack_step
from jaxpaged.worker.step.packed import SHARED, StepLayout

Updates = list[tuple[int, int, int]]
"""Block table entries of a rank, as `RequestRows.append_blocks` makes them."""
DRAFT_KIND = "draft"
"""The kind of the programs that draft, whatever the drafter."""


class RankStep(NamedTuple):
    """What an attention rank computes in a step."""

    scheduled: SchedulerOutput
    requests: StepRequests

    def sampling(self) -> tuple[list[str], np.ndarray]:
        """(ids, rows) of the requests that get something from this step."""
        samples = self.requests.samples
        if samples.all():
            return self.scheduled.request_ids, self.requests.rows
        return list(compress(self.scheduled.request_ids, self.scheduled.max_sampled_tokens)), self.requests.rows[
            samples
        ]

    def num_most(self) -> list[int]:
        """How many tokens each of these may get."""
        return [most for most in self.scheduled.max_sampled_tokens if most]


class Step(NamedTuple):
    """A step that was begun: `packed` is its array, `hidden_SD` the hidden states of the tokens that sample. None:
    the forward pass is part of the finisher's program. Both have those of all `ranks`, one after the other. `program`
    has the model's layers."""

    scheduled: SchedulerOutput
    ranks: Sequence[RankStep]
    packed: np.ndarray
    hidden_SD: Any
    program: ProgramKey


class Reading(Protocol):
    """Arrays on their way to the host."""

    def read(self, output: ModelRunnerOutput) -> None:
        """Wait for them and add what they say."""
        ...


@dataclass
class PendingStep:
    """A dispatched step: only its `readings` read arrays back."""

    step_id: int
    readings: list[Reading] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    buckets: StepBuckets | None = None
    draw: Callable[[np.ndarray], None] | None = None  # of a masked step: its second half
    activity: Activity | None = None  # that hears when the step has ended
    drafted: tuple[Any, int] | None = None  # of a masked step with drafts: these, on their way to the host, for n rows

    def drafts(self) -> list[list[int]]:
        """See `executor.base.PendingOutput`."""
        assert self.drafted is not None, "the step is not masked, or has no drafts"
        drafts_SK, num_rows = self.drafted
        try:
            return [[token for token in line if token != NOTHING] for line in np.asarray(drafts_SK)[:num_rows].tolist()]
        except jax.errors.JaxRuntimeError as error:
            raise EngineError(f"the drafts of step {self.step_id} failed on the device: {error}") from error

    def result(self) -> ModelRunnerOutput:
        """Wait for the step. Raises EngineError when the devices could not compute it."""
        output = ModelRunnerOutput(self.step_id, [], failed=dict(self.refused), buckets=self.buckets)
        try:
            for reading in self.readings:
                reading.read(output)
        except jax.errors.JaxRuntimeError as error:
            raise EngineError(f"step {self.step_id} failed on the device: {error}") from error
        if self.activity is not None:
            self.activity.end(self.step_id, self.buckets.token_bucket if self.buckets else 0)
        return output


class Finisher(Protocol):
    """What becomes of the hidden states of a step. Its state on the device is `DeviceState.finisher`, if it has any."""

    def admit(self, device: Device, rank: int, row: int, request: NewRequestData) -> None:
        """A request gets a row of a rank. Raises RequestError when it cannot be computed."""
        ...

    def finish(self, device: Device, step: Step, pending: PendingStep) -> None:
        """Dispatch what comes after the forward pass, and leave in `pending` what is to be read of it."""
        ...


class Drafter(Protocol):
    """What guesses at the next tokens of rows. `layouts`: by bucket, those of the steps that it computes to do so;
    empty where it computes none."""

    layouts: Mapping[int, StepLayout]

    def admit(self, device: Device, rank: int, row: int, request: NewRequestData) -> None:
        """A request gets a row."""
        ...

    def propose(self, device: Device, key: ProgramKey, draft: "DraftRequest", packed: np.ndarray | None) -> Any:
        """Dispatch what drafts for the step that is dispatched next; returns the drafts, padded, in the order of
        `draft`. `packed`: the array of a step of the newest tokens, if there is a layout for it."""
        ...

    def release(self, device: Device, row: int, num_prompt_tokens: int) -> None:
        """A row is taken back."""
        ...


class DraftRequest(NamedTuple):
    """The rows of a step that draft, their newest tokens as a step, and how many tokens each drafts at most."""

    newest: StepRequests
    num_drafts: list[int]


class ModelRunner:
    """Runs steps. `ranks`: the rows of each attention rank; `layouts`: those of forward programs and runs, by bucket;
    `finishers` follow in their order, and a `drafter` comes before, where there is one rank."""

    def __init__(
        self,
        device: Device,
        ranks: Sequence[RequestRows],
        layouts: Mapping[int, StepLayout],
        finishers: Sequence[Finisher],
        drafter: Drafter | None = None,
        after_step: Callable[[], None] | None = None,
    ):
        """`after_step`: what to do when a step was dispatched, before the next one."""
        self.after_step = after_step
        self.device, self.ranks, self.layouts, self.finishers = device, ranks, layouts, finishers
        self.drafter = drafter
        self.admitting = finishers if drafter is None else (drafter, *finishers)
        self.readers = list(map(StepReader, ranks))

    def execute(self, scheduled: SchedulerOutput) -> PendingStep:
        """Dispatch one step. Only dispatching happens here; results are read by `PendingStep.result`."""
        waited_before = self.device.programs.seconds_waited
        pending = PendingStep(scheduled.step_id)
        updates = [self._update_rows(rank, part, pending) for rank, part in enumerate(scheduled.parts)]
        if scheduled.request_ids:
            pending.activity = self.device.programs.activity
            pending.activity.begin(scheduled.step_id)
            self._dispatch(scheduled, updates, pending)
            if self.after_step is not None:
                self.after_step()
            pending.buckets.program_wait = self.device.programs.seconds_waited - waited_before
        return pending

    def _update_rows(self, rank: int, scheduled: SchedulerOutput, pending: PendingStep) -> Updates:
        """Take rows and give rows of a rank; returns the block table entries that the step brings."""
        rows = self.ranks[rank]
        for request_id in scheduled.removed_request_ids:
            if self.drafter is not None and request_id in rows.row_of:
                row = rows.row_of[request_id]
                self.drafter.release(self.device, row, int(rows.num_prompt_R[row]))
            rows.remove(request_id)
        updates: Updates = []
        for request in scheduled.new_requests:
            row = rows.add(request)
            rows.append_blocks(row, request.block_ids, updates)
            try:
                for part in self.admitting:
                    part.admit(self.device, rank, row, request)
            except RequestError as error:
                pending.refused[request.request_id] = str(error)
        for request_id, block_ids in zip(scheduled.request_ids, scheduled.new_block_ids, strict=True):
            if block_ids is not None:
                rows.append_blocks(rows.row_of[request_id], block_ids, updates)
        return updates

    def _dispatch(self, scheduled: SchedulerOutput, updates: list[Updates], pending: PendingStep) -> None:
        requests = [reader.read(part) for reader, part in zip(self.readers, scheduled.parts, strict=True)]
        draft_key, forward, _, run = scheduled.programs
        key = run or forward
        assert key is not None, "a step with requests has programs"
        if draft_key is not None:
            draft = drafting(requests[0], scheduled.max_sampled_tokens)
            updates, drafts_SK = self._draft(draft_key, draft, updates)
            if scheduled.masked:
                pending.drafted = start_copy(drafts_SK), len(draft.num_drafts)
        pending.buckets = StepBuckets(len(requests) * key.size)
        packed = self._pack(self.layouts[key.size], requests, updates)
        program = self._sharing(key, packed)
        hidden_SD = self._forward(program, packed) if run is None else None
        if hidden_SD is not None:
            num_tokens = sum([int(each.ends[-1]) for each in requests if len(each.ends)])
            self.device.counts.add(num_tokens, key.size, len(requests))
        step = Step(scheduled, list(map(RankStep, scheduled.parts, requests)), packed, hidden_SD, program)
        for finisher in self.finishers:
            finisher.finish(self.device, step, pending)

    def _draft(self, key: ProgramKey, draft: DraftRequest, updates: list[Updates]) -> tuple[list[Updates], Any]:
        """Let the drafter draft -> (the block table entries that are still to be written, the drafts)."""
        layout, packed = self.drafter.layouts.get(key.size), None
        if layout is not None:
            packed, updates = self._pack(layout, [draft.newest], updates), [[]]
        return updates, self.drafter.propose(self.device, key, draft, packed)

    def _pack(self, layout: StepLayout, requests: Sequence[StepRequests], updates: list[Updates]) -> np.ndarray:
        """The array of a step; block table entries that do not fit into it are written ahead."""
        while max(map(len, updates)) > layout.num_updates:
            updates = self._write_tables(updates)
        packed = list(map(pack_step, itertools.repeat(layout), requests, self.ranks, updates))
        return packed[0] if len(packed) == 1 else np.concatenate(packed)

    def _sharing(self, key: ProgramKey, packed: np.ndarray) -> ProgramKey:
        """The program that reads once what rows share, if there is one apart, some rows do, and it is compiled."""
        layout = self.layouts[key.size]
        if not layout.has_two_programs:
            return key
        shared = ProgramKey(key.kind + SHARED, key.size)
        if shared not in self.device.programs.builders:
            return key
        shares = any(layout.split(each).shared.any() for each in np.split(packed, len(self.ranks)))
        return shared if shares and self.device.programs.is_ready(shared) else key

    def _forward(self, key: ProgramKey, packed: np.ndarray) -> Any:
        """The hidden states of the tokens that sample."""
        device, state = self.device, self.device.state
        state.kv, state.tables, state.rows, state.hidden, hidden_SD = device.call(
            key, device.params, state.kv, state.tables, state.rows, state.hidden, packed
        )
        return hidden_SD

    def _write_tables(self, updates: list[Updates]) -> list[Updates]:
        """Write a chunk of each rank's block table entries ahead of the step, and return the rest."""
        packed = np.zeros((len(updates), 3, TABLE_CHUNK), np.int32)
        packed[:, 0] = self.ranks[0].null_row
        for of_rank, entries in zip(packed, updates):
            chunk = np.array(entries[:TABLE_CHUNK], np.int32).reshape(-1, 3)
            of_rank[:, : len(chunk)] = chunk.T
        packed = packed.reshape(-1, TABLE_CHUNK)
        self.device.state.tables = self.device.call(ProgramKey("tables"), self.device.state.tables, packed)
        return [entries[TABLE_CHUNK:] for entries in updates]


def drafting(requests: StepRequests, max_sampled_tokens: list[int]) -> DraftRequest:
    """What is asked of a drafter for a step: of those who may get more than one token, the first is known or drawn."""
    places = np.array([i for i, most in enumerate(max_sampled_tokens) if most > 1], np.int32)
    ones, num_computed = np.ones(len(places), np.int32), requests.num_computed[places]
    newest = StepRequests(
        requests.rows[places], ones, num_computed, num_computed + 1, ones.cumsum(dtype=np.int32), ones.astype(bool)
    )
    return DraftRequest(newest, [max_sampled_tokens[i] - 1 for i in places])
