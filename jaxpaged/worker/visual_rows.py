"""What the rows of requests with pictures bring to steps besides tokens: made when a row is taken, cut by each step.

A token that an embedding replaces is uploaded as the slot of the encoder cache in which that lies; the slots are known
once a step computes some token of the picture. Where tokens of a picture see each other both ways, each has the end of
what it sees; where a token has three positions, what is added to its place to get them. Both follow from the prompt
alone, so they are right for every chunk, and from wherever a cached beginning ends. Rows without pictures are not
visited.

Nothing here knows what is in the encoder cache, nor when.
"""

from collections.abc import Callable, Sequence

import numpy as np

from jaxpaged.messages import MultiModalFeature, NewRequestData
from jaxpaged.worker.step.packed import StepLayout, StepParts, StepRequests

RopeOffsets = Callable[[Sequence[MultiModalFeature], int], tuple[np.ndarray, int]]
"""See `models.vision.interface.Vision`."""


class VisualRows:
    """Of one engine. `page_size`: embeddings in a page of the encoder cache. `bidirectional` and `rope_offsets` are the
    tower's."""

    def __init__(self, max_num_seqs: int, page_size: int, bidirectional: bool, rope_offsets: RopeOffsets | None):
        self._page_size, self._bidirectional, self._rope_offsets = page_size, bidirectional, rope_offsets
        self._features: dict[int, list[MultiModalFeature]] = {}  # of rows that have any
        self._ids: dict[int, np.ndarray] = {}  # as they are uploaded
        self._visible_ends: dict[int, np.ndarray] = {}
        self._offsets: dict[int, np.ndarray] = {}
        self._num_prompt_R = np.zeros(max_num_seqs + 1, np.int32)  # of these rows, 0 for others
        self._delta_R = np.zeros(max_num_seqs + 1, np.int32)  # what is added behind the prompt, in all three
        self._behind: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
        """Of the last step, if all of its rows were behind their prompts: rows, tokens of each, what is added."""

    def add(self, row: int, request: NewRequestData) -> np.ndarray:
        """A request with pictures gets a row: its tokens as they are uploaded."""
        self._behind = None
        features, num_prompt = request.mm_features, request.num_prompt_tokens
        self._features[row], self._num_prompt_R[row] = features, num_prompt
        self._ids[row] = np.array(request.token_ids, np.int32)
        if self._bidirectional:
            ends = self._visible_ends[row] = np.zeros(num_prompt, np.int32)
            for feature in features:
                for start, length in feature.runs:
                    ends[start : start + length] = start + length
        if self._rope_offsets is not None:
            self._offsets[row], self._delta_R[row] = self._rope_offsets(features, num_prompt)
        return self._ids[row]

    def remove(self, row: int) -> None:
        """A row is taken back, which may have had none."""
        if self._num_prompt_R[row]:
            self._behind = None
            for kept in (self._features, self._ids, self._visible_ends, self._offsets):
                kept.pop(row, None)
            self._num_prompt_R[row] = self._delta_R[row] = 0

    def feature(self, row: int, index: int) -> MultiModalFeature:
        """A picture of a row."""
        return self._features[row][index]

    def place(self, row: int, index: int, page_ids: Sequence[int]) -> None:
        """The embeddings of a picture lie in these pages."""
        feature, ids = self._features[row][index], self._ids[row]
        slots = slots_of(page_ids, self._page_size, feature.num_embeds)
        first = 0
        for start, length in feature.runs:
            ids[start : start + length] = -2 - slots[first : first + length]
            first += length

    def fill(self, layout: StepLayout, parts: StepParts, requests: StepRequests) -> None:
        """Write what a step says of pictures. Its parts are zero."""
        rows, counts = requests.rows, requests.num_scheduled
        behind = self._behind
        if behind is not None and behind[0] is rows and behind[1] is counts:  # while all decode, these stay the same
            if layout.has_rope_offsets:
                parts.rope_offsets_3T.reshape(3, -1)[:, : len(behind[2])] = behind[2]
            return
        num_prompt, deltas = self._num_prompt_R[rows], self._delta_R[rows].repeat(counts)
        if layout.has_rope_offsets:
            offsets_3T = parts.rope_offsets_3T.reshape(3, layout.num_tokens)
            offsets_3T[:, : len(deltas)] = deltas
        in_prompts = (requests.num_computed < num_prompt).nonzero()[0]
        self._behind = None if len(in_prompts) else (rows, counts, deltas)
        for i in in_prompts:
            row, computed = int(requests.rows[i]), int(requests.num_computed[i])
            count = min(int(num_prompt[i]) - computed, int(requests.num_scheduled[i]))
            start = int(requests.ends[i]) - int(requests.num_scheduled[i])
            here, there = slice(start, start + count), slice(computed, computed + count)
            if layout.has_visible_ends:
                parts.visible_ends_T[here] = self._visible_ends[row][there]
            if layout.has_rope_offsets:
                offsets_3T[:, here] = self._offsets[row][:, there]


def slots_of(page_ids: Sequence[int], page_size: int, num_embeds: int) -> np.ndarray:
    """The slots of the encoder cache of so many embeddings, in their order: int32."""
    slots = np.array(page_ids, np.int32)[:, None] * page_size + np.arange(page_size, dtype=np.int32)
    assert slots.size >= num_embeds, f"{len(page_ids)} pages of {page_size} are too few for {num_embeds} embeddings"
    return slots.reshape(-1)[:num_embeds]
