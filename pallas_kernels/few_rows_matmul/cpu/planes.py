"""Rows of bfloat16 as two planes of 8 bits, as LLVM IR: what a product with an int8 weight takes of them.

A row is its step times (high + low / 254), as `few_rows_matmul.two_plane_matmul` says. For tiles the rows of high
numbers come first, then those of low ones. Of blocks the words of 16 rows' high numbers are a block, those of their low
numbers the next one, so that a tile of two blocks has all of 16 rows.
"""

from llvmlite import ir

from pallas_kernels.few_rows_matmul import BLOCK_ROWS, LARGEST, LOW_STEPS
from pallas_kernels.few_rows_matmul.cpu.lanes import CHUNK_BLOCKS, I8, REGISTER_BYTES, WORD_BYTES
from pallas_kernels.llvm.builder import F32, I32, LINE_BYTES, Builder, declare, splat, whole
from pallas_kernels.llvm.functions import INFINITE, magnitude_bits, read_bfloat16, spread, turned
from pallas_kernels.llvm.row_tiles import chunks_of, outputs_of
from pallas_kernels.llvm.xla_ffi import Frame, kernel_module

SQUARE = 4 * BLOCK_ROWS
"""Inputs of as many words as a block has rows."""
CHUNK_ROWS = 4
"""Rows of tiles that a thread takes at a time, some microseconds."""


def planes_in_rows() -> ir.Module:
    """The kernel from x [T, D] in bfloat16 to rows [2 T, D] of int8 and the rows' steps [T]."""

    def chunk(b: Builder, frame: Frame, i: ir.Value) -> None:
        rows, out, num_rows = Rows(b, frame), frame.result(0), frame.extent(0, 0)
        with b.counting(*outputs_of(b, i, num_rows, whole(CHUNK_ROWS)), whole(1)) as (row, _):
            step = rows.step(row)
            b.write(step, frame.result(1), b.mul(row, whole(4)), align=4)
            for bounds, count in ((whole(0), rows.num_whole), SQUARE), ((rows.num_whole, rows.num_inputs), 1):
                with b.counting(*bounds, whole(count)) as (d, _):
                    for plane, numbers in zip((row, b.add(num_rows, row)), rows.numbers(row, d, count, step)):
                        b.write(numbers, out, b.at(plane, rows.num_inputs, d, 1), align=1)

    return kernel_module(lambda b, frame: chunks_of(b, frame.extent(0, 0), whole(CHUNK_ROWS)), chunk)


def planes_in_blocks() -> ir.Module:
    """The kernel from x [T, D] in bfloat16 to words [2 * blocks, words, 16] and the rows' steps [16 * blocks]. In the
    last block the last row stands for those that are not there, in the last word zeros for inputs."""

    def chunk(b: Builder, frame: Frame, i: ir.Value) -> None:
        num_blocks = b.sdiv(frame.result_extent(0, 0), whole(2))
        with b.counting(*outputs_of(b, i, num_blocks, whole(CHUNK_BLOCKS)), whole(1)) as (block, _):
            Block(b, frame, block).lay()

    def count(b: Builder, frame: Frame) -> ir.Value:
        return chunks_of(b, b.sdiv(frame.result_extent(0, 0), whole(2)), whole(CHUNK_BLOCKS))

    return kernel_module(count, chunk)


class Rows:
    """The rows of x and what they are in planes, in the function that `b` writes."""

    def __init__(self, b: Builder, frame: Frame):
        self.b, self.x, self.num_inputs = b, frame.operand(0), frame.extent(0, 1)
        self.num_whole = b.mul(b.sdiv(self.num_inputs, whole(SQUARE)), whole(SQUARE))

    def read(self, row: ir.Value, d: ir.Value, count: int) -> ir.Value:
        return read_bfloat16(self.b, self.x, self.b.at(row, self.num_inputs, d, 2), count)

    def step(self, row: ir.Value) -> ir.Value:
        """The largest number of a row over 127, which is not finite if one is not."""
        b, wholes = self.b, ir.VectorType(I32, BLOCK_ROWS)
        bits = lambda d, count: magnitude_bits(b, self.read(row, d, count))
        with b.counting(whole(0), self.num_whole, whole(BLOCK_ROWS), [ir.Constant(wholes, None)]) as (d, most):
            most[0] = b.larger(most[0], bits(d, BLOCK_ROWS))
        with b.counting(self.num_whole, self.num_inputs, whole(1), [b.folded(most[0], b.larger)]) as (d, largest):
            largest[0] = b.larger(largest[0], b.extract_element(bits(d, 1), ir.Constant(I32, 0)))
        return b.fdiv(b.bitcast(largest[0], F32), ir.Constant(F32, float(LARGEST)))

    def numbers(self, row: ir.Value, d: ir.Value, count: int, step: ir.Value) -> list[ir.Value]:
        """(high, low) of some inputs of a row. Where the step is no finite number they do not matter."""
        b, x = self.b, self.read(row, d, count)
        kind = x.type
        is_some = b.and_(
            b.icmp_signed("<", b.bitcast(step, I32), ir.Constant(I32, INFINITE)),
            b.fcmp_ordered("!=", step, ir.Constant(F32, 0.0)),
        )
        divisor = spread(b, b.select(is_some, step, ir.Constant(F32, 1.0)), count)
        rint = declare(b.module, f"llvm.rint.v{count}f32", kind, kind)
        steps = b.fdiv(b.select(is_some, x, ir.Constant(kind, None)), divisor)
        high = b.call(rint, [steps])
        low = b.call(rint, [b.fmul(b.fsub(steps, high), splat(kind, float(LOW_STEPS)))])
        as_bytes = lambda numbers: b.trunc(b.fptosi(numbers, ir.VectorType(I32, count)), ir.VectorType(I8, count))
        return [as_bytes(high), as_bytes(low)]


