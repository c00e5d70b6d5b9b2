"""execute_model(SchedulerOutput): one step on the devices, dispatched without waiting for it.

A step is a forward pass and what its output stage makes of the hidden states, or a run of such steps in one program;
the step says which programs these are. Nothing is read back here: `PendingStep.result` does that, one step later. A
masked step stops after its forward pass, and `sample_tokens` goes on with the masks. A step with drafts begins with the
program that drafts them.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import compress
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax
import msgspec
import numpy as np

from jaxpaged.errors import EngineError, RequestError
from jaxpaged.messages import ModelRunnerOutput, NewRequestData, ProgramKey, SchedulerOutput, StepBuckets
from jaxpaged.worker.adapter_slots import AdapterSlots, ProbeReading, probe_step
from jaxpaged.worker.device import Device, start_copy
from jaxpaged.worker.encoder import Encoder
from jaxpaged.worker.programs.compile_queue import Activity
from jaxpaged.worker.programs.declare import SHARED_KINDS, ProgramKind
from jaxpaged.worker.request_rows import RequestRows
from jaxpaged.worker.routed_experts import ExpertsOfStep
from jaxpaged.worker.step.functions import TABLE_CHUNK
from jaxpaged.worker.step.input_batch import StepReader, pack_step
from jaxpaged.worker.step.packed import StepLayout, StepRequests
from jaxpaged.worker.step.row_tokens import NOTHING

Updates = list[tuple[int, int, int]]
"""Block table entries of a rank, as `RequestRows.append_blocks` makes them."""


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
    the forward pass is part of the output stage's program. Both have those of all `ranks`, one after the other.
    `program` has the model's layers."""

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


class StageOutput(NamedTuple):
    """What an output stage has dispatched: arrays to read, and how many rows its program was padded to."""

    readings: Sequence[Reading] = ()
    sample_bucket: int = 0
    full_sampler: bool = False


class PendingStep(NamedTuple):
    """A dispatched step: only its `readings` read arrays back."""

    step_id: int
    readings: Sequence[Reading] = ()
    refused: Mapping[str, str] = MappingProxyType({})
    buckets: StepBuckets | None = None
    activity: Activity | None = None  # that hears when the step has ended, while programs are compiled
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


