"""Kernels of products of rows x [T, D] with a weight that has a row for each of F outputs: how the work is cut.

A chunk of outputs is a thread's work, and so small that its weights stay in the nearest cache while one tile of rows
after the other meets them. What a tile does is its op's.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

from llvmlite import ir

from pallas_kernels.llvm.builder import Builder, whole
from pallas_kernels.llvm.xla_ffi import Frame, kernel_module

CHUNK = 64
"""Outputs that a thread takes at a time: 128 KiB of a bfloat16 weight with 1,024 inputs, a few microseconds. With 32
weights of 4 bits took 1.2 times as long."""
TILE_OUTPUTS = (4, 2, 1)
"""How many of them a tile may have."""

AHEAD = 2048
"""So many bytes behind what a tile reads of each row are asked for meanwhile, for the second cache: products of one to
four rows took 0.76 to 1.0 of the time (with 1,024 and 4,096 about as much, with 8,192 more)."""

EmitTile = Callable[[Builder, Frame, Sequence[ir.Value], ir.Value, ir.Value], None]
"""(builder, frame, rows, first output, the one after the last): emits their sums."""


def product_module(num_rows: int, tile_rows: int, emit_tile: EmitTile) -> ir.Module:
    """The kernel whose operands are x and the weight first, for `num_rows` rows; with `tile_rows` and more, for any
    number that leaves the same rest when it is divided by `tile_rows`."""
    rest = num_rows % tile_rows

    def chunk(b: Builder, frame: Frame, i: ir.Value) -> None:
        outputs = outputs_of(b, i, frame.extent(1, 0))
        rows_from = lambda first, count: [b.add(first, whole(t)) for t in range(count)]
        num_whole = b.sub(frame.extent(0, 0), whole(rest))
        if num_rows >= tile_rows:
            with b.counting(whole(0), num_whole, whole(tile_rows)) as (row, _):
                emit_tile(b, frame, rows_from(row, tile_rows), *outputs)
        if rest:
            emit_tile(b, frame, rows_from(num_whole, rest), *outputs)

    return kernel_module(lambda b, frame: chunks_of(b, frame.extent(1, 0)), chunk)


def chunks_of(b: Builder, num_outputs: ir.Value, size: ir.Value | None = None) -> ir.Value:
    """How many there are, of `size` outputs."""
    size = size or whole(CHUNK)
    return b.sdiv(b.add(num_outputs, b.sub(size, whole(1))), size)


def outputs_of(
    b: Builder, i: ir.Value, num_outputs: ir.Value, size: ir.Value | None = None
) -> tuple[ir.Value, ir.Value]:
    """The first output of a chunk, and the one after its last."""
    size = size or whole(CHUNK)
    first = b.mul(i, size)
    return first, b.smaller(b.add(first, size), num_outputs)


@contextlib.contextmanager
def streams(b: Builder, first: ir.Value, last: ir.Value, count: int) -> Iterator[list[ir.Value]]:
    """A loop over outputs [first, last), `count` at a time that lie as far apart as can be; what would lie beyond the
    last one is that again.

    A CPU reads ahead by itself along several rows at once, if these are not neighbours: products of one or two rows
    took 0.55 to 0.7 of the time that neighbours took, those that were asked for ahead for the nearest cache included
    (AMD EPYC of 2023, two cores, 768 and 2,048 inputs of bfloat16, int8 and int4, pages of 4 KiB and of 2 MiB).
    """
    length = b.sdiv(b.add(b.sub(last, first), whole(count - 1)), whole(count))
    final = b.sub(last, whole(1))
    with b.counting(whole(0), length, whole(1)) as (i, _):
        start = b.add(first, i)
        yield [b.smaller(b.add(start, b.mul(whole(r), length)), final) for r in range(count)]