class Block:
    """16 rows and their planes, in the function that `b` writes."""

    def __init__(self, b: Builder, frame: Frame, block: ir.Value):
        self.b, self.rows, self.out, self.steps = b, Rows(b, frame), frame.result(0), frame.result(1)
        self.num_words = frame.result_extent(0, 1)
        self.first_row, self.last_row = b.mul(block, whole(BLOCK_ROWS)), b.sub(frame.extent(0, 0), whole(1))
        plane_bytes = b.mul(self.num_words, whole(REGISTER_BYTES))
        first = b.mul(b.mul(block, whole(2)), plane_bytes)
        self.planes = [first, b.add(first, plane_bytes)]
        self.squares = [b.floats(BLOCK_ROWS * BLOCK_ROWS) for _ in self.planes]

    def lay(self) -> None:
        """Write all words."""
        b, rows = self.b, self.rows
        last_word = b.mul(b.sub(self.num_words, whole(1)), whole(REGISTER_BYTES))
        for plane in self.planes:
            b.write(ir.Constant(ir.VectorType(I32, BLOCK_ROWS), None), self.out, b.add(plane, last_word), align=4)
        with b.counting(whole(0), whole(BLOCK_ROWS), whole(1)) as (t, _):
            b.write(rows.step(self._row(t)), self.steps, self._step_at(t), align=4)
        with b.counting(whole(0), rows.num_whole, whole(SQUARE)) as (d, _):
            with b.counting(whole(0), whole(BLOCK_ROWS), whole(1)) as (t, _):
                for numbers, square in zip(self._numbers(t, d, SQUARE), self.squares):
                    b.write(numbers, square, b.mul(t, whole(REGISTER_BYTES)), align=LINE_BYTES)
            at = b.mul(d, whole(REGISTER_BYTES // WORD_BYTES))
            for plane, square in zip(self.planes, self.squares):
                kind = ir.VectorType(I32, BLOCK_ROWS)
                of_rows = [b.read(kind, square, REGISTER_BYTES * t, align=LINE_BYTES) for t in range(BLOCK_ROWS)]
                for i, word in enumerate(turned(b, of_rows)):
                    b.write(word, self.out, b.add(b.add(plane, at), whole(i * REGISTER_BYTES)), align=WORD_BYTES)
        with (
            b.counting(rows.num_whole, rows.num_inputs, whole(1)) as (d, _),
            b.counting(whole(0), whole(BLOCK_ROWS), whole(1)) as (t, _),
        ):
            w, within = b.sdiv(d, whole(WORD_BYTES)), b.srem(d, whole(WORD_BYTES))
            at = b.add(b.add(b.mul(w, whole(REGISTER_BYTES)), b.mul(t, whole(WORD_BYTES))), within)
            for numbers, plane in zip(self._numbers(t, d, 1), self.planes):
                b.write(numbers, self.out, b.add(plane, at), align=1)

    def _row(self, t: ir.Value) -> ir.Value:
        return self.b.smaller(self.b.add(self.first_row, t), self.last_row)

    def _step_at(self, t: ir.Value) -> ir.Value:
        return self.b.mul(self.b.add(self.first_row, t), whole(4))

    def _numbers(self, t: ir.Value, d: ir.Value, count: int) -> list[ir.Value]:
        """Of some inputs of the t-th row, each 128 more than it is, since the instruction that multiplies them knows no
        sign."""
        b = self.b
        step = b.read(F32, self.steps, self._step_at(t), align=4)
        flipped = splat(ir.VectorType(I8, count), -128)
        return [b.xor(numbers, flipped) for numbers in self.rows.numbers(self._row(t), d, count, step)]
