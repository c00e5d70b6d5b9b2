"""What follows a forward pass in an engine that generates: log probabilities of prompts, and drawn tokens.

Each is dispatched after the forward pass, or with it in one program (a run of decode steps), and read when the step is
over. That of an engine that pools is in `pooling.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxpaged.messages import ModelRunnerOutput, NewRequestData, ProgramKey, PromptLogprobs, SampledLogprobs
from jaxpaged.sampling.custom import CustomProcessors
from jaxpaged.sampling.logprobs import LogprobOutput
from jaxpaged.sampling.rows import SamplingRows
from jaxpaged.sampling.state import StateLayout, pack_masks
from jaxpaged.worker.device import Device, start_copy
from jaxpaged.worker.model_runner import PendingStep, Step
from jaxpaged.worker.request_rows import RequestRows
from jaxpaged.worker.step.functions import CORRUPTED, NOT_COMPUTED, PROMPT_LOGPROB_TILE
from jaxpaged.worker.step.input_batch import run_lines
from jaxpaged.worker.step.packed import RunLayout
from jaxpaged.worker.step.row_uploads import admit
from jaxpaged.worker.step.verify import VERIFY_KINDS, verify_lines

PLAIN_KINDS = ("sample", "decode", VERIFY_KINDS["sample"])
"""Programs without the full sampler."""
NOTHING_TO_DRAW = (
    "no token can be drawn: its own structured_outputs, allowed_token_ids, logit_bias, bad_words and min_tokens leave "
    "none. Other requests are unharmed."
)
NOT_NUMBERS = (
    "no token can be drawn: the model's logits for this request are not finite numbers. Other requests are unharmed."
)


class Sampler:
    """Draws tokens: one a request, or as many as it may get where drafts are verified, or where `runs` of decode steps
    are one program."""

    def __init__(self, rows: RequestRows, layout: StateLayout, custom: CustomProcessors, runs: Mapping[int, RunLayout]):
        self.rows, self.layout, self.custom, self.runs = rows, layout, custom, runs
        self.table = SamplingRows(layout.max_num_seqs)

    def admit(self, device: Device, row: int, request: NewRequestData) -> None:
        for upload in admit(row, request, self.table, self.layout, self.custom):
            key, state = ProgramKey(upload.program), device.state
            state.finisher = device.call(key, state.finisher, upload.packed)

    def finish(self, device: Device, step: Step, pending: PendingStep) -> None:
        key = step.scheduled.programs[-1]
        if key.kind == "forward":
            return  # nobody's prompt is complete
        pending.buckets.full_sampler = key.kind not in PLAIN_KINDS
        if step.hidden_SD is None:
            self._run(device, step, pending, key)
        elif step.scheduled.masked:
            pending.draw = partial(self._draw, device, step, pending, key)
        else:
            self._draw(device, step, pending, key)

    def _draw(
        self, device: Device, step: Step, pending: PendingStep, key: ProgramKey, masks_NW: np.ndarray | None = None
    ) -> None:
        (request_ids, rows), state = step.sampling(), device.state
        pending.buckets.sample_bucket = key.size
        lines, hidden, num_most = self.lines(rows, key.size), step.hidden_SD, 1
        if key.kind in VERIFY_KINDS.values():
            num_tokens = step.num_most()
            lines = verify_lines(lines, step.requests.ends[step.requests.samples] - num_tokens, num_tokens)
            hidden, num_most = state.hidden, state.rows.drafts_RK.shape[1] + 1
        kept = state.finisher if pending.buckets.full_sampler else None
        masks = ()
        if masks_NW is not None:
            masks = (pack_masks(masks_NW, step.num_most(), num_most, key.size, self.layout.vocab_size),)
        state.rows, tokens, kept, logprobs, *num_drafts = device.call(
            key, device.head, hidden, state.rows, kept, lines, *masks
        )
        if kept is not None:
            state.finisher = kept
        drawn = DrawnTokens(request_ids, start_copy(tokens), start_copy(logprobs))
        if num_drafts:
            drawn.num_drafts = start_copy(num_drafts[0])
        pending.readings.append(drawn)

    def _run(self, device: Device, step: Step, pending: PendingStep, key: ProgramKey) -> None:
        """Several decode steps, the forward passes included."""
        (request_ids, rows), state, layout = step.sampling(), device.state, self.runs[key.size]
        pending.buckets.sample_bucket = layout.num_lines
        lines_SF, limits = self.lines(rows, layout.num_lines), step.scheduled.max_new_tokens
        lines_SC = run_lines(lines_SF, limits, self.rows.stop_ids_RJ[rows])
        kept = state.finisher if pending.buckets.full_sampler else None
        donated, tokens, logprobs = device.call(
            key, device.params, device.head, (state.kv, state.tables, state.rows, kept), step.packed, lines_SC
        )
        state.kv, state.tables, state.rows, kept = donated
        if kept is not None:
            state.finisher = kept
        count = partial(device.counts.add, bucket=key.size)
        pending.readings.append(DrawnTokens(request_ids, start_copy(tokens), start_copy(logprobs), count))

    def lines(self, rows: np.ndarray, bucket: int) -> np.ndarray:
        """What the rows ask for. Positions are counted from 0: where a row is, is known to the device."""
        return self.table.pack(rows, 0, -self.rows.num_prompt_R[rows], bucket)


@dataclass
class DrawnTokens:
    """`tokens` is `[I, S]`, a line for each token that a row could get, and so are the log probabilities; the requests
    are the first rows. How many steps a run had is known when it is over: `count` is then told the tokens of each."""

    request_ids: list[str]
    tokens: Any
    logprobs: LogprobOutput | None
    count: Callable[[int], None] | None = None
    num_drafts: Any = None  # of each request, where drafts were verified

    def read(self, output: ModelRunnerOutput) -> None:
        if self.num_drafts is not None:
            output.num_drafts = np.asarray(self.num_drafts)[: len(self.request_ids)].tolist()
        tokens_SI = np.asarray(self.tokens)[:, : len(self.request_ids)].T
        good_SI = tokens_SI >= 0
        output.request_ids, output.sampled_token_ids = self.request_ids, tokens_SI.tolist()
        if output.failed:
            good_SI &= np.array([[request_id not in output.failed] for request_id in self.request_ids])
        if not good_SI.all():
            output.sampled_token_ids = [tokens_I[good_I].tolist() for tokens_I, good_I in zip(tokens_SI, good_SI)]
            corrupted_S = (tokens_SI == CORRUPTED).any(axis=1)
            output.corrupted = [self.request_ids[place] for place in np.flatnonzero(corrupted_S)]
            for place in np.flatnonzero(((tokens_SI < 0) & (tokens_SI != NOT_COMPUTED)).any(axis=1)):
                reason = NOT_NUMBERS if corrupted_S[place] else NOTHING_TO_DRAW
                output.failed.setdefault(self.request_ids[place], reason)
        if self.logprobs is not None:
            lines = jax.tree.map(lambda array: np.asarray(array).swapaxes(0, 1)[: len(good_SI)][good_SI], self.logprobs)
            output.logprobs = SampledLogprobs(lines.token_ids_SJ, lines.logprobs_SJ, lines.ranks_S)
        if self.count is not None:  # at last: a wait may be interrupted, and begun again
            for num_tokens in np.count_nonzero(tokens_SI != NOT_COMPUTED, axis=0):
                if num_tokens:
                    self.count(int(num_tokens))


class PromptScorer:
    """Log probabilities of the prompt tokens that follow those computed in a step, a tile at a time."""

    def __init__(self, rows: RequestRows):
        self.rows = rows

    def admit(self, device: Device, row: int, request: NewRequestData) -> None:
        """The row says whether they are wanted."""

    def finish(self, device: Device, step: Step, pending: PendingStep) -> None:
        if not self.rows.prompt_logprobs_R.any():
            return
        requests, tiles = step.requests, PromptTiles()
        starts = requests.ends - requests.num_scheduled
        for i in np.flatnonzero(self.rows.prompt_logprobs_R[requests.rows]):
            row, computed = requests.rows[i], int(requests.num_computed[i])
            end = min(computed + int(requests.num_scheduled[i]), int(self.rows.num_prompt_R[row]) - 1)
            for first in range(computed, end, PROMPT_LOGPROB_TILE):
                count = min(PROMPT_LOGPROB_TILE, end - first)
                packed = np.zeros((2, PROMPT_LOGPROB_TILE), np.int32)
                packed[0, :count] = int(starts[i]) + first - computed + np.arange(count)
                packed[1, :count] = self.rows.token_ids[row][first + 1 : first + 1 + count]
                tile = device.call(ProgramKey("prompt_logprobs"), device.head, device.state.hidden, packed)
                of_request = tiles.by_request.setdefault(step.scheduled.request_ids[i], [])
                of_request.append((first + 1, count, start_copy(tile)))
        pending.readings.append(tiles)


@dataclass
class PromptTiles:
    """(first token, tokens, arrays) of each tile of a request, in order."""

    by_request: dict[str, list[tuple[int, int, LogprobOutput]]] = field(default_factory=dict)

    def read(self, output: ModelRunnerOutput) -> None:
        for request_id, tiles in self.by_request.items():
            parts = [(count, jax.device_get(tile)) for _, count, tile in tiles]
            output.prompt_logprobs[request_id] = PromptLogprobs(
                tiles[0][0],
                np.concatenate([tile.token_ids_SJ[:count] for count, tile in parts]),
                np.concatenate([tile.logprobs_SJ[:count] for count, tile in parts]),
                np.concatenate([tile.ranks_S[:count] for count, tile in parts]),
            )
