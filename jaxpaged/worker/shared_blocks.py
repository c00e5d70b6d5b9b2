"""Which rows hold the same blocks from the beginning of their tables on: kept as rows come and go, asked once a step.

Rows are kept sorted by the ids of the blocks of their prompts, so that equal beginnings are side by side. Only a row
that comes, goes, or gets blocks for more of its prompt costs anything; blocks behind the prompt are its own. What was
found for a step is kept until one of these happens, since most steps have the rows of the step before.

In a group with a window a row that began with a prefix hit holds null blocks where the window of its first token had
not begun: such a row shares only with rows that have null blocks in the same places, not with those that hold blocks
there, though both hold the same blocks behind. What one piece from the beginning of a table cannot say is read by each
row itself. Blocks that a row's window has left stay in its table here, whoever has them by then; no query reads them.

This module goes by ids alone. What attention makes of them is in `sharing.py` of `pallas_kernels`.
"""

import sys
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from pallas_kernels.ragged_paged_attention.sharing import NUM_LINES, SharedWork, fill_spans

MOST_KEPT = 8
"""Steps of which something is kept: several kinds take turns, as with drafts."""

ID_BYTES = 4
NEVER_SHARED = 1 << 24
"""Blocks of a unit that no row fills."""


class SharedBlocks:
    """The rows of one KV group with blocks of `block_size` slots. Beginnings are compared in units of `unit` slots."""

    def __init__(self, block_size: int, unit: int):
        self._block_size, self._unit_blocks = block_size, unit // block_size
        self._num_missing: dict[int, int] = {}  # blocks of a row's prompt that it has not got yet
        self._ids_of: dict[int, bytes] = {}
        self._keys: list[bytes] = []  # ids of whole units, sorted
        self._rows: list[int] = []  # of these keys
        self._common: list[int] = []  # units that each has in common with the one before
        self._kept: dict[tuple[bytes, bytes, SharedWork], np.ndarray] = {}

    def begin(self, row: int, num_prompt_tokens: int) -> None:
        """A row is taken."""
        self._num_missing[row], self._ids_of[row] = num_prompt_tokens // self._block_size, b""

    def append(self, row: int, block_ids: Sequence[int]) -> None:
        """A row gets blocks."""
        num_missing = self._num_missing[row]
        if num_missing and block_ids:
            new = np.array(block_ids[:num_missing], np.int32)
            self._num_missing[row] = num_missing - len(new)
            self._remove(row)
            self._ids_of[row] += new.tobytes()
            self._insert(row)

    def end(self, row: int) -> None:
        """A row is given back."""
        self._remove(row)
        del self._num_missing[row], self._ids_of[row]

    def fill(self, shared_6R: np.ndarray, rows: np.ndarray, num_queries: np.ndarray, work: SharedWork) -> None:
        """Write what the rows of a step share, with so many tokens of each, into an array of zeros."""
        if not any(self._common):
            return
        step = rows.tobytes(), num_queries.tobytes(), work
        if step not in self._kept:
            if len(self._kept) == MOST_KEPT:
                self._kept.clear()
            self._kept[step] = np.zeros((NUM_LINES, len(rows)), np.int32)
            fill_spans(self._kept[step], *self._of_step(rows.tolist()), num_queries, work)
        shared_6R[:, : len(rows)] = self._kept[step]

    def _of_step(self, rows: list[int]) -> tuple[list[int], list[int]]:
        """(The places of rows in a step, in the order of their keys, what each has in common with the one before)."""
        place_of = dict(zip(rows, range(len(rows))))
        places, common, least = [], [], 0
        for row, units in zip(self._rows, self._common):
            least = min(least, units)
            if row in place_of:
                places.append(place_of[row])
                common.append(least)
                least = sys.maxsize
        return places, common

    def _insert(self, row: int) -> None:
        key, keys = self._key(row), self._keys
        if key:
            i = bisect_left(keys, key)
            keys.insert(i, key)
            self._rows.insert(i, row)
            self._common.insert(i, self._units_in_common(keys[i - 1], key) if i else 0)
            if i + 1 < len(keys):
                self._common[i + 1] = self._units_in_common(key, keys[i + 1])
            self._kept.clear()

    def _remove(self, row: int) -> None:
        key = self._key(row)
        if key:
            i = self._rows.index(row, bisect_left(self._keys, key))
            del self._keys[i], self._rows[i]
            units = self._common.pop(i)
            if i < len(self._keys):
                self._common[i] = min(self._common[i], units)
            self._kept.clear()

    def _key(self, row: int) -> bytes:
        ids, unit_bytes = self._ids_of[row], self._unit_blocks * ID_BYTES
        return ids[: len(ids) // unit_bytes * unit_bytes]

    def _units_in_common(self, one: bytes, other: bytes) -> int:
        if one[:ID_BYTES] != other[:ID_BYTES]:
            return 0
        length = min(len(one), len(other)) // ID_BYTES
        differs = np.frombuffer(one, np.int32, length) != np.frombuffer(other, np.int32, length)
        return (int(differs.argmax()) if differs.any() else length) // self._unit_blocks
