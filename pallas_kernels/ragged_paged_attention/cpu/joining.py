"""What a query's attention has come to in parts of its context, made one, as LLVM IR: the last call of a layer.

A chunk of work is `TOKENS` tokens. XLA would make six kernels of it in every layer, which were a third of what it takes
to compile a program.
"""

from llvmlite import ir

from pallas_kernels.llvm.builder import F32, Builder, splat, whole
from pallas_kernels.llvm.functions import exp, float32s, lane_max, multiply_add, spread, write_bfloat16
from pallas_kernels.llvm.xla_ffi import Frame, kernel_module
from pallas_kernels.ragged_paged_attention.cpu.plans import PARTS, REAL, SHARES, TILED
from pallas_kernels.ragged_paged_attention.numerics import LOWEST

OUT, TOTAL, TOP, SPANS, TILES, HOW, SINKS = range(7)
"""Operands: of single queries' parts out_PTKGH, and total and top [P, T, K, G]; what spans of blocks have come to, and
tiles of rows, [T, K, G, H + 2] as `numerics.packed` has it; how_T, what of these a token has; a sink for each head, or
one for all."""
TOKENS = 64
SPAN_PLACE, SINK_PLACE, ROOM = PARTS, PARTS + 1, 2 * PARTS
"""Among a query's highest scores and weights, behind those of its parts: whose they are."""


def kernel(dtype: str, divides: bool, lanes: int) -> ir.Module:
    """Results of type `dtype` [T, K, G, H]; or, undivided, as operands have them."""

    def num_chunks(b: Builder, frame: Frame) -> ir.Value:
        return b.udiv(b.add(frame.extent(HOW, 0), whole(TOKENS - 1)), whole(TOKENS))

    def chunk(b: Builder, frame: Frame, i: ir.Value) -> None:
        first = b.mul(i, whole(TOKENS))
        last = b.smaller(b.add(first, whole(TOKENS)), frame.extent(HOW, 0))
        joining = Joining(b, frame, dtype, divides, lanes)
        with b.counting(first, last, whole(1)) as (token, _):
            joining.emit(token)

    return kernel_module(num_chunks, chunk)


