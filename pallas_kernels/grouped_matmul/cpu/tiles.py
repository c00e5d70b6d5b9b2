"""The instructions of grouped products, as LLVM IR: one kernel for each type of weights.

Operands: tokens [T, D], sorted by expert; weights [E, F, D]; the first token of each expert and of the padding [E + 1];
scales [E, 1, F] of int8. A tile is that of `few_rows_matmul`, on the tokens and the weight of one expert.
"""

from collections.abc import Sequence

from llvmlite import ir

from pallas_kernels.few_rows_matmul.cpu import TILE_ROWS
from pallas_kernels.few_rows_matmul.cpu.tiles import I8, ConvertedStep, Step, Tile, step_for
from pallas_kernels.llvm.builder import F32, I32, Builder, whole
from pallas_kernels.llvm.functions import float32s
from pallas_kernels.llvm.machine import Machine
from pallas_kernels.llvm.row_tiles import CHUNK, TILE_OUTPUTS, chunks_of, outputs_of
from pallas_kernels.llvm.xla_ffi import Frame, kernel_module

CHUNK_BYTES = 128 << 10
"""Of the weight that a thread takes at a time, if that is more than `CHUNK` outputs: what nobody has asked memory for
before it is read, at the begin of a chunk, is little of it (64 experts of 512 outputs and 128 inputs of float32, 4
tokens each: 0.93 of the time of 32 KiB)."""


class FloatStep(ConvertedStep):
    """float32 weights, as they are."""

    weight_size = 4

    def weight(self, b: Builder, base: ir.Value, offset: ir.Value) -> ir.Value:
        return self.x(b, base, offset)

    def one_product(self, b: Builder, weight: ir.Value, weight_at: ir.Value, x: ir.Value, x_at: ir.Value) -> ir.Value:
        return b.fmul(b.read(F32, weight, weight_at, align=4), b.read(F32, x, x_at, align=4))


class ByteStep(ConvertedStep):
    """int8 weights made float32."""

    weight_size = 1

    def weight(self, b: Builder, base: ir.Value, offset: ir.Value) -> ir.Value:
        values = b.read(ir.VectorType(I8, self.width), base, offset, align=1)
        return b.sitofp(b.sext(values, ir.VectorType(I32, self.width)), float32s(self.width))

    def one_product(self, b: Builder, weight: ir.Value, weight_at: ir.Value, x: ir.Value, x_at: ir.Value) -> ir.Value:
        return b.fmul(b.sitofp(b.read(I8, weight, weight_at, align=1), F32), b.read(F32, x, x_at, align=4))


class ExpertFrame(Frame):
    """The call as one of `few_rows_matmul` with the weight of an expert."""

    def __init__(self, b: Builder, pointer: ir.Value, expert: ir.Value, weight_size: int):
        super().__init__(b, pointer)
        first = b.mul(b.mul(expert, self.extent(1, 0)), b.mul(self.extent(1, 1), whole(weight_size)))
        self._weight = b.address(super().operand(1), first)

    def operand(self, index: int) -> ir.Value:
        return self._weight if index == 1 else super().operand(index)

    def extent(self, operand: int, axis: int) -> ir.Value:
        assert operand == 1, "tokens are not counted by their array"
        return super().extent(1, 1 + axis)


class ScaledTile(Tile):
    """Sums times the scales of their outputs, which begin at `scales`."""

    scales: ir.Value

    def _write(self, total: ir.Value, row: ir.Value, column: ir.Value) -> None:
        scale = self.b.read(F32, self.scales, self.b.mul(column, whole(4)), align=4)
        super()._write(self.b.fmul(total, scale), row, column)


def kernel(dtype: str, machine: Machine) -> ir.Module:
    """The kernel for weights of a type."""
    steps = {"float32": FloatStep, "int8": ByteStep}
    step: Step = steps[dtype](machine) if dtype in steps else step_for(dtype, machine)

    def size_of(b: Builder, frame: Frame) -> ir.Value:
        """Outputs of a chunk, whole tiles of them."""
        row_bytes = b.mul(frame.extent(1, 2), whole(step.weight_size))
        most = b.sdiv(whole(CHUNK_BYTES), row_bytes)
        return b.larger(whole(CHUNK), b.and_(most, whole(-TILE_OUTPUTS[0])))

    def num_chunks(b: Builder, frame: Frame) -> ir.Value:
        return b.add(b.mul(frame.extent(1, 0), chunks_of(b, frame.extent(1, 1), size_of(b, frame))), whole(1))

    def chunk(b: Builder, frame: Frame, i: ir.Value) -> None:
        size = size_of(b, frame)
        num_experts, per_expert = frame.extent(1, 0), chunks_of(b, frame.extent(1, 1), size)
        expert = b.sdiv(i, per_expert)
        with b.if_else(b.icmp_signed("<", expert, num_experts)) as (of_expert, of_padding):
            with of_expert:
                outputs = outputs_of(b, b.srem(i, per_expert), frame.extent(1, 1), size)
                emit_expert(b, frame, step, expert, outputs, machine.num_registers, dtype == "int8")
            with of_padding:
                emit_padding(b, frame, num_experts)

    return kernel_module(num_chunks, chunk)


def emit_expert(
    b: Builder,
    frame: Frame,
    step: Step,
    expert: ir.Value,
    outputs: tuple[ir.Value, ir.Value],
    num_registers: int,
    is_scaled: bool,
) -> None:
    """Some outputs of all tokens of an expert."""
    firsts, own = frame.operand(2), ExpertFrame(b, frame.pointer, expert, step.weight_size)
    start, end = b.integer(firsts, expert), b.integer(firsts, b.add(expert, whole(1)))

    def emit_tile(first: ir.Value, count: int) -> None:
        rows: Sequence[ir.Value] = [b.add(first, whole(t)) for t in range(count)]
        tile = (ScaledTile if is_scaled else Tile)(b, own, step, rows, num_registers)
        if isinstance(tile, ScaledTile):
            scales_at = b.mul(b.mul(expert, frame.extent(1, 1)), whole(4))
            tile.scales = b.address(frame.operand(3), scales_at)
        tile.emit_all(*outputs)

    rest = b.srem(b.sub(end, start), whole(TILE_ROWS))
    after_whole = b.sub(end, rest)
    with b.counting(start, after_whole, whole(TILE_ROWS)) as (row, _):
        emit_tile(row, TILE_ROWS)
    for count in range(1, TILE_ROWS):
        with b.if_then(b.icmp_signed("==", rest, whole(count))):
            emit_tile(after_whole, count)


def emit_padding(b: Builder, frame: Frame, num_experts: ir.Value) -> None:
    """Zeros for the tokens of no expert."""
    first, row_bytes = b.integer(frame.operand(2), num_experts), b.mul(frame.extent(1, 1), whole(4))
    count = b.sub(frame.extent(0, 0), first)
    b.clear(b.address(frame.result(0), b.mul(first, row_bytes)), b.mul(count, row_bytes))
