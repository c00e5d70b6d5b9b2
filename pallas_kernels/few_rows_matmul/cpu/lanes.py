"""The instructions of a product whose rows lie in the lanes of registers, as LLVM IR: the form for blocks of 16 rows.

A word is 32 bits: two neighbouring inputs of bfloat16 or four of int8, which one instruction multiplies and sums in
each lane. `words_of_rows` turns x into words [blocks, words, 16], and `kernel` multiplies a register of these, a word
of 16 rows, with a word of the weight that all lanes get. So no lanes are summed, and of a tile of 8 outputs and two
blocks each register of x meets 8 words of weights, each of them two blocks. What differs between types is a `Word`.
"""

from collections.abc import Sequence
from typing import Protocol

from llvmlite import ir

from pallas_kernels.few_rows_matmul import BLOCK_ROWS, LOW_STEPS
from pallas_kernels.llvm.builder import F32, I16, I32, LINE_BYTES, PTR, VOID, BFloat16, Builder, declare, splat, whole
from pallas_kernels.llvm.functions import add_pair_products, bfloat16_bits, float32s, spread, turned
from pallas_kernels.llvm.row_tiles import CHUNK, chunks_of, outputs_of
from pallas_kernels.llvm.xla_ffi import Frame, kernel_module

OUTPUTS, BLOCKS = 8, 2
"""Of a tile. With 12 outputs, whose addresses do not all fit registers, prompts took 1.07 times as long."""
UNROLLED = 4
"""Words that a turn of a tile's loop takes."""
CHUNK_BLOCKS = 4
"""That a thread lays in words at a time. Two blocks by two threads took 15 us, most of which the second one woke up."""
WORD_BYTES, REGISTER_BYTES = 4, 4 * BLOCK_ROWS
I8 = ir.IntType(8)
_LANES = ir.VectorType(I32, BLOCK_ROWS)
_QUADS = ir.VectorType(I8, 4 * BLOCK_ROWS)


class Word(Protocol):
    """How words are multiplied. `itemsize`: bytes of an input, `num_inputs` those of a word, `sums` the type of a
    register of sums, `flips` what changes in a word of x, bit by bit."""

    itemsize: int
    num_inputs: int
    sums: ir.VectorType
    flips: int

    def add_products(self, b: Builder, sums: ir.Value, x: ir.Value, weight: ir.Value) -> ir.Value:
        """Those of the words in each lane."""
        ...


class PairWord:
    """bfloat16, with AVX512-BF16."""

    itemsize, num_inputs, sums, flips = 2, 2, float32s(BLOCK_ROWS), 0

    def add_products(self, b: Builder, sums: ir.Value, x: ir.Value, weight: ir.Value) -> ir.Value:
        pairs = ir.VectorType(BFloat16(), 2 * BLOCK_ROWS)
        return add_pair_products(b, sums, b.bitcast(x, pairs), b.bitcast(weight, pairs))


class DotWord:
    """int8, with VNNI, which multiplies bytes without a sign with those that have one: x counts as 128 more than it is,
    and sums begin with what that will have added."""

    itemsize, num_inputs, sums, flips = 1, 4, _LANES, -(2**31) + 0x808080  # the highest bit of each byte

    def add_products(self, b: Builder, sums: ir.Value, x: ir.Value, weight: ir.Value) -> ir.Value:
        dot = declare(b.module, "llvm.x86.avx512.vpdpbusd.512", _LANES, _LANES, _QUADS, _QUADS)
        return b.call(dot, [sums, b.bitcast(x, _QUADS), b.bitcast(weight, _QUADS)])


WORD_OF: dict[str, Word] = {"bfloat16": PairWord(), "int8": DotWord()}


def words_of_rows(dtype: str) -> ir.Module:
    """The kernel from x [T, D] to words [blocks, words, 16]. In the last block the last row stands for those that are
    not there, in the last word zeros for inputs. Some blocks are a chunk."""

    def chunk(b: Builder, frame: Frame, i: ir.Value) -> None:
        with b.counting(*outputs_of(b, i, frame.result_extent(0, 0), whole(CHUNK_BLOCKS)), whole(1)) as (block, _):
            _lay_block(b, frame, WORD_OF[dtype], block)

    return kernel_module(lambda b, frame: chunks_of(b, frame.result_extent(0, 0), whole(CHUNK_BLOCKS)), chunk)


