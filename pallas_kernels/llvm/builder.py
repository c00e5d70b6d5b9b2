"""LLVM's instruction builder with what every kernel writes: addresses in bytes, counted loops, sums over lanes.

Integers are 64 bits unless they say otherwise, and pointers opaque.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

from llvmlite import ir

I16, I32, I64, F32, VOID, PTR = (
    ir.IntType(16),
    ir.IntType(32),
    ir.IntType(64),
    ir.FloatType(),
    ir.VoidType(),
    ir.PointerType(),
)
NULL = ir.Constant(PTR, None)
LINE_BYTES = 64
"""What a cache moves at a time."""


class BFloat16(ir.Type):
    """LLVM's bfloat16, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat16)

    def __hash__(self) -> int:
        return hash(BFloat16)


def whole(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def splat(kind: ir.VectorType, value: float) -> ir.Constant:
    """A vector of one number."""
    return ir.Constant(kind, [value] * kind.count)


def declare(module: ir.Module, name: str, result: ir.Type, *arguments: ir.Type) -> ir.Function:
    """A function from outside of the module: LLVM's own, or the C library's."""
    known = module.globals.get(name)
    return known or ir.Function(module, ir.FunctionType(result, arguments), name)


class Builder(ir.IRBuilder):
    """Emits into one function. Offsets are bytes, a number or a value."""

    def address(self, base: ir.Value, offset: int | ir.Value) -> ir.Value:
        offset = whole(offset) if isinstance(offset, int) else offset
        return self.gep(base, [offset], source_etype=ir.IntType(8))

    def read(self, kind: ir.Type, base: ir.Value, offset: int | ir.Value, align: int | None = None) -> ir.Value:
        return self.load(self.address(base, offset), align=align, typ=kind)

    def write(self, value: ir.Value, base: ir.Value, offset: int | ir.Value, align: int | None = None) -> None:
        self.store(value, self.address(base, offset), align=align)

    def clear(self, base: ir.Value, num_bytes: ir.Value) -> None:
        """Write zeros."""
        memset = declare(self.module, "memset", PTR, PTR, I32, I64)
        self.call(memset, [base, ir.Constant(I32, 0), num_bytes])

    def integer(self, base: ir.Value, index: ir.Value) -> ir.Value:
        """An element of an array of int32."""
        return self.sext(self.read(I32, base, self.mul(index, whole(4)), align=4), I64)

    def prefetch(self, base: ir.Value, offset: int | ir.Value, nearest: bool = False) -> None:
        """Ask for what will be read there, for the second cache, or for the nearest one, which waits for a few lines at
        a time only. Where nothing is, nothing happens."""
        ask = declare(self.module, "llvm.prefetch.p0", VOID, PTR, I32, I32, I32)
        reads, stays, data = (ir.Constant(I32, flag) for flag in (0, 3 if nearest else 2, 1))
        self.call(ask, [self.address(base, offset), reads, stays, data])

    def room(self, num_words: int, align: int | None = None) -> ir.Value:
        """The address of 8 bytes on the stack for each word."""
        typed = self.alloca(ir.ArrayType(I64, num_words))
        typed.align = align
        return self.inttoptr(self.ptrtoint(typed, I64), PTR)  # as an opaque pointer: bitcast changes nothing

    def floats(self, count: int) -> ir.Value:
        """Room for float32 numbers on the stack, once in a function, not in each turn of the loop around a chunk."""
        with self.goto_entry_block():
            return self.room(-(-count // 2), align=LINE_BYTES)

    def at(self, row: ir.Value, width: ir.Value, column: ir.Value, itemsize: int) -> ir.Value:
        """The offset of an element of a matrix."""
        return self.mul(self.add(self.mul(row, width), column), whole(itemsize))

    def smaller(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.select(self.icmp_signed("<", a, b), a, b)

    def larger(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.select(self.icmp_signed(">", a, b), a, b)

    def lane_sum(self, vector: ir.Value) -> ir.Value:
        """The sum over lanes, halves onto halves: an order that nothing around it changes."""
        return self.folded(vector, self.fadd if vector.type.element == F32 else self.add)

    def folded(self, vector: ir.Value, combine: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
        """One number of all lanes, halves combined with halves."""
        while vector.type.count > 1:
            half = vector.type.count // 2
            low, high = (
                self.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(I32, half), list(lanes)))
                for lanes in (range(half), range(half, 2 * half))
            )
            vector = combine(low, high)
        return self.extract_element(vector, ir.Constant(I32, 0))

    @contextlib.contextmanager
    def counting(
        self, start: ir.Value, stop: ir.Value, step: ir.Value, values: Sequence[ir.Value] = ()
    ) -> Iterator[tuple[ir.Value, list[ir.Value]]]:
        """`for i in range(start, stop, step)`: yields i and the list of `values`, which the body replaces by those of
        the next turn; afterwards the list holds the last ones."""
        before, head, body, end = self.block, *(self.append_basic_block() for _ in range(3))
        self.branch(head)
        self.position_at_end(head)
        i = self.phi(I64)
        i.add_incoming(start, before)
        carried = [self.phi(value.type) for value in values]
        for phi, value in zip(carried, values):
            phi.add_incoming(value, before)
        self.cbranch(self.icmp_signed("<", i, stop), body, end)
        self.position_at_end(body)
        now: list[ir.Value] = list(carried)
        yield i, now
        i.add_incoming(self.add(i, step), self.block)
        for phi, value in zip(carried, now):
            phi.add_incoming(value, self.block)
        self.branch(head)
        self.position_at_end(end)
        now[:] = carried
