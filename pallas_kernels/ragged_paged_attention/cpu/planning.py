"""What attention's kernels are told of a step, as LLVM IR: all of a plan in one call, by one thread.

It is what `plans.by_xla` says, which XLA would make some twenty kernels of. Each is another one, and so is compiled by
itself, where those of layers are compiled once for all layers.
"""

import contextlib
from collections.abc import Iterator

from llvmlite import ir

from pallas_kernels.llvm.builder import I32, Builder, whole
from pallas_kernels.llvm.xla_ffi import Frame, kernel_module
from pallas_kernels.ragged_paged_attention import sharing
from pallas_kernels.ragged_paged_attention.cpu.plans import LEAST_PART_SLOTS, MULTIPLE, REAL, SHARES, TILED, TILED_FROM
from pallas_kernels.token_places import NOWHERE

STARTS, LENGTHS, TABLES, SETTINGS, SHARED = range(5)
"""Operands: query_start_loc_R1, seq_lens_R, block_tables_RM, (block size, window or 0), and shared_6R if rows may
share anything. The last is visible_end_T if tokens may see what stands behind them."""
BLOCKS, OFFSETS, HOW, SEEN, ROWS, TOKENS, RANGES, SOURCES, SPANS, SPAN_TOKENS, BEFORE = range(11)
"""Results: as `plans.KernelPlan` has them, of tokens and of rows; where there are spans, those of spans, and room for
R + 1 numbers."""


def kernel(has_spans: bool, has_ends: bool) -> ir.Module:
    def chunk(b: Builder, frame: Frame, i: ir.Value) -> None:
        planning = Planning(b, frame, has_spans, has_ends)
        planning.plan_rows()
        if has_spans:
            planning.plan_spans()

    return kernel_module(lambda b, frame: whole(1), chunk)