def _lay_block(b: Builder, frame: Frame, word: Word, block: ir.Value) -> None:
    """The words of 16 rows."""
    x, out = frame.operand(0), frame.result(0)
    num_rows, num_inputs, num_words = frame.extent(0, 0), frame.extent(0, 1), frame.result_extent(0, 1)
    first, last_row = b.mul(block, whole(BLOCK_ROWS)), b.sub(num_rows, whole(1))
    rows = [b.smaller(b.add(first, whole(t)), last_row) for t in range(BLOCK_ROWS)]
    place = lambda w: b.mul(b.add(b.mul(block, num_words), w), whole(REGISTER_BYTES))
    b.write(ir.Constant(_LANES, None), out, place(b.sub(num_words, whole(1))), align=WORD_BYTES)
    square = whole(BLOCK_ROWS * word.num_inputs)  # inputs of as many words as a block has rows
    num_whole = b.mul(b.sdiv(num_inputs, square), square)
    with b.counting(whole(0), num_whole, square) as (d, _):
        of_rows = [b.read(_LANES, x, b.at(row, num_inputs, d, word.itemsize), align=word.itemsize) for row in rows]
        w = b.sdiv(d, whole(word.num_inputs))
        for i, of_word in enumerate(turned(b, of_rows)):
            of_word = b.xor(of_word, splat(_LANES, word.flips)) if word.flips else of_word
            b.write(of_word, out, place(b.add(w, whole(i))), align=WORD_BYTES)
    number = ir.IntType(8 * word.itemsize)
    with b.counting(num_whole, num_inputs, whole(1)) as (d, _):
        w, within = b.sdiv(d, whole(word.num_inputs)), b.srem(d, whole(word.num_inputs))
        at = b.add(place(w), b.mul(within, whole(word.itemsize)))
        for t, row in enumerate(rows):
            value = b.read(number, x, b.at(row, num_inputs, d, word.itemsize), align=word.itemsize)
            value = b.xor(value, ir.Constant(number, -128)) if word.flips else value
            b.write(value, out, b.add(at, whole(WORD_BYTES * t)), align=word.itemsize)


def kernel(dtype: str, out_dtype: str) -> ir.Module:
    """The kernel from words of x and a weight [F, D] to their product [T, F], which for bfloat16 is float32 or rounded
    to it, and int32 for int8. If it is a float type for int8, the words are of two planes, and the rows' steps and the
    outputs' scales follow as operands, both in float32."""
    word = WORD_OF[dtype]
    form = ScaledChunk if word.flips and out_dtype != "int32" else Chunk

    def chunk(b: Builder, frame: Frame, i: ir.Value) -> None:
        form(b, frame, word, out_dtype == "bfloat16").emit(*outputs_of(b, i, frame.extent(1, 0)))

    return kernel_module(lambda b, frame: chunks_of(b, frame.extent(1, 0)), chunk)