class Joining:
    """Of tokens, in the function that `b` writes. On the stack: `tops` and `weights` of a query, as the places say."""

    def __init__(self, b: Builder, frame: Frame, dtype: str, divides: bool, lanes: int):
        self.b, self.frame, self.divides, self.lanes = b, frame, divides, lanes
        self.kind, self.size = float32s(lanes), 2 if dtype == "bfloat16" else 4
        self.num_parts, self.head_dim = frame.extent(OUT, 0), frame.extent(OUT, 4)
        self.num_heads = b.mul(frame.extent(OUT, 2), frame.extent(OUT, 3))
        self.num_queries = b.mul(frame.extent(OUT, 1), self.num_heads)
        self.packed_bytes = b.mul(b.add(self.head_dim, whole(2)), whole(4))
        self.tops, self.weights = b.floats(ROOM), b.floats(ROOM)

    def emit(self, token: ir.Value) -> None:
        b = self.b
        how = b.integer(self.frame.operand(HOW), token)
        is_any = lambda flags: b.icmp_signed("!=", b.and_(how, whole(flags)), whole(0))
        is_tiled, is_whole = is_any(TILED), is_any(TILED | SHARES)
        parts, wholes = b.select(is_tiled, whole(0), self.num_parts), b.zext(is_whole, how.type)
        packed = b.select(is_tiled, *(self.frame.operand(i) for i in (TILES, SPANS)))
        with b.if_else(is_any(REAL)) as (then, otherwise):
            with then, b.counting(whole(0), self.num_heads, whole(1)) as (n, _):
                query = b.add(b.mul(token, self.num_heads), n)
                self._join(query, n, parts, wholes, b.address(packed, b.mul(query, self.packed_bytes)))
            with otherwise, b.counting(whole(0), self.num_heads, whole(1)) as (n, _):
                self._leave_nothing(b.add(b.mul(token, self.num_heads), n))

    def _join(self, query: ir.Value, n: ir.Value, parts: ir.Value, wholes: ir.Value, packed: ir.Value) -> None:
        """A query of a head, of so many parts, and of what lies at `packed` if there is one of `wholes`."""
        b = self.b
        top = self._weigh(query, n, parts, wholes, packed)
        total_at = b.mul(self.head_dim, whole(4))
        with b.counting(whole(0), parts, whole(1), [self._of(self.weights, SINK_PLACE)]) as (p, total):
            of_part = b.read(F32, self.frame.operand(TOTAL), self._at(p, query), align=4)
            total[0] = b.fadd(total[0], b.fmul(of_part, self._of(self.weights, p)))
        with b.counting(whole(0), wholes, whole(1), total) as (_, total):
            weight = self._of(self.weights, SPAN_PLACE)
            total[0] = b.fadd(total[0], b.fmul(b.read(F32, packed, total_at, align=4), weight))
        with b.counting(whole(0), self.head_dim, whole(self.lanes)) as (d, _):
            out = self._weighted(query, d, parts, wholes, packed)
            self._write(b.fdiv(out, spread(b, total[0], self.lanes)) if self.divides else out, query, d)
        if not self.divides:
            self._write_state(query, total[0], top)

    def _weigh(self, query: ir.Value, n: ir.Value, parts: ir.Value, wholes: ir.Value, packed: ir.Value) -> ir.Value:
        """`tops` and `weights` of a query: the highest of all."""
        b, registers = self.b, range(0, ROOM, self.lanes)
        for i in registers:
            b.write(splat(self.kind, LOWEST), self.tops, 4 * i, align=4)
        with b.counting(whole(0), parts, whole(1)) as (p, _):
            self._note(self.frame.operand(TOP), self._at(p, query), b.mul(p, whole(4)))
        with b.counting(whole(0), wholes, whole(1)):
            self._note(packed, b.sub(self.packed_bytes, whole(4)), 4 * SPAN_PLACE)
        if self.divides:
            is_one = b.icmp_signed("==", self.frame.extent(SINKS, 0), whole(1))
            self._note(self.frame.operand(SINKS), b.select(is_one, whole(0), b.mul(n, whole(4))), 4 * SINK_PLACE)
        tops = [b.read(self.kind, self.tops, 4 * i, align=4) for i in registers]
        largest = tops[0]
        for other in tops[1:]:
            largest = b.select(b.fcmp_ordered(">", other, largest), other, largest)
        top = lane_max(b, largest)
        for i, each in zip(registers, tops):
            b.write(exp(b, b.fsub(each, spread(b, top, self.lanes))), self.weights, 4 * i, align=4)
        if not self.divides:
            b.write(ir.Constant(F32, 0.0), self.weights, 4 * SINK_PLACE, align=4)
        return top

    def _note(self, base: ir.Value, at: ir.Value, place: int | ir.Value) -> None:
        self.b.write(self.b.read(F32, base, at, align=4), self.tops, place, align=4)

    def _weighted(self, query: ir.Value, d: ir.Value, parts: ir.Value, wholes: ir.Value, packed: ir.Value) -> ir.Value:
        """A register of the sum of all."""
        b, at = self.b, float_bytes(self.b, d)
        with b.counting(whole(0), parts, whole(1), [splat(self.kind, 0.0)]) as (p, out):
            start = b.add(b.mul(self._at(p, query), self.head_dim), at)
            of_part = b.read(self.kind, self.frame.operand(OUT), start, align=4)
            out[0] = multiply_add(b, of_part, spread(b, self._of(self.weights, p), self.lanes), out[0])
        with b.counting(whole(0), wholes, whole(1), out) as (_, out):
            weight = spread(b, self._of(self.weights, SPAN_PLACE), self.lanes)
            out[0] = multiply_add(b, b.read(self.kind, packed, at, align=4), weight, out[0])
        return out[0]

    def _at(self, part: ir.Value, query: ir.Value) -> ir.Value:
        """Where a number for each part and query is."""
        return float_bytes(self.b, self.b.add(self.b.mul(part, self.num_queries), query))

    def _of(self, room: ir.Value, place: int | ir.Value) -> ir.Value:
        place = whole(place) if isinstance(place, int) else place
        return self.b.read(F32, room, float_bytes(self.b, place), align=4)

    def _leave_nothing(self, query: ir.Value) -> None:
        """Zeros, or that nothing was seen."""
        b = self.b
        with b.counting(whole(0), self.head_dim, whole(self.lanes)) as (d, _):
            self._write(splat(self.kind, 0.0), query, d)
        if not self.divides:
            self._write_state(query, ir.Constant(F32, 0.0), ir.Constant(F32, LOWEST))

    def _write(self, values: ir.Value, query: ir.Value, d: ir.Value) -> None:
        b, result = self.b, self.frame.result(0)
        if not self.divides:
            b.write(values, result, b.add(b.mul(query, self.packed_bytes), float_bytes(b, d)), align=4)
            return
        at = b.at(query, self.head_dim, d, self.size)
        if self.size == 2:
            write_bfloat16(b, values, result, at)
        else:
            b.write(values, result, at, align=4)

    def _write_state(self, query: ir.Value, total: ir.Value, top: ir.Value) -> None:
        b = self.b
        end = b.mul(b.add(query, whole(1)), self.packed_bytes)
        for value, before_end in ((total, 8), (top, 4)):
            b.write(value, self.frame.result(0), b.sub(end, whole(before_end)), align=4)


def float_bytes(b: Builder, count: ir.Value) -> ir.Value:
    """Bytes of so many float32 numbers."""
    return b.mul(count, whole(4))