class Planning:
    """In the function that `b` writes."""

    def __init__(self, b: Builder, frame: Frame, has_spans: bool, has_ends: bool):
        self.b, self.frame, self.has_spans = b, frame, has_spans
        self.ends = SHARED + has_spans if has_ends else None
        self.num_rows, self.num_tokens = frame.extent(LENGTHS, 0), frame.result_extent(ROWS, 0)
        self.block_size, self.window = (b.integer(frame.operand(SETTINGS), whole(i)) for i in range(2))
        self.num_real = self._start(self.num_rows)

    def plan_rows(self) -> None:
        b = self.b
        with b.counting(whole(0), self.num_rows, whole(1)) as (row, _):
            start, end, length = self._start(row), self._start(b.add(row, whole(1))), self._of(LENGTHS, row)
            own = self._shared(sharing.OWN, row) if self.has_spans else whole(0)
            is_tiled = b.icmp_signed(">=", b.sub(end, start), whole(TILED_FROM))
            last = b.select(is_tiled, end, start)
            for line, value in enumerate((start, last, row, own, whole(NOWHERE), own)):
                self._write_line(SOURCES, line, row, value)
            flags = b.or_(self._flag(is_tiled, TILED), self._flag(b.icmp_signed(">", own, whole(0)), SHARES))
            with self._places(row, start, end) as token:
                position = b.add(b.sub(length, end), token)
                self._plan_token(row, token, position, own, is_tiled, flags)

    def plan_spans(self) -> None:
        """Rows side by side in the order of their spans, and the spans as sources of tiles of those."""
        b, before = self.b, self.frame.result(BEFORE)
        with b.counting(whole(0), self.num_rows, whole(1), [whole(0)]) as (place, now):
            self._write(BEFORE, place, now[0])
            row = self._shared(sharing.ROWS, place)
            start, end = self._start(row), self._start(b.add(row, whole(1)))
            after = b.add(now[0], b.sub(end, start))
            with self._places(place, now[0], after) as x:
                self._write(SPAN_TOKENS, x, b.add(b.sub(start, now[0]), x))
            now[0] = after
        self._write(BEFORE, self.num_rows, now[0])
        with b.counting(whole(0), self.num_rows, whole(1)) as (span, _):
            first, last = (self._shared(line, span) for line in (sharing.FIRST, sharing.LAST))
            lines = (
                b.integer(before, first),
                b.integer(before, last),
                self._shared(sharing.ROWS, first),
                self._shared(sharing.BEGIN, span),
                self._shared(sharing.END, span),
                whole(0),
            )
            for line, value in enumerate(lines):
                self._write_line(SPANS, line, span, value)

    @contextlib.contextmanager
    def _places(self, row: ir.Value, start: ir.Value, end: ir.Value) -> Iterator[ir.Value]:
        """A loop over the tokens of a row; the last row has all that are left."""
        b = self.b
        is_last = b.icmp_signed("==", b.add(row, whole(1)), self.num_rows)
        stop = b.select(is_last, self.num_tokens, b.smaller(end, self.num_tokens))
        with b.counting(start, stop, whole(1)) as (token, _):
            yield token

    def _plan_token(
        self, row: ir.Value, token: ir.Value, position: ir.Value, own: ir.Value, is_tiled: ir.Value, flags: ir.Value
    ) -> None:
        b = self.b
        is_real = b.icmp_signed("<", token, self.num_real)
        block, offset = b.sdiv(position, self.block_size), b.srem(position, self.block_size)
        width = self.frame.extent(TABLES, 1)
        block = b.larger(b.smaller(block, b.sub(width, whole(1))), whole(0))
        block_id = self._of(TABLES, b.add(b.mul(row, width), block))
        first = b.larger(b.add(b.sub(position, self.window), whole(1)), whole(0))
        first = b.select(b.icmp_signed("==", self.window, whole(0)), whole(0), first)
        is_single = b.and_(is_real, b.not_(is_tiled))
        for result, value in (
            (BLOCKS, b.select(is_real, block_id, whole(NOWHERE))),
            (OFFSETS, offset),
            (TOKENS, token),
            (HOW, b.or_(flags, self._flag(is_real, REAL))),
            (ROWS, b.select(is_single, row, whole(-1))),
        ):
            self._write(result, token, value)
        end = None if self.ends is None else self._of(self.ends, token)
        self._write_pair(SEEN, token, first, position if end is None else b.sub(end, whole(1)))
        self._plan_parts(token, b.larger(first, own), b.add(position, whole(1)) if end is None else end)

    def _plan_parts(self, token: ir.Value, begin: ir.Value, end: ir.Value) -> None:
        """The slots [begin, end) of a token in parts, as `plans.parts` cuts them."""
        b, num_parts = self.b, self.frame.result_extent(RANGES, 0)
        first = b.and_(begin, whole(-MULTIPLE))
        each = b.sdiv(b.add(b.sub(end, first), b.sub(num_parts, whole(1))), num_parts)
        each = b.and_(b.add(each, whole(MULTIPLE - 1)), whole(-MULTIPLE))
        several = b.icmp_signed(">", num_parts, whole(1))
        each = b.select(several, b.larger(each, whole(LEAST_PART_SLOTS)), each)
        with b.counting(whole(0), num_parts, whole(1)) as (part, _):
            here = b.add(first, b.mul(part, each))
            stop = b.smaller(b.add(here, each), end)
            index = b.add(b.mul(part, self.num_tokens), token)
            self._write_pair(RANGES, index, b.smaller(b.larger(here, begin), stop), stop)

    # ---- arrays of int32 ----

    def _of(self, operand: int, index: ir.Value) -> ir.Value:
        return self.b.integer(self.frame.operand(operand), index)

    def _start(self, row: ir.Value) -> ir.Value:
        return self._of(STARTS, row)

    def _shared(self, line: int, index: ir.Value) -> ir.Value:
        return self._of(SHARED, self.b.add(self.b.mul(whole(line), self.num_rows), index))

    def _flag(self, is_so: ir.Value, flag: int) -> ir.Value:
        return self.b.select(is_so, whole(flag), whole(0))

    def _write(self, result: int, index: ir.Value, value: ir.Value) -> None:
        b = self.b
        b.write(b.trunc(value, I32), self.frame.result(result), b.mul(index, whole(4)), align=4)

    def _write_pair(self, result: int, index: ir.Value, first: ir.Value, second: ir.Value) -> None:
        at = self.b.mul(index, whole(2))
        self._write(result, at, first)
        self._write(result, self.b.add(at, whole(1)), second)

    def _write_line(self, result: int, line: int, index: ir.Value, value: ir.Value) -> None:
        """Into one of the lines of sources, each of which has a number for each row."""
        self._write(result, self.b.add(self.b.mul(whole(line), self.num_rows), index), value)