class OutputStage(Protocol):
    """Makes tokens or vectors of the hidden states of a step: `Sampler`, or `Pooler`. What it keeps of rows on the
    device is `DeviceState.row_state`."""

    def admit(self, device: Device, rank: int, row: int, request: NewRequestData) -> None:
        """A request gets a row of a rank. Raises RequestError when it cannot be computed."""
        ...

    def dispatch(self, device: Device, step: Step, masks_NW: np.ndarray | None = None) -> StageOutput:
        """Dispatch what comes after the forward pass. `masks_NW`: of a masked step."""
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
    """Runs steps. `ranks`: the rows of each attention rank; `layouts`: of forward and multi-step programs, by bucket.
    The `output_stage` comes after the forward pass, and a `drafter` before it, where there is one rank."""

    def __init__(
        self,
        device: Device,
        ranks: Sequence[RequestRows],
        layouts: Mapping[int, StepLayout],
        output_stage: OutputStage,
        drafter: Drafter | None = None,
        after_step: Callable[[], None] | None = None,
        encoder: Encoder | None = None,
        adapters: AdapterSlots | None = None,
    ):
        """`after_step`: what to do when a step was dispatched, before the next one. `encoder`: of an engine that sees,
        where there is one rank. `adapters`: of one that has some."""
        self.encoder, self.adapters = encoder, adapters
        self.after_step = after_step
        self.device, self.ranks, self.layouts, self.output_stage = device, ranks, layouts, output_stage
        self.drafter = drafter
        self.admitting = (output_stage,) if drafter is None else (drafter, output_stage)
        self.readers = list(map(StepReader, ranks))
        self._unsampled: tuple[Step, PendingStep] | None = None  # a masked step whose masks are still to come

    def execute_model(self, scheduled: SchedulerOutput) -> PendingStep:
        """Dispatch one step, or the forward pass of a masked one. Results are read by `PendingStep.result`."""
        assert self._unsampled is None, "a step begins before the last one has sampled"
        device, parts = self.device, scheduled.ranks or (scheduled,)
        waited_before, refused = device.programs.seconds_waited, dict[str, str]()
        updates: list[Updates] = [[] for _ in parts]
        if scheduled.lora_loads:
            self._load_adapters(scheduled)
        for rank, part in enumerate(parts):
            if part.new_requests or part.removed_request_ids or any(part.new_block_ids):
                updates[rank], refused_here = self._update_rows(rank, part)
                refused |= refused_here
        encoded: Sequence[Reading] = ()
        if self.encoder is not None and (scheduled.encoder_pages or scheduled.encoder_inputs):
            encoded = self.encoder.dispatch(device, scheduled)
        if not scheduled.request_ids:
            return PendingStep(scheduled.step_id, refused=refused)
        activity = device.programs.activity if device.programs.num_workers else None
        if activity is not None:
            activity.begin(scheduled.step_id)
        requests, drafted = [reader.read(part) for reader, part in zip(self.readers, parts, strict=True)], None
        programs = scheduled.programs
        if programs.draft is not None:
            updates, drafted = self._draft(scheduled, requests[0], updates)
        key = programs.multi_step or programs.forward
        assert key is not None, "a step with requests has programs"
        layout = self.layouts[key.size]
        packed, program, hidden_SD, experts = self._pack(layout, requests, updates), key, None, None
        if layout.has_two_programs:
            program = self._sharing(key, packed)
        if self.adapters is not None:
            slots = [rows.lora_slots_R[each.rows] for rows, each in zip(self.ranks, requests, strict=True)]
            program = self.adapters.program(device, program, slots)
        if programs.multi_step is None:
            hidden_SD, experts = self._forward(program, packed)
            num_tokens = sum([int(each.ends[-1]) for each in requests if len(each.ends)])
            device.counts.add(num_tokens, key.size, len(requests))
        step = Step(scheduled, list(map(RankStep, parts, requests)), packed, hidden_SD, program)
        output = StageOutput() if scheduled.masked else self.output_stage.dispatch(device, step)
        if self.after_step is not None:
            self.after_step()
        waited = device.programs.seconds_waited - waited_before
        buckets = StepBuckets(len(parts) * key.size, output.sample_bucket, output.full_sampler, waited)
        readings = (*encoded, *output.readings) if encoded else output.readings
        if experts is not None:
            counts = [int(each.ends[-1]) if len(each.ends) else 0 for each in requests]
            readings = (*readings, ExpertsOfStep(counts, start_copy(experts)))
        if self.adapters is not None and self.adapters.probes:
            readings = (*self._probe_readings(parts), *readings)
        pending = PendingStep(scheduled.step_id, readings, refused, buckets, activity, drafted)
        if scheduled.masked:
            self._unsampled = step, pending
        return pending

    def sample_tokens(self, masks_NW: np.ndarray) -> PendingStep:
        """Dispatch the rest of the masked step that was begun last."""
        assert self._unsampled is not None, "no step waits for masks"
        (step, begun), self._unsampled = self._unsampled, None
        readings, sample_bucket, full_sampler = self.output_stage.dispatch(self.device, step, masks_NW)
        assert begun.buckets is not None
        buckets = msgspec.structs.replace(begun.buckets, sample_bucket=sample_bucket, full_sampler=full_sampler)
        return begun._replace(readings=(*begun.readings, *readings), buckets=buckets)

    def _forward(self, program: ProgramKey, packed: np.ndarray) -> tuple[Any, Any]:
        """Dispatch a forward pass -> (hidden states of the tokens that sample, the experts of all if they are told)."""
        device, state = self.device, self.device.state
        arguments = device.params_for(program), state.kv, state.tables, state.rows, state.hidden, packed
        if self.encoder is not None:
            arguments = *arguments, None, state.encoded
        state.kv, state.tables, state.rows, state.hidden, hidden_SD, experts = device.call(program, *arguments)
        return hidden_SD, experts

    def _load_adapters(self, scheduled: SchedulerOutput) -> None:
        """Move adapters into slots, and see what those do that are there for the first time."""
        adapters, (_, key) = self.adapters, scheduled.programs.adapters
        assert adapters is not None, "only an engine with adapters loads some"
        make_step = partial(probe_step, self.layouts[key.size], self.ranks[0].null_row, len(self.ranks))
        for slot, lora_int_id in scheduled.lora_loads:
            if adapters.load(self.device, slot, lora_int_id):
                hidden = [start_copy(self._forward(key, make_step(each))[0]) for each in (slot, 0)]
                adapters.note_probe(slot, *hidden)

    def _probe_readings(self, parts: Sequence[SchedulerOutput]) -> list[Reading]:
        """What fails new requests whose adapter changes nothing."""
        adapters, by_slot = self.adapters, dict[int, list[str]]()
        assert adapters is not None, "only an engine with adapters probes some"
        for request in itertools.chain.from_iterable(part.new_requests for part in parts):
            if request.lora_slot:
                by_slot.setdefault(request.lora_slot, []).append(request.request_id)
        probes = [(adapters.probe_of(slot), ids) for slot, ids in by_slot.items()]
        return [ProbeReading(adapters, probe, ids) for probe, ids in probes if probe is not None]

    def _update_rows(self, rank: int, scheduled: SchedulerOutput) -> tuple[Updates, dict[str, str]]:
        """Take rows and give rows of a rank -> (block table entries that the step brings, requests that are refused and
        why)."""
        rows, refused = self.ranks[rank], dict[str, str]()
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
                refused[request.request_id] = str(error)
        for request_id, block_ids in zip(scheduled.request_ids, scheduled.new_block_ids, strict=True):
            if block_ids is not None:
                rows.append_blocks(rows.row_of[request_id], block_ids, updates)
        return updates, refused

    def _draft(
        self, scheduled: SchedulerOutput, requests: StepRequests, updates: list[Updates]
    ) -> tuple[list[Updates], tuple[Any, int] | None]:
        """Let the drafter draft -> (the block table entries that are still to be written, what the host reads of the
        drafts, for so many rows: those of a masked step alone)."""
        key, draft = scheduled.programs.draft, drafting(requests, scheduled.max_sampled_tokens)
        layout, packed = self.drafter.layouts.get(key.size), None
        if layout is not None:
            packed, updates = self._pack(layout, [draft.newest], updates), [[]]
        drafts_SK = self.drafter.propose(self.device, key, draft, packed)
        return updates, (start_copy(drafts_SK), len(draft.num_drafts)) if scheduled.masked else None

    def _pack(self, layout: StepLayout, requests: Sequence[StepRequests], updates: list[Updates]) -> np.ndarray:
        """The array of a step; block table entries that do not fit into it are written ahead."""
        while max(map(len, updates)) > layout.num_updates:
            updates = self._write_tables(updates)
        packed = list(map(pack_step, itertools.repeat(layout), requests, self.ranks, updates))
        return packed[0] if len(packed) == 1 else np.concatenate(packed)

    def _sharing(self, key: ProgramKey, packed: np.ndarray) -> ProgramKey:
        """The program that reads once what rows share, if some rows do and it is compiled."""
        layout, shared = self.layouts[key.size], ProgramKey(SHARED_KINDS[key.kind], key.size)
        if shared not in self.device.programs.builders:
            return key
        shares = any(layout.split(each).shared.any() for each in np.split(packed, len(self.ranks)))
        return shared if shares and self.device.programs.is_ready(shared) else key

    def _write_tables(self, updates: list[Updates]) -> list[Updates]:
        """Write a chunk of each rank's block table entries ahead of the step, and return the rest."""
        packed = np.zeros((len(updates), 3, TABLE_CHUNK), np.int32)
        packed[:, 0] = self.ranks[0].null_row
        for of_rank, entries in zip(packed, updates):
            chunk = np.array(entries[:TABLE_CHUNK], np.int32).reshape(-1, 3)
            of_rank[:, : len(chunk)] = chunk.T
        packed = packed.reshape(-1, TABLE_CHUNK)
        self.device.state.tables = self.device.call(ProgramKey(ProgramKind.TABLES), self.device.state.tables, packed)
        return [entries[TABLE_CHUNK:] for entries in updates]


def drafting(requests: StepRequests, max_sampled_tokens: list[int]) -> DraftRequest:
    """What is asked of a drafter for a step: of those who may get more than one token, the first is known or drawn."""
    places = np.array([i for i, most in enumerate(max_sampled_tokens) if most > 1], np.int32)
    ones, num_computed = np.ones(len(places), np.int32), requests.num_computed[places]
    newest = StepRequests(
        requests.rows[places], ones, num_computed, num_computed + 1, ones.cumsum(dtype=np.int32), ones.astype(bool)
    )
    return DraftRequest(newest, [max_sampled_tokens[i] - 1 for i in places])
