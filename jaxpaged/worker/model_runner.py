"""execute(SchedulerOutput): one step on the devices, dispatched without waiting for it.

Paranoid file. It owns the device state (KV tensors, block tables, last tokens, sampling state), which every program
donates and returns, and it only ever calls programs from the table. It reads nothing back: `PendingStep.result` does,
one step later. A step with grammars stops half way: its second half is called with the masks.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from jaxpaged.errors import EngineError, RequestError
from jaxpaged.messages import (
    ModelRunnerOutput,
    NewRequestData,
    PromptLogprobs,
    SampledLogprobs,
    SchedulerOutput,
    StepBuckets,
)
from jaxpaged.sampling.custom import CustomProcessors
from jaxpaged.sampling.logprobs import LogprobOutput
from jaxpaged.sampling.rows import SamplingRows
from jaxpaged.sampling.state import StateLayout, pack_masks
from jaxpaged.sampling_features import Extra
from jaxpaged.worker.blueprint import MASKED_KIND
from jaxpaged.worker.decode_batch import DecodeLayout, pack_run
from jaxpaged.worker.input_batch import StepReader, StepRequests, pack_step
from jaxpaged.worker.packed import StepLayout
from jaxpaged.worker.pending_run import NOTHING_TO_DRAW, PendingRun
from jaxpaged.worker.programs import ProgramKey, Programs
from jaxpaged.worker.request_rows import RequestRows
from jaxpaged.worker.row_uploads import admit
from jaxpaged.worker.step import PROMPT_LOGPROB_TILE, TABLE_CHUNK


@dataclass
class DeviceState:
    """Everything on the devices that a step changes. Whatever is read from here is gone once a program donated it."""

    kv: Any
    tables: Any
    last_token: Any
    sampling: Any
    hidden: Any  # of every token of the last step of single tokens, see `step.py`


@dataclass
class StepCounts:
    """What the runner did so far, for `stats`."""

    steps: int = 0
    scheduled_tokens: int = 0
    padded_tokens: int = 0
    buckets: dict[int, int] = field(default_factory=dict)

    def add(self, scheduled: int, bucket: int) -> None:
        self.steps += 1
        self.scheduled_tokens += scheduled
        self.padded_tokens += bucket - scheduled
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1


class ModelRunner:
    """Runs steps. `layouts` are the forward buckets by size, `sample_buckets` the sampling ones, both sorted.

    `decode_layouts` are the buckets of runs of decode steps; none: there are no such programs.
    """

    def __init__(
        self,
        programs: Programs,
        params: Any,
        head: Any,
        state: DeviceState,
        rows: RequestRows,
        sampling: StateLayout,
        custom: CustomProcessors,
        layouts: dict[int, StepLayout],
        sample_buckets: tuple[int, ...],
        decode_layouts: Mapping[int, DecodeLayout] = MappingProxyType({}),
    ):
        self.programs, self.params, self.head, self.state = programs, params, head, state
        self.rows, self.sampling, self.custom = rows, sampling, custom
        self.reader = StepReader(rows)
        self.sampling_rows = SamplingRows(sampling.max_num_seqs)
        self.layouts, self.token_buckets, self.sample_buckets = layouts, tuple(layouts), sample_buckets
        self.decode_layouts = decode_layouts
        self.counts = StepCounts()

    def max_decode_steps(self) -> int:
        """Steps that one program may run for the requests that have a row; 1 until their program is compiled.

        To ask makes it be compiled, if it is kept on demand.
        """
        live = np.fromiter(self.rows.row_of.values(), np.int32)
        kind = "decode_full" if self.sampling_rows.any_full(live) else "decode"
        bucket = next((size for size in self.decode_layouts if size >= len(live)), None)
        if bucket is None or (key := ProgramKey(kind, bucket)) not in self.programs.builders:
            return 1
        return self.decode_layouts[bucket].max_steps if self.programs.is_ready(key) else 1

    def can_run(self, extra: Extra) -> bool:
        """Whether a step can do what `extra` says without waiting for a program; if not, those for any step are
        compiled next. Narrower ones are, once a step could use them. Raises EngineError when one cannot be.
        """
        try:
            ready = [self.programs.prepare(key) for key in self._programs_of(extra)]  # each of them hurries
            return all(ready)
        except Exception as error:
            raise EngineError(f"{extra.value} could not be compiled; the engine's log says why.") from error

    def _programs_of(self, extra: Extra) -> tuple[ProgramKey, ...]:
        """What steps with `extra` call, whatever their size."""
        widest = self.sample_buckets[-1]
        if extra is Extra.MASKS:
            return (ProgramKey(MASKED_KIND, widest),)
        if extra is Extra.PROMPT_LOGPROBS:
            return (ProgramKey("prompt_logprobs"),)
        return ProgramKey("load_row"), ProgramKey("load_tokens"), ProgramKey("sample_full", widest)

    def execute(self, scheduled: SchedulerOutput) -> "PendingStep | PendingRun":
        """Dispatch one step. Only dispatching happens here; results are read by `PendingStep.result`."""
        waited_before = self.programs.seconds_waited
        pending = self._dispatch(scheduled)
        if pending.buckets is not None:
            pending.buckets.program_wait = self.programs.seconds_waited - waited_before
        return pending

    def _dispatch(self, scheduled: SchedulerOutput) -> "PendingStep | PendingRun":
        for request_id in scheduled.removed_request_ids:
            self.rows.remove(request_id)
        pending = self._new_pending(scheduled.step_id)
        updates: list[tuple[int, int, int]] = []
        for request in scheduled.new_requests:
            self._admit(request, updates, pending)
        for request_id, block_ids in zip(scheduled.request_ids, scheduled.new_block_ids, strict=True):
            if block_ids is not None:
                self.rows.append_blocks(self.rows.row_of[request_id], block_ids, updates)
        if scheduled.num_steps > 1:
            return self._decode(scheduled, updates)
        if scheduled.request_ids:
            requests = self.reader.read(scheduled)
            bucket, hidden_SD = self._forward(requests, updates)
            pending.buckets = StepBuckets(bucket)
            self._prompt_logprobs(scheduled, requests, pending)
            if scheduled.masked:
                pending.draw = partial(self._sample, scheduled, requests, hidden_SD, pending)
            elif requests.samples.any():
                self._sample(scheduled, requests, hidden_SD, pending)
        return pending

    def _new_pending(self, step_id: int) -> "PendingStep":
        return PendingStep(step_id)

    def _admit(self, request: NewRequestData, updates: list[tuple[int, int, int]], pending: "PendingStep") -> None:
        row = self.rows.add(request)
        self.rows.append_blocks(row, request.block_ids, updates)
        try:
            for upload in admit(row, request, self.sampling_rows, self.sampling, self.custom):
                self.state.sampling = self._call(ProgramKey(upload.program), self.state.sampling, upload.packed)
        except RequestError as error:
            pending.refused[request.request_id] = str(error)

    def _forward(self, requests: StepRequests, updates: list[tuple[int, int, int]]) -> tuple[int, Any]:
        """(the bucket of a step, the hidden states of the tokens that sample)."""
        bucket, packed = self._pack(requests, updates)
        return bucket, self._run_forward(bucket, packed)

    def _pack(self, requests: StepRequests, updates: list[tuple[int, int, int]]) -> tuple[int, np.ndarray]:
        """(the bucket of a step, its packed array)."""
        num_tokens = int(requests.ends[-1])
        bucket = self.programs.smallest_ready("forward", num_tokens, self.token_buckets)
        layout = self.layouts[bucket]
        while len(updates) > layout.num_updates:
            updates = self._write_tables(updates)
        self.counts.add(num_tokens, bucket)
        return bucket, pack_step(layout, requests, self.rows, updates)

    def _run_forward(self, bucket: int, packed: np.ndarray) -> Any:
        state, key = self.state, ProgramKey("forward", bucket)
        state.kv, state.tables, state.hidden, hidden_SD = self._call(
            key, self.params, state.kv, state.tables, state.last_token, state.hidden, packed
        )
        return hidden_SD

    def _write_tables(self, updates: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """Write a chunk of block table entries ahead of the step, and return the rest."""
        packed = np.zeros((3, TABLE_CHUNK), np.int32)
        packed[0] = self.rows.null_row
        chunk = np.array(updates[:TABLE_CHUNK], np.int32)
        packed[:, : len(chunk)] = chunk.T
        self.state.tables = self._call(ProgramKey("tables"), self.state.tables, packed)
        return updates[TABLE_CHUNK:]

    def _sample(
        self, scheduled: SchedulerOutput, requests: StepRequests, hidden_SD: Any, pending: "PendingStep",
        masks_SW: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        rows, positions, pending.request_ids = requests.rows, requests.seq_lens, scheduled.request_ids
        if not requests.samples.all():
            rows, positions = rows[requests.samples], positions[requests.samples]
            pending.request_ids = list(itertools.compress(scheduled.request_ids, scheduled.max_new_tokens))
        state, full = self.state, masks_SW is not None or self.sampling_rows.any_full(rows)
        kind = "sample" if not full else "sample_full" if masks_SW is None else MASKED_KIND
        if full:
            self.programs.is_ready(ProgramKey(kind, next(size for size in self.sample_buckets if size >= len(rows))))
        bucket = self.programs.smallest_ready(kind, len(rows), self.sample_buckets)
        pending.buckets.sample_bucket, pending.buckets.full_sampler = bucket, full
        key = ProgramKey(kind, bucket)
        num_output = positions - self.rows.num_prompt_R[rows]
        packed = self.sampling_rows.pack(rows, positions, num_output, bucket)
        if full:
            masks = () if masks_SW is None else (pack_masks(masks_SW, bucket, self.sampling.vocab_size),)
            state.last_token, tokens, state.sampling, logprobs = self._call(
                key, self.head, hidden_SD, state.last_token, state.sampling, packed, *masks
            )
            pending.logprobs = start_copy(logprobs)
        else:
            state.last_token, tokens = self._call(key, self.head, hidden_SD, state.last_token, packed)
        tokens.copy_to_host_async()
        pending.tokens = tokens

    def _decode(self, scheduled: SchedulerOutput, updates: list[tuple[int, int, int]]) -> PendingRun:
        """Dispatch a run of decode steps: one program, one transfer."""
        requests, state = self.reader.read(scheduled), self.state
        rows, positions = requests.rows, requests.num_computed + 1
        full = self.sampling_rows.any_full(rows)
        kind = "decode_full" if full else "decode"
        bucket = self.programs.smallest_ready(kind, len(rows), tuple(self.decode_layouts))
        layout = self.decode_layouts[bucket]
        while len(updates) > layout.step.num_updates:
            updates = self._write_tables(updates)
        num_output = positions - self.rows.num_prompt_R[rows]
        lines_SF = self.sampling_rows.pack(rows, positions, num_output, layout.num_lines)
        packed = pack_run(layout, requests, self.rows, lines_SF, updates)
        donated = (state.kv, state.tables, state.last_token, state.sampling if full else None)
        key = ProgramKey(kind, bucket)
        donated, tokens, logprobs = self._call(key, self.params, self.head, donated, packed)
        state.kv, state.tables, state.last_token = donated[:3]
        if full:
            state.sampling = donated[3]
        buckets = StepBuckets(bucket, layout.num_lines, full)
        request_ids = list(scheduled.request_ids)
        return PendingRun(
            scheduled.step_id, request_ids, start_copy(tokens), start_copy(logprobs), buckets, self.counts.add
        )

    def _prompt_logprobs(self, scheduled: SchedulerOutput, requests: StepRequests, pending: "PendingStep") -> None:
        """Log probabilities of the prompt tokens that follow those computed in this step, a tile at a time."""
        if not self.rows.prompt_logprobs_R.any():
            return
        wanted = self.rows.prompt_logprobs_R[requests.rows]
        starts = requests.ends - requests.num_scheduled
        key = ProgramKey("prompt_logprobs")
        for i in np.flatnonzero(wanted):
            row, computed = requests.rows[i], int(requests.num_computed[i])
            end = min(computed + int(requests.num_scheduled[i]), int(self.rows.num_prompt_R[row]) - 1)
            for first in range(computed, end, PROMPT_LOGPROB_TILE):
                count = min(PROMPT_LOGPROB_TILE, end - first)
                packed = np.zeros((2, PROMPT_LOGPROB_TILE), np.int32)
                packed[0, :count] = int(starts[i]) + first - computed + np.arange(count)
                packed[1, :count] = self.rows.token_ids[row][first + 1 : first + 1 + count]
                tile = start_copy(self._call(key, self.head, self.state.hidden, packed))
                pending.prompt_tiles.append((scheduled.request_ids[i], first + 1, count, tile))

    def _call(self, key: ProgramKey, *arguments: Any) -> Any:
        """Call a program. Its numpy arguments are what the step moves to the device on purpose: a compiled program
        moves one in 4 us, where `jax.device_put` takes 90."""
        with jax.transfer_guard_host_to_device("allow"):
            return self.programs[key](*arguments)


def start_copy(tree: Any) -> Any:
    """Begin to copy arrays to the host, so that reading them later does not wait for the transfer."""
    for leaf in jax.tree.leaves(tree):
        leaf.copy_to_host_async()
    return tree


@dataclass
class PendingStep:
    """A dispatched step: the only place that reads arrays back."""

    step_id: int
    request_ids: list[str] = field(default_factory=list)
    tokens: Any = None
    logprobs: LogprobOutput | None = None
    prompt_tiles: list[tuple[str, int, int, LogprobOutput]] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    buckets: StepBuckets | None = None
    draw: Callable[[np.ndarray], None] | None = None  # of a masked step: its second half

    def result(self) -> ModelRunnerOutput:
        """Wait for the step. Raises EngineError when the devices could not compute it."""
        try:
            return self._read()
        except jax.errors.JaxRuntimeError as error:
            raise EngineError(f"step {self.step_id} failed on the device: {error}") from error

    def _read(self) -> ModelRunnerOutput:
        output = ModelRunnerOutput(self.step_id, self.request_ids, failed=self.refused, buckets=self.buckets)
        output.prompt_logprobs = self._read_prompt_logprobs()
        n = len(self.request_ids)
        if n:
            tokens = np.asarray(self.tokens)[:n]
            good = tokens >= 0
            if not good.all():
                output.failed.update((self.request_ids[i], NOTHING_TO_DRAW) for i in np.flatnonzero(~good))
            if self.refused:
                good &= [request_id not in self.refused for request_id in self.request_ids]
            output.sampled_token_ids = tokens[:, None].tolist()
            if not good.all():
                output.sampled_token_ids = [line if ok else [] for line, ok in zip(output.sampled_token_ids, good)]
        if self.logprobs is not None:
            lines = jax.tree.map(lambda array: np.asarray(array)[:n][good], self.logprobs)
            output.logprobs = SampledLogprobs(lines.token_ids_SJ, lines.logprobs_SJ, lines.ranks_S)
        return output

    def _read_prompt_logprobs(self) -> dict[str, PromptLogprobs]:
        """The tiles of each request, joined."""
        tiles: dict[str, list[tuple[int, int, LogprobOutput]]] = {}
        for request_id, start, count, tile in self.prompt_tiles:
            tiles.setdefault(request_id, []).append((start, count, jax.device_get(tile)))
        return {
            request_id: PromptLogprobs(
                parts[0][0],
                np.concatenate([tile.token_ids_SJ[:count] for _, count, tile in parts]),
                np.concatenate([tile.logprobs_SJ[:count] for _, count, tile in parts]),
                np.concatenate([tile.ranks_S[:count] for _, count, tile in parts]),
            )
            for request_id, parts in tiles.items()
        }
