"""The output stage of an engine that generates: it draws tokens, and log probabilities of prompts.

Its programs are dispatched after the forward pass, or with it in one program (a multi-step decode), and read when the
step is over. The output stage of an engine that pools is in `pooling.py`.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxpaged.messages import (
    NOTHING_TO_DRAW,
    ModelRunnerOutput,
    NewRequestData,
    ProgramKey,
    PromptLogprobs,
    SampledLogprobs,
    SamplingMasks,
)
from jaxpaged.sampling.custom import CustomProcessors
from jaxpaged.sampling.logprobs import LogprobOutput
from jaxpaged.sampling.rows import SamplingRows
from jaxpaged.sampling.state import StateLayout, pack_masks
from jaxpaged.worker.device import Device, start_copy
from jaxpaged.worker.model_runner import Reading, StageOutput, Step
from jaxpaged.worker.programs.declare import PLAIN_KINDS, VERIFY_KINDS, ProgramKind
from jaxpaged.worker.request_rows import RequestRows
from jaxpaged.worker.routed_experts import ExpertsOfSteps
from jaxpaged.worker.step.functions import PROMPT_LOGPROB_TILE
from jaxpaged.worker.step.input_batch import multi_step_lines
from jaxpaged.worker.step.packed import MultiStepLayout
from jaxpaged.worker.step.row_tokens import CORRUPTED, NOT_COMPUTED
from jaxpaged.worker.step.row_uploads import admit
from jaxpaged.worker.step.verify import verify_lines

NOT_NUMBERS = (
    "no token can be drawn: the model's logits for this request are not finite numbers. Other requests are unharmed."
)


class Sampler:
    """Draws tokens: one a request, or as many as it may get where drafts are verified, or where several decode steps
    are one program. `ranks`: the rows of each attention rank. Drafts and multi-step decodes are those of one."""

    def __init__(
        self,
        ranks: Sequence[RequestRows],
        layout: StateLayout,
        custom: CustomProcessors,
        multi_step_layouts: Mapping[int, MultiStepLayout],
    ):
        self.ranks, self.layout, self.custom, self.multi_step_layouts = ranks, layout, custom, multi_step_layouts
        self.scorer = PromptScorer(ranks)
        self.tables = [SamplingRows(layout.max_num_seqs) for _ in ranks]

    def admit(self, device: Device, rank: int, row: int, request: NewRequestData) -> None:
        for upload in admit(row, request, self.tables[rank], self.layout, self.custom):
            key, state = ProgramKey(upload.program), device.state
            state.row_state = device.call(key, state.row_state, self._for_rank(rank, upload.packed))

    def _for_rank(self, rank: int, packed: np.ndarray) -> np.ndarray:
        """An upload for a row, which comes first in it, of one rank: the others write their null rows."""
        if len(self.ranks) == 1:
            return packed
        of_ranks = np.tile(packed, (len(self.ranks), 1))
        of_ranks[np.arange(len(self.ranks)) != rank, 0] = self.ranks[0].null_row
        return of_ranks.reshape(-1)

    def dispatch(self, device: Device, step: Step, masks_NW: np.ndarray | None = None) -> StageOutput:
        programs, readings = step.scheduled.programs, list[Reading]()
        if programs.multi_step is not None:
            return self._decode_steps(device, step, programs.multi_step)
        if max([rows.num_scored for rows in self.ranks]) and (tiles := self.scorer.score(device, step)).by_request:
            readings.append(tiles)
        key = programs.finish
        if key is None:
            return StageOutput(readings)  # nobody's prompt is complete
        sampling, state = [rank.sampling() for rank in step.ranks], device.state
        lines, hidden, num_most = self.lines([rows for _, rows in sampling], key.size), step.hidden_SD, 1
        if key.kind in VERIFY_KINDS.values():
            (rank,) = step.ranks
            num_tokens = rank.num_most()
            lines = verify_lines(lines, rank.requests.ends[rank.requests.samples] - num_tokens, num_tokens)
            hidden, num_most = state.hidden, state.rows.drafts_RK.shape[1] + 1
        is_full = key.kind not in PLAIN_KINDS
        masks = () if masks_NW is None else (self._pack_masks(masks_NW, step, num_most, key.size),)
        drawing = device.drawing(key, step.program)
        state.rows, tokens, kept, logprobs, *num_drafts = device.call(
            drawing, device.head_for(drawing), hidden, state.rows, state.row_state if is_full else None, lines, *masks
        )
        if is_full:
            state.row_state = kept
        drawn = DrawnTokens([ids for ids, _ in sampling], start_copy(tokens), start_copy(logprobs))
        if num_drafts:
            drawn.num_drafts = start_copy(num_drafts[0])
        readings.append(drawn)
        return StageOutput(readings, len(self.ranks) * key.size, is_full)

    def _pack_masks(self, masks_NW: np.ndarray, step: Step, num_most: int, size: int) -> np.ndarray:
        """The masks of all ranks, whose lines follow each other."""
        num_most_of = [rank.num_most() for rank in step.ranks]
        parts = np.split(masks_NW, np.cumsum([sum(each) for each in num_most_of])[:-1])
        pack = partial(pack_masks, num_most=num_most, size=size, vocab_size=self.layout.vocab_size)
        return np.concatenate(list(map(pack, parts, num_most_of)))

    def _decode_steps(self, device: Device, step: Step, key: ProgramKey) -> StageOutput:
        """Several decode steps, the forward passes included."""
        sampling, state, layout = (
            [rank.sampling() for rank in step.ranks],
            device.state,
            self.multi_step_layouts[key.size],
        )
        lines_SF = self.lines([rows for _, rows in sampling], layout.num_lines)
        lines_of = zip(np.split(lines_SF, len(self.ranks)), step.ranks, self.ranks, sampling, strict=True)
        lines_SC = np.concatenate(
            [
                multi_step_lines(lines, part.num_most(), own.stop_ids_RJ[rows])
                for lines, part, own, (_, rows) in lines_of
            ]
        )
        is_full = key.kind not in PLAIN_KINDS
        donated = state.kv, state.tables, state.rows, state.row_state if is_full else None
        state.kv, state.tables, state.rows, kept, tokens, logprobs, experts = device.call(
            step.program,
            device.params_for(step.program),
            device.head_for(step.program),
            *donated,
            step.packed,
            lines_SC,
        )
        if is_full:
            state.row_state = kept
        count, ids = partial(device.counts.add, bucket=key.size, ranks=len(self.ranks)), [ids for ids, _ in sampling]
        readings: list[Reading] = [DrawnTokens(ids, start_copy(tokens), start_copy(logprobs), count)]
        if experts is not None:
            readings.append(ExpertsOfSteps([part.num_most() for part in step.ranks], start_copy(experts)))
        return StageOutput(readings, len(self.ranks) * layout.num_lines, is_full)

    def lines(self, rows_of_ranks: Sequence[np.ndarray], bucket: int) -> np.ndarray:
        """What some rows of each rank ask for. Positions are counted from 0: where a row is, is known to the device."""
        lines = [
            table.pack(rows, 0, -rank.num_prompt_R[rows], bucket)
            for table, rank, rows in zip(self.tables, self.ranks, rows_of_ranks, strict=True)
        ]
        return lines[0] if len(lines) == 1 else np.concatenate(lines)


@dataclass
class DrawnTokens:
    """`tokens` is `[I, S]`, a line for each token that a row could get, and so are the log probabilities; the requests
    are the first rows. So it is for each attention rank, one after the other along the first axis. How many steps
    there were is known at the end: `count` is then told the tokens of each."""

    ids_of_ranks: Sequence[list[str]]
    tokens: Any
    logprobs: LogprobOutput | None
    count: Callable[[int], None] | None = None
    num_drafts: Any = None  # of each request, where drafts were verified

    def lines(self, array: Any) -> np.ndarray:
        """`[requests, I, ...]` of all requests, those of one rank after those of another."""
        array, count = np.asarray(array), len(self.ids_of_ranks)
        if count == 1:
            return array.swapaxes(0, 1)[: len(self.ids_of_ranks[0])]
        of_ranks = array.reshape(count, -1, *array.shape[1:]).swapaxes(1, 2)
        return np.concatenate([lines[: len(ids)] for lines, ids in zip(of_ranks, self.ids_of_ranks)])

    def read(self, output: ModelRunnerOutput) -> None:
        request_ids = self.ids_of_ranks[0]
        if len(self.ids_of_ranks) > 1:
            request_ids = list(itertools.chain.from_iterable(self.ids_of_ranks))
        if self.num_drafts is not None:
            output.num_drafts = np.asarray(self.num_drafts)[: len(request_ids)].tolist()
        tokens_SI = self.lines(self.tokens)
        good_SI = tokens_SI >= 0
        output.request_ids, output.sampled_token_ids = request_ids, tokens_SI.tolist()
        if output.failed:
            good_SI &= np.array([[request_id not in output.failed] for request_id in request_ids])
        if not good_SI.all():
            output.sampled_token_ids = [tokens_I[good_I].tolist() for tokens_I, good_I in zip(tokens_SI, good_SI)]
            corrupted_S = (tokens_SI == CORRUPTED).any(axis=1)
            output.corrupted += [request_ids[place] for place in np.flatnonzero(corrupted_S)]
            for place in np.flatnonzero(((tokens_SI < 0) & (tokens_SI != NOT_COMPUTED)).any(axis=1)):
                reason = NOT_NUMBERS if corrupted_S[place] else NOTHING_TO_DRAW
                output.failed.setdefault(request_ids[place], reason)
        if self.logprobs is not None:
            lines = jax.tree.map(lambda array: self.lines(array)[good_SI], self.logprobs)
            output.logprobs = SampledLogprobs(lines.token_ids_SJ, lines.logprobs_SJ, lines.ranks_S, lines.processed_S2)
            if lines.mask_SW is not None:
                output.logprobs.masks = sampling_masks(lines.mask_SW)
        if self.count is not None:  # at last: a wait may be interrupted, and begun again
            for num_tokens in np.count_nonzero(tokens_SI != NOT_COMPUTED, axis=0):
                if num_tokens:
                    self.count(int(num_tokens))


def sampling_masks(mask_NW: np.ndarray) -> SamplingMasks:
    """The tokens whose bits are set. Few are: words without any are passed over."""
    line_X, word_X = np.nonzero(mask_NW)
    bytes_X4 = mask_NW[line_X, word_X].astype("<u4").view(np.uint8).reshape(-1, 4)
    bits_X32 = np.unpackbits(bytes_X4, axis=1, bitorder="little")
    place_Y, bit_Y = np.nonzero(bits_X32)
    counts = np.bincount(line_X[place_Y], minlength=len(mask_NW))
    return SamplingMasks((word_X[place_Y] * 32 + bit_Y).astype(np.int32), counts.astype(np.int32))


class PromptScorer:
    """Log probabilities of the prompt tokens that follow those computed in a step, a tile at a time."""

    def __init__(self, ranks: Sequence[RequestRows]):
        self.ranks = ranks

    def score(self, device: Device, step: Step) -> "PromptTiles":
        """Those that rows of the step want; none for rows that only decode."""
        tiles: dict[str, list[Tile]] = {}
        for rank, rows in enumerate(self.ranks):
            if rows.num_scored:
                tiles |= self._score(device, step, rank)
        return PromptTiles(tiles)

    def _score(self, device: Device, step: Step, rank: int) -> dict[str, list["Tile"]]:
        """Those of a rank, by request. While a tile of it is computed the others compute one in vain."""
        rows, (scheduled, requests) = self.ranks[rank], step.ranks[rank]
        tiles: dict[str, list[Tile]] = {}
        starts = requests.ends - requests.num_scheduled
        for i in np.flatnonzero(rows.first_scored_R[requests.rows]):
            row, computed = requests.rows[i], int(requests.num_computed[i])
            end = min(computed + int(requests.num_scheduled[i]), int(rows.num_prompt_R[row]) - 1)
            for first in range(max(computed, int(rows.first_scored_R[row]) - 1), end, PROMPT_LOGPROB_TILE):
                count = min(PROMPT_LOGPROB_TILE, end - first)
                packed = np.zeros((len(self.ranks), 2, PROMPT_LOGPROB_TILE), np.int32)
                packed[rank, 0, :count] = int(starts[i]) + first - computed + np.arange(count)
                packed[rank, 1, :count] = rows.token_ids[row][first + 1 : first + 1 + count]
                packed = packed.reshape(-1, PROMPT_LOGPROB_TILE)
                key = ProgramKey(ProgramKind.PROMPT_LOGPROBS)
                tile = device.call(key, device.head_for(key), device.state.hidden, packed)
                own = slice(rank * PROMPT_LOGPROB_TILE, rank * PROMPT_LOGPROB_TILE + count)
                tiles.setdefault(scheduled.request_ids[i], []).append((first + 1, own, start_copy(tile)))
        return tiles


Tile = tuple[int, slice, LogprobOutput]
"""(First token, where its lines lie in the arrays, arrays)."""


@dataclass
class PromptTiles:
    """The tiles of each request, in order."""

    by_request: Mapping[str, Sequence[Tile]]

    def read(self, output: ModelRunnerOutput) -> None:
        for request_id, tiles in self.by_request.items():
            parts = [(own, jax.device_get(tile)) for _, own, tile in tiles]
            output.prompt_logprobs[request_id] = PromptLogprobs(
                tiles[0][0],
                np.concatenate([tile.token_ids_SJ[own] for own, tile in parts]),
                np.concatenate([tile.logprobs_SJ[own] for own, tile in parts]),
                np.concatenate([tile.ranks_S[own] for own, tile in parts]),
            )
