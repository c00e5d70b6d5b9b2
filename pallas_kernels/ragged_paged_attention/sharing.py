"""Spans of the context that several rows of a step hold in the same blocks, so that each is read once for all of them.

Rows with equal beginnings form a tree: a system prompt that all hold, below it the documents that some of them ask
about. Each edge with more than one row below it is a span: slots [begin, end) of the context, in whole units, and the
rows that hold them in the same blocks. A span is taken if the span before it was, and if tiles of all its queries cost
less than every row by itself (`SharedWork`); how long it is does not matter to that, since both costs grow with it. But
all that a step saves must be worth what sharing costs it whatever is shared. So what a row shares is one piece from the
beginning of its table, and the rest of its context is its own.

The host finds spans in numpy (`fill_spans`), as an int32 array [6, R] whose rows are numbered below; entries behind
those in use are zero. This module knows neither devices nor who owns blocks. It relies on one thing only: that the
block tables of a span's rows are equal there.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

ROWS, OWN, FIRST, LAST, BEGIN, END = range(6)
"""ROWS: rows of the step, those of a span side by side. OWN: of each row of the step, the slot where its own part
begins. FIRST, LAST: a span is of the rows [FIRST, LAST) of ROWS. BEGIN, END: slots of the context."""
NUM_LINES = 6


class SharedWork(NamedTuple):
    """What sharing costs a backend. Spans begin and end at multiples of `unit` slots; `tile` queries read them at a
    time, in the time in which `break_even` single queries read as much one by one.

    overhead: slots that single queries read in the time that it takes to share anything at all. most_tiles: for how
    many tiles a step's lists have room, where each span has one more than its queries fill. is_launched: a step in
    which nobody shares anything pays for launches all the same, unless its program has none.
    """

    unit: int
    tile: int
    break_even: int
    overhead: int = 0
    most_tiles: int = 2**30
    is_launched: bool = False


def room_for_tiles(num_tokens: int, tile: int) -> int:
    """The `most_tiles` of lists of a fixed length: four spans deep, and a short one for each of 256 rows."""
    return 4 * -(-num_tokens // tile) + min(num_tokens, 256)


class Span(NamedTuple):
    """Rows [first, last) in the order of their tables, units [begin, end) of their contexts."""

    first: int
    last: int
    begin: int
    end: int


def fill_spans(
    shared_6R: np.ndarray, rows: Sequence[int], common: Sequence[int], num_queries: np.ndarray, work: SharedWork
) -> None:
    """Write the spans of a step into an array of zeros.

    `rows`, places in the step, are sorted so that equal beginnings are side by side; `common[i]` is how many units
    row i has in common with the one before it, 0 for the first. `num_queries` is of each row of the step.
    """
    num_sorted = num_queries[list(rows)]
    tiles_alone = np.minimum(num_sorted, -(-num_sorted // work.tile) * work.break_even)
    queries_before, cost_before = ([0, *np.cumsum(x).tolist()] for x in (num_sorted, tiles_alone))
    own, taken, saved, room = [0] * len(rows), list[Span](), 0, work.most_tiles
    for span in spans_of(common):
        num_tiles = -(-(queries_before[span.last] - queries_before[span.first]) // work.tile)
        gain = cost_before[span.last] - cost_before[span.first] - num_tiles * work.break_even
        if own[span.first] == span.begin and gain > 0 and num_tiles < room:
            own[span.first : span.last] = [span.end] * (span.last - span.first)
            taken.append(span)
            saved += gain * (span.end - span.begin) * work.unit
            room -= num_tiles + 1
    if saved > work.overhead:
        shared_6R[ROWS, : len(rows)] = rows
        shared_6R[OWN, list(rows)] = np.multiply(own, work.unit)
        shared_6R[FIRST:, : len(taken)] = np.array(taken).T
        shared_6R[BEGIN:, : len(taken)] *= work.unit


def spans_of(common: Sequence[int]) -> list[Span]:
    """All spans of rows with so many units in common (see `fill_spans`), each behind the one that it continues."""
    spans, open_spans = [], [(0, 0)]  # (how many units, the first row that has them)
    for row, depth in enumerate([*common[1:], 0]):
        first = row
        while open_spans[-1][0] > depth:
            end, first = open_spans.pop()
            spans.append(Span(first, row + 1, max(open_spans[-1][0], depth), end))
        if open_spans[-1][0] < depth:
            open_spans.append((depth, first))
    return spans[::-1]
