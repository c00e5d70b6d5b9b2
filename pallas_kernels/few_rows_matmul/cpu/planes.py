"""Rows of bfloat16 as two planes of 8 bits, as LLVM IR: what blocks of rows are for a product with an int8 weight.

A row is its step times (high + low / 254), as `few_rows_matmul.two_plane_matmul` says. The words of 16 rows' high
numbers are a block, those of their low numbers the next one, so that a tile of two blocks has all of 16 rows.
"""

from llvmlite import ir

from pallas_kernels.few_rows_matmul import LARGEST, LOW_STEPS
from pallas_kernels.few_rows_matmul.cpu import BLOCK_ROWS
from pallas_kernels.few_rows_matmul.cpu.lanes import CHUNK_BLOCKS, I8, REGISTER_BYTES, WORD_BYTES
from pallas_kernels.llvm.builder import F32, I32, LINE_BYTES, Builder, declare, splat, whole
from pallas_kernels.llvm.functions import INFINITE, magnitude_bits, read_bfloat16, spread, turned
from pallas_kernels.llvm.row_tiles import chunks_of, outputs_of
from pallas_kernels.llvm.xla_ffi import Frame, kernel_module

SQUARE = 4 * BLOCK_ROWS
"""Inputs of as many words as a block has rows."""


def planes_of_rows() -> ir.Module:
    """The kernel from x [T, D] in bfloat16 to words [2 * blocks, words, 16] and the rows' steps [16 * blocks]. In the
    last block the last row stands for those that are not there, in the last word zeros for inputs."""

    def chunk(b: Builder, frame: Frame, i: ir.Value) -> None:
        num_blocks = b.sdiv(frame.result_extent(0, 0), whole(2))
        with b.counting(*outputs_of(b, i, num_blocks, whole(CHUNK_BLOCKS)), whole(1)) as (block, _):
            Block(b, frame, block).lay()

    def count(b: Builder, frame: Frame) -> ir.Value:
        return chunks_of(b, b.sdiv(frame.result_extent(0, 0), whole(2)), whole(CHUNK_BLOCKS))

    return kernel_module(count, chunk)


