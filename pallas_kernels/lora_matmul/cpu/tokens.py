"""The instructions of what adapters add to tokens, as LLVM IR.

A is multiplied as `grouped_matmul` multiplies the weight of an expert, and what it makes stays on the stack. B's rows
are added to some registers of outputs at a time, each times one number of these.
"""

from collections.abc import Sequence

from llvmlite import ir

from pallas_kernels.few_rows_matmul.cpu.tiles import Step, Tile, step_for
from pallas_kernels.grouped_matmul.cpu.tiles import ExpertFrame, FloatStep
from pallas_kernels.llvm.builder import F32, Builder, whole
from pallas_kernels.llvm.functions import float32s, multiply_add, read_bfloat16, spread, write_bfloat16
from pallas_kernels.llvm.machine import Machine
from pallas_kernels.llvm.xla_ffi import Frame, kernel_module
from pallas_kernels.lora_matmul import MOST_RANKS

X, A, B, SLOTS, BASE = range(5)
"""Operands: x_TI, a_SrI, b_SrO, slot_T, base_TO."""


def kernel(weights: str, out: str, tile: int, machine: Machine) -> ir.Module:
    """The kernel for types of weights and of results, in which so many tokens are a thread's piece of work."""
    step: Step = FloatStep(machine) if weights == "float32" else step_for(weights, machine)

    def num_chunks(b: Builder, frame: Frame) -> ir.Value:
        return b.sdiv(b.add(frame.extent(X, 0), whole(tile - 1)), whole(tile))

    def chunk(b: Builder, frame: Frame, i: ir.Value) -> None:
        first = b.mul(i, whole(tile))
        last = b.smaller(b.add(first, whole(tile)), frame.extent(X, 0))
        alone = Emitter(b, frame, step, weights, out, machine)
        if tile == 1:
            alone.emit([first])
            return
        slot_of = lambda token: b.integer(frame.operand(SLOTS), b.smaller(token, b.sub(last, whole(1))))
        tokens = [b.add(first, whole(t)) for t in range(tile)]
        is_same = b.icmp_signed("==", b.sub(last, first), whole(tile))
        for token in tokens[1:]:
            is_same = b.and_(is_same, b.icmp_signed("==", slot_of(token), slot_of(first)))
        with b.if_else(is_same) as (together, apart):
            with together:
                alone.emit(tokens)
            with apart, b.counting(first, last, whole(1)) as (token, _):
                alone.emit([token])

    return kernel_module(num_chunks, chunk)


class RanksTile(Tile):
    """What some ranks make of the inputs of tokens, written to `made`, a line for each."""

    made: ir.Value

    def _write(self, total: ir.Value, row: ir.Value, column: ir.Value) -> None:
        place = self.b.at(whole(self.rows.index(row)), whole(MOST_RANKS), column, 4)
        self.b.write(total, self.made, place, align=4)


class Emitter:
    """Emits what the slot of some tokens makes of them, into the function that `b` writes."""

    def __init__(self, b: Builder, frame: Frame, step: Step, weights: str, out: str, machine: Machine):
        self.b, self.frame, self.step, self.machine = b, frame, step, machine
        self.size, self.out_size = (2 if each == "bfloat16" else 4 for each in (weights, out))
        self.count = frame.extent(B, 2)

    def emit(self, tokens: Sequence[ir.Value]) -> None:
        """Of tokens that have one slot, or none."""
        b, frame = self.b, self.frame
        made, slot = b.floats(MOST_RANKS * len(tokens)), b.integer(frame.operand(SLOTS), tokens[0])
        has_slot = b.icmp_signed(">=", slot, whole(0))
        num_ranks = b.select(has_slot, frame.extent(A, 1), whole(0))
        with b.if_then(has_slot):
            own = ExpertFrame(b, frame.pointer, slot, self.step.weight_size)
            tile = RanksTile(b, own, self.step, tokens, self.machine.num_registers)
            tile.made = made
            tile.emit_all(whole(0), num_ranks)
        b_rO = b.address(frame.operand(B), b.at(b.mul(slot, frame.extent(B, 1)), self.count, whole(0), self.size))
        first, most = whole(0), self.machine.num_registers // 4 // len(tokens)
        for registers, lanes in ((most, self.machine.lanes), (1, self.machine.lanes), (1, 1)):
            width = registers * lanes
            last = b.and_(self.count, whole(-width))
            with b.counting(first, last, whole(width)) as (column, _):
                self._add(
                    tokens, [b.add(column, whole(i * lanes)) for i in range(registers)], lanes, b_rO, made, num_ranks
                )
            first = last

    def _add(
        self,
        tokens: Sequence[ir.Value],
        columns: Sequence[ir.Value],
        lanes: int,
        b_rO: ir.Value,
        made: ir.Value,
        num_ranks: ir.Value,
    ) -> None:
        """Registers of outputs that begin in these columns."""
        b, base, kind = self.b, self.frame.operand(BASE), float32s(lanes)
        places = [(token, column) for token in tokens for column in columns]
        bases = [b.read(kind, base, b.at(token, self.count, column, 4), align=4) for token, column in places]
        with b.counting(whole(0), num_ranks, whole(1), bases) as (rank, sums):
            rows = [self._read(b_rO, b.at(rank, self.count, column, self.size), lanes) for column in columns]
            for t in range(len(tokens)):
                factor = b.read(F32, made, b.at(whole(t), whole(MOST_RANKS), rank, 4), align=4)
                for i, row in enumerate(rows, start=t * len(rows)):
                    sums[i] = multiply_add(b, spread(b, factor, lanes), row, sums[i])
        for (token, column), total in zip(places, sums):
            at = b.at(token, self.count, column, self.out_size)
            if self.out_size == 2:
                write_bfloat16(b, total, self.frame.result(0), at)
            else:
                b.write(total, self.frame.result(0), at, align=4)

    def _read(self, base: ir.Value, at: ir.Value, lanes: int) -> ir.Value:
        if self.size == 2:
            return read_bfloat16(self.b, base, at, lanes)
        return self.b.read(float32s(lanes), base, at, align=4)
