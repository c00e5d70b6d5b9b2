"""New keys and values into the cache, as LLVM IR: in place, both in one call. A chunk of work is `TOKENS` tokens."""

from llvmlite import ir

from pallas_kernels.llvm.builder import Builder, whole
from pallas_kernels.llvm.xla_ffi import Frame, kernel_module

KEYS, VALUES, NEW_KEYS, NEW_VALUES, BLOCKS, OFFSETS = range(6)
"""Operands: k_BKSH and v_BKSH, which are the results; k_TKH and v_TKH of the same type; where each token's go,
slot_block_T, nowhere if there is no such block, and slot_offset_T."""
TOKENS = 64
PIECE = 32
"""Bytes that are moved at once: heads are a multiple of 16 numbers."""


def kernel(size: int) -> ir.Module:
    """`size`: bytes of a number."""

    def num_chunks(b: Builder, frame: Frame) -> ir.Value:
        return b.udiv(b.add(frame.extent(BLOCKS, 0), whole(TOKENS - 1)), whole(TOKENS))

    def chunk(b: Builder, frame: Frame, i: ir.Value) -> None:
        first = b.mul(i, whole(TOKENS))
        last = b.smaller(b.add(first, whole(TOKENS)), frame.extent(BLOCKS, 0))
        with b.counting(first, last, whole(1)) as (token, _):
            block, offset = (b.integer(frame.operand(x), token) for x in (BLOCKS, OFFSETS))
            with b.if_then(b.icmp_unsigned("<", block, frame.extent(KEYS, 0))):
                _write_token(b, frame, size, token, block, offset)

    return kernel_module(num_chunks, chunk)


def _write_token(b: Builder, frame: Frame, size: int, token: ir.Value, block: ir.Value, offset: ir.Value) -> None:
    num_heads, num_slots, head_dim = (frame.extent(KEYS, axis) for axis in (1, 2, 3))
    line, piece = b.mul(head_dim, whole(size)), ir.VectorType(ir.IntType(8), PIECE)
    with b.counting(whole(0), num_heads, whole(1)) as (head, _):
        from_ = b.mul(b.add(b.mul(token, num_heads), head), line)
        slot = b.add(b.mul(b.add(b.mul(block, num_heads), head), num_slots), offset)
        to = b.mul(slot, line)
        with b.counting(whole(0), line, whole(PIECE)) as (at, _):
            for new, cache in ((NEW_KEYS, 0), (NEW_VALUES, 1)):
                moved = b.read(piece, frame.operand(new), b.add(from_, at), align=1)
                b.write(moved, frame.result(cache), b.add(to, at), align=1)