class Block:
    """16 rows and their planes, in the function that `b` writes."""

    def __init__(self, b: Builder, frame: Frame, block: ir.Value):
        self.b, self.x, self.out, self.steps = b, frame.operand(0), frame.result(0), frame.result(1)
        self.num_inputs, self.num_words = frame.extent(0, 1), frame.result_extent(0, 1)
        self.num_whole = b.mul(b.sdiv(self.num_inputs, whole(SQUARE)), whole(SQUARE))
        self.first_row, self.last_row = b.mul(block, whole(BLOCK_ROWS)), b.sub(frame.extent(0, 0), whole(1))
        plane_bytes = b.mul(self.num_words, whole(REGISTER_BYTES))
        first = b.mul(b.mul(block, whole(2)), plane_bytes)
        self.planes = [first, b.add(first, plane_bytes)]
        self.squares = [b.floats(BLOCK_ROWS * BLOCK_ROWS) for _ in self.planes]

    def lay(self) -> None:
        """Write all words."""
        b = self.b
        last_word = b.mul(b.sub(self.num_words, whole(1)), whole(REGISTER_BYTES))
        for plane in self.planes:
            b.write(ir.Constant(ir.VectorType(I32, BLOCK_ROWS), None), self.out, b.add(plane, last_word), align=4)
        with b.counting(whole(0), whole(BLOCK_ROWS), whole(1)) as (t, _):
            b.write(self._step(self._row(t)), self.steps, b.mul(b.add(self.first_row, t), whole(4)), align=4)
        with b.counting(whole(0), self.num_whole, whole(SQUARE)) as (d, _):
            with b.counting(whole(0), whole(BLOCK_ROWS), whole(1)) as (t, _):
                x = read_bfloat16(b, self.x, b.at(self._row(t), self.num_inputs, d, 2), SQUARE)
                for numbers, square in zip(self._numbers(x, t), self.squares):
                    b.write(numbers, square, b.mul(t, whole(REGISTER_BYTES)), align=LINE_BYTES)
            at = b.mul(d, whole(REGISTER_BYTES // WORD_BYTES))
            for plane, square in zip(self.planes, self.squares):
                kind = ir.VectorType(I32, BLOCK_ROWS)
                of_rows = [b.read(kind, square, REGISTER_BYTES * t, align=LINE_BYTES) for t in range(BLOCK_ROWS)]
                for i, word in enumerate(turned(b, of_rows)):
                    b.write(word, self.out, b.add(b.add(plane, at), whole(i * REGISTER_BYTES)), align=WORD_BYTES)
        with (
            b.counting(self.num_whole, self.num_inputs, whole(1)) as (d, _),
            b.counting(whole(0), whole(BLOCK_ROWS), whole(1)) as (t, _),
        ):
            x = read_bfloat16(b, self.x, b.at(self._row(t), self.num_inputs, d, 2), 1)
            w, within = b.sdiv(d, whole(WORD_BYTES)), b.srem(d, whole(WORD_BYTES))
            at = b.add(b.add(b.mul(w, whole(REGISTER_BYTES)), b.mul(t, whole(WORD_BYTES))), within)
            for numbers, plane in zip(self._numbers(x, t), self.planes):
                b.write(numbers, self.out, b.add(plane, at), align=1)

    def _row(self, t: ir.Value) -> ir.Value:
        return self.b.smaller(self.b.add(self.first_row, t), self.last_row)

    def _step(self, row: ir.Value) -> ir.Value:
        """The largest number of a row over 127, which is not finite if one is not."""
        b, wholes = self.b, ir.VectorType(I32, BLOCK_ROWS)
        bits = lambda d, count: magnitude_bits(
            b, read_bfloat16(b, self.x, b.at(row, self.num_inputs, d, 2), count)
        )  # fmt: skip
        with b.counting(whole(0), self.num_whole, whole(BLOCK_ROWS), [ir.Constant(wholes, None)]) as (d, most):
            most[0] = b.larger(most[0], bits(d, BLOCK_ROWS))
        with b.counting(self.num_whole, self.num_inputs, whole(1), [b.folded(most[0], b.larger)]) as (d, largest):
            largest[0] = b.larger(largest[0], b.extract_element(bits(d, 1), ir.Constant(I32, 0)))
        return b.fdiv(b.bitcast(largest[0], F32), ir.Constant(F32, float(LARGEST)))

    def _numbers(self, x: ir.Value, t: ir.Value) -> list[ir.Value]:
        """(high, low) of some inputs of the t-th row, each 128 more than it is, since the instruction that multiplies
        them knows no sign. Where the step is no finite number they do not matter."""
        b, kind = self.b, x.type
        step = b.read(F32, self.steps, b.mul(b.add(self.first_row, t), whole(4)), align=4)
        is_some = b.and_(
            b.icmp_signed("<", b.bitcast(step, I32), ir.Constant(I32, INFINITE)),
            b.fcmp_ordered("!=", step, ir.Constant(F32, 0.0)),
        )
        divisor = spread(b, b.select(is_some, step, ir.Constant(F32, 1.0)), kind.count)
        rint = declare(b.module, f"llvm.rint.v{kind.count}f32", kind, kind)
        steps = b.fdiv(b.select(is_some, x, ir.Constant(kind, None)), divisor)
        high = b.call(rint, [steps])
        low = b.call(rint, [b.fmul(b.fsub(steps, high), splat(kind, float(LOW_STEPS)))])
        narrow = ir.VectorType(I8, kind.count)
        as_bytes = lambda numbers: b.trunc(b.fptosi(numbers, ir.VectorType(I32, kind.count)), narrow)
        return [b.xor(as_bytes(numbers), splat(narrow, -128)) for numbers in (high, low)]