class Chunk:
    """The sums of all rows with a range of outputs, in the function that `b` writes. Their weights come from memory for
    the first blocks of rows, and from the second cache for the others."""

    tiles: tuple[int, ...] = (BLOCKS, 1)
    """Blocks of a tile, as long as there are so many."""

    def __init__(self, b: Builder, frame: Frame, word: Word, rounds: bool):
        self.b, self.word, self.rounds = b, word, rounds
        self.x, self.weight, self.out = frame.operand(0), frame.operand(1), frame.result(0)
        self.num_blocks, self.num_words = frame.extent(0, 0), frame.extent(0, 1)
        self.num_outputs, self.num_inputs = frame.extent(1, 0), frame.extent(1, 1)
        self.num_rows = frame.result_extent(0, 0)
        self.whole_words = b.sdiv(self.num_inputs, whole(word.num_inputs))
        self.square = b.floats(BLOCK_ROWS * BLOCK_ROWS)

    def emit(self, first: ir.Value, last: ir.Value) -> None:
        """The tiles of outputs [first, last)."""
        b = self.b
        begins = self._begins(first, last) if self.word.flips else None
        num_tiled = b.mul(b.sdiv(self.num_blocks, whole(BLOCKS)), whole(BLOCKS))
        for count, start, stop in zip(self.tiles, (whole(0), num_tiled), (num_tiled, self.num_blocks)):
            with b.counting(start, stop, whole(count)) as (block, _), b.counting(first, last, whole(OUTPUTS)) as (f, _):
                columns = [b.smaller(b.add(f, whole(i)), b.sub(last, whole(1))) for i in range(OUTPUTS)]
                zeros = [ir.Constant(self.word.sums, None)] * OUTPUTS
                of_outputs = zeros if begins is None else [self._begin(begins, b.sub(f, first)) for f in columns]
                blocks = [b.add(block, whole(j)) for j in range(count)]
                sums = self._sums(blocks, columns, [begin for begin in of_outputs for _ in blocks])
                self._finish(sums, blocks, columns, b.smaller(b.sub(last, f), whole(OUTPUTS)))

    def _finish(self, sums: list[ir.Value], blocks: list[ir.Value], columns: list[ir.Value], count: ir.Value) -> None:
        """Write the first `count` outputs of a tile."""
        for j, block in enumerate(blocks):
            self._write(sums[j :: len(blocks)], block, columns[0], count)

    def _sums(self, blocks: Sequence[ir.Value], columns: list[ir.Value], sums: list[ir.Value]) -> list[ir.Value]:
        """`sums` with all products, for each output those of the blocks."""
        b, word = self.b, self.word
        rows = [b.address(self.weight, b.at(f, self.num_inputs, whole(0), word.itemsize)) for f in columns]
        xs = [b.address(self.x, b.mul(b.mul(block, self.num_words), whole(REGISTER_BYTES))) for block in blocks]
        ahead = b.at(whole(OUTPUTS), self.num_inputs, whole(0), word.itemsize)  # what the next tile reads

        def add_word(w: ir.Value, weights: list[ir.Value], sums: list[ir.Value]) -> None:
            x = [b.read(_LANES, base, b.mul(w, whole(REGISTER_BYTES)), align=WORD_BYTES) for base in xs]
            for i, weight in enumerate(weights):
                in_all_lanes = spread(b, weight, BLOCK_ROWS)
                for place, of_block in enumerate(x, i * len(x)):
                    sums[place] = word.add_products(b, sums[place], of_block, in_all_lanes)

        unrolled = b.and_(self.whole_words, whole(-UNROLLED))
        for step, start, stop in ((UNROLLED, whole(0), unrolled), (1, unrolled, self.whole_words)):
            with b.counting(start, stop, whole(step), sums) as (w, now):
                at = b.mul(w, whole(WORD_BYTES))
                for row in rows if step > 1 else ():
                    b.prefetch(row, b.add(at, ahead))
                    b.prefetch(row, b.add(at, whole(LINE_BYTES)), nearest=True)
                for k in range(step):
                    place = b.add(at, whole(k * WORD_BYTES))
                    weights = [b.read(I32, row, place, align=word.itemsize) for row in rows]
                    add_word(b.add(w, whole(k)), weights, now)
            sums = now
        number = ir.IntType(8 * word.itemsize)
        with b.counting(b.mul(self.whole_words, whole(word.num_inputs)), self.num_inputs, whole(1), sums) as (d, now):
            shift = b.trunc(b.mul(b.srem(d, whole(word.num_inputs)), whole(number.width)), I32)
            place = b.mul(d, whole(word.itemsize))
            alone = [b.zext(b.read(number, row, place, align=word.itemsize), I32) for row in rows]
            add_word(self.whole_words, [b.shl(weight, shift) for weight in alone], now)
        return now

    def _write(self, sums: list[ir.Value], block: ir.Value, first: ir.Value, count: ir.Value) -> None:
        """The sums of a block with `count` outputs from `first` on, a register for each output of the tile."""
        b, none = self.b, ir.Constant(sums[0].type, None)
        lanes = ir.Constant(ir.VectorType(I32, OUTPUTS), list(range(OUTPUTS)))
        of_rows = [b.shuffle_vector(row, row, lanes) for row in turned(b, sums + [none] * (BLOCK_ROWS - OUTPUTS))]
        if self.rounds:
            of_rows = [b.trunc(bfloat16_bits(b, row), ir.VectorType(I16, OUTPUTS)) for row in of_rows]
        for t, row in enumerate(of_rows):
            b.write(row, self.square, REGISTER_BYTES * t, align=LINE_BYTES)
        kind, itemsize = of_rows[0].type, 2 if self.rounds else 4
        mask = b.icmp_signed("<", lanes, spread(b, b.trunc(count, I32), OUTPUTS))
        name = f"llvm.masked.store.v{OUTPUTS}{'f' if kind.element == F32 else 'i'}{8 * itemsize}.p0"
        store = declare(b.module, name, VOID, kind, PTR, I32, mask.type)
        first_row = b.mul(block, whole(BLOCK_ROWS))
        with b.counting(whole(0), b.smaller(b.sub(self.num_rows, first_row), whole(BLOCK_ROWS)), whole(1)) as (t, _):
            row = b.read(kind, self.square, b.mul(t, whole(REGISTER_BYTES)), align=LINE_BYTES)
            place = b.address(self.out, b.at(b.add(first_row, t), self.num_outputs, first, itemsize))
            b.call(store, [row, place, ir.Constant(I32, itemsize), mask])

    def _begins(self, first: ir.Value, last: ir.Value) -> ir.Value:
        """The address of what the sums with each of the outputs begin with, in 32 bits: -128 times its weights."""
        b = self.b
        room, begins = whole(_QUADS.count), b.floats(CHUNK)
        num_whole = b.mul(b.sdiv(self.num_inputs, room), room)
        with b.counting(first, last, whole(1)) as (f, _):
            with b.counting(whole(0), num_whole, room, [ir.Constant(_LANES, None)]) as (d, sums):
                weight = b.read(_LANES, self.weight, b.at(f, self.num_inputs, d, 1), align=1)
                sums[0] = self.word.add_products(b, sums[0], splat(_QUADS, -128), weight)
            with b.counting(num_whole, self.num_inputs, whole(1), [b.lane_sum(sums[0])]) as (d, total):
                weight = b.sext(b.read(I8, self.weight, b.at(f, self.num_inputs, d, 1), align=1), I32)
                total[0] = b.add(total[0], b.shl(weight, ir.Constant(I32, 7)))
            b.write(b.neg(total[0]), begins, b.mul(b.sub(f, first), whole(4)), align=4)
        return begins

    def _begin(self, begins: ir.Value, f: ir.Value) -> ir.Value:
        """Those of one output, which is the f-th of its chunk, in all lanes."""
        return spread(self.b, self.b.read(I32, begins, self.b.mul(f, whole(4)), align=4), BLOCK_ROWS)


class ScaledChunk(Chunk):
    """With two planes of x for the blocks of a tile, and steps and scales as further operands."""

    tiles = (BLOCKS,)

    def __init__(self, b: Builder, frame: Frame, word: Word, rounds: bool):
        super().__init__(b, frame, word, rounds)
        self.steps, self.scales = frame.operand(2), frame.operand(3)

    def _finish(self, sums: list[ir.Value], blocks: list[ir.Value], columns: list[ir.Value], count: ir.Value) -> None:
        b, kind = self.b, float32s(BLOCK_ROWS)
        block = b.sdiv(blocks[0], whole(BLOCKS))
        step = b.read(kind, self.steps, b.mul(block, whole(BLOCK_ROWS * 4)), align=4)
        totals = []
        for high, low, f in zip(sums[::2], sums[1::2], columns):
            total = b.fadd(b.sitofp(high, kind), b.fdiv(b.sitofp(low, kind), splat(kind, float(LOW_STEPS))))
            scale = spread(b, b.read(F32, self.scales, b.mul(f, whole(4)), align=4), BLOCK_ROWS)
            totals.append(b.fmul(b.fmul(total, step), scale))
        self._write(totals, block, columns[0], count)
