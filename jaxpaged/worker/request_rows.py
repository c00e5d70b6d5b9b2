"""One row per live request, on the host and on the device, for its whole life.

A row is a request's permanent place: its line in the block tables, its last token, its sampling parameters.
Rows are taken when the runner first sees a request and given back when it finishes or is preempted. Row
`max_num_seqs`, the null row, belongs to nobody: padding points to it.
"""

from collections.abc import Sequence

import numpy as np

from jaxpaged.messages import NewRequestData
from jaxpaged.worker.shared_blocks import SharedBlocks
from jaxpaged.worker.visual_rows import VisualRows

NUM_STOP_IDS = 8
"""Stop ids of a row that the device sees. Further ones are seen by the host alone."""


class RequestRows:
    """Host side of the rows: who owns which, and what the host knows of each.

    num_known_R: tokens that the host uploaded; later ones were sampled here and are on the device.
    num_scored: how many rows want log probabilities of their prompts.
    stop_ids_RJ: tokens that end the request, padded with -1.
    num_blocks_GR: entries of the block table on the device, per KV group.
    shared: which rows hold the same blocks, per KV group; empty where attention does not ask.
    uploaded_ids: the known tokens as steps upload them, with slots of the encoder cache in place of some.
    visual: what steps say of pictures besides; None in engines of text only.
    lora_slots_R: the slot of the request's adapter; 0: it has none.
    """

    def __init__(
        self,
        max_num_seqs: int,
        num_groups: int,
        shared: Sequence[SharedBlocks] = (),
        visual: VisualRows | None = None,
    ):
        self.max_num_seqs = max_num_seqs
        self.null_row = max_num_seqs
        self.row_of: dict[str, int] = {}
        self.token_ids: list[np.ndarray | None] = [None] * max_num_seqs
        self.uploaded_ids: list[np.ndarray | None] = [None] * max_num_seqs
        self.num_known_R = np.zeros(max_num_seqs, np.int32)
        self.num_prompt_R = np.zeros(max_num_seqs, np.int32)
        self.first_scored_R = np.zeros(max_num_seqs, np.int32)
        self.num_scored = 0
        self.stop_ids_RJ = np.full((max_num_seqs, NUM_STOP_IDS), -1, np.int32)
        self.lora_slots_R = np.zeros(max_num_seqs, np.int32)
        self.num_blocks_GR = [[0] * max_num_seqs for _ in range(num_groups)]
        self.shared, self.visual = shared, visual
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self.last_ids: list[str] = []  # that `rows_of` was asked for, and its answer
        self.last_rows = np.zeros(0, np.int32)

    def rows_of(self, request_ids: list[str]) -> np.ndarray:
        """The rows of requests, int32 [n]. From step to step they are mostly the same ones, in the same order."""
        if request_ids != self.last_ids:
            self.last_ids = request_ids
            self.last_rows = np.array([self.row_of[request_id] for request_id in request_ids], np.int32)
        return self.last_rows

    def add(self, request: NewRequestData) -> int:
        """Give the request a row and remember what is known of it."""
        assert request.request_id not in self.row_of, f"request {request.request_id} has a row already"
        assert self._free, f"all {self.max_num_seqs} rows are taken; the scheduler ran more requests than that"
        row = self._free.pop()
        self.row_of[request.request_id] = row
        self.last_ids = []
        self.token_ids[row] = self.uploaded_ids[row] = np.asarray(request.token_ids, np.int32)
        if request.mm_features:
            assert self.visual is not None, "the engine takes no pictures"
            self.uploaded_ids[row] = self.visual.add(row, request)
        self.num_known_R[row] = len(request.token_ids)
        self.num_prompt_R[row] = request.num_prompt_tokens
        self.lora_slots_R[row] = request.lora_slot
        if request.sampling_params.prompt_logprobs is not None:
            self.first_scored_R[row] = max(request.sampling_params.prompt_logprob_start, 1)
            self.num_scored += 1
        stop_ids = (request.sampling_params.stop_token_ids or ())[:NUM_STOP_IDS]
        self.stop_ids_RJ[row] = -1
        self.stop_ids_RJ[row, : len(stop_ids)] = stop_ids
        for counts_R in self.num_blocks_GR:
            counts_R[row] = 0
        for group in self.shared:
            group.begin(row, request.num_prompt_tokens)
        return row

    def remove(self, request_id: str) -> None:
        """Take the row back. A request that never got one (it was never scheduled) is ignored."""
        row = self.row_of.pop(request_id, None)
        if row is not None:
            self.token_ids[row] = self.uploaded_ids[row] = None
            if self.visual is not None:
                self.visual.remove(row)
            self.num_scored -= int(self.first_scored_R[row] > 0)
            self.first_scored_R[row] = 0
            for group in self.shared:
                group.end(row)
            self._free.append(row)
            self.last_ids = []

    def append_blocks(self, row: int, block_ids: tuple[list[int], ...], updates: list[tuple[int, int, int]]) -> None:
        """Add table entries of one request to `updates`, as (place, index, block)."""
        stride = self.max_num_seqs + 1
        for group, (blocks, counts_R) in enumerate(zip(block_ids, self.num_blocks_GR, strict=True)):
            place, first = group * stride + row, counts_R[row]
            updates += [(place, first + i, block) for i, block in enumerate(blocks)]
            counts_R[row] = first + len(blocks)
        for shared, blocks in zip(self.shared, block_ids):
            shared.append(row, blocks)
