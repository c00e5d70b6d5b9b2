"""What kernels of attention are made for: the shape of heads, and what the CPU has for them."""

import dataclasses
import math

from llvmlite import ir

from pallas_kernels.llvm.builder import F32, LINE_BYTES, BFloat16, Builder, whole
from pallas_kernels.llvm.functions import (
    add_pair_products,
    bfloat16_pairs,
    float32s,
    multiply_add,
    read_bfloat16,
    spread,
    tanh,
)

TURNED = 3
"""So many single queries of a kv head and more have keys turned: with one it takes 1.3 times as long as sums over
lanes, with two as long, with four and more 0.6 times."""


@dataclasses.dataclass(frozen=True)
class Heads:
    """`pairs`: the CPU multiplies pairs of bfloat16, which queries, keys and values are."""

    dtype: str
    group_size: int
    head_dim: int
    block_size: int
    capped: bool
    lanes: int
    num_registers: int
    pairs: bool

    @property
    def size(self) -> int:
        """Bytes of a number in the cache."""
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def depth(self) -> int:
        """Numbers in a lane of what is multiplied: neighbours in what is summed over."""
        return 2 if self.pairs else 1

    @property
    def turns_keys(self) -> bool:
        """Whether single queries have keys turned; registers must hold their sums and a square of keys."""
        return self.group_size >= TURNED and self.num_registers == 32

    @property
    def part_bytes(self) -> int:
        """Of a block, what belongs to one kv head, of keys or of values."""
        return self.block_size * self.head_dim * self.size

    @property
    def piece_bytes(self) -> int:
        """Of a key, what is read at once: a line of a cache, or the whole registers that a key has of it."""
        register_bytes = self.lanes * self.depth * self.size
        return math.gcd(max(LINE_BYTES, register_bytes), self.head_dim * self.size)

    def part(self, b: Builder, block: ir.Value, num_heads: ir.Value, head: ir.Value) -> ir.Value:
        """Where in the cache the part of a block is that belongs to a head."""
        return b.mul(b.add(b.mul(block, num_heads), head), whole(self.part_bytes))

    def settings(self, b: Builder, base: ir.Value) -> tuple[ir.Value, ir.Value]:
        """(scale, soft cap) in every lane."""
        scale, cap = (spread(b, b.read(F32, base, 4 * i, align=4), self.lanes) for i in range(2))
        return scale, cap

    def scores(self, b: Builder, products: ir.Value, scale: ir.Value, cap: ir.Value) -> ir.Value:
        """A register of scores, capped if they are to be, from products of queries and keys."""
        scores = b.fmul(products, scale)
        return b.fmul(tanh(b, b.fdiv(scores, cap)), cap) if self.capped else scores

    def numbers(self, b: Builder, base: ir.Value, at: ir.Value) -> ir.Value:
        """A register of the cache in float32."""
        if self.dtype == "float32":
            return b.read(float32s(self.lanes), base, at, align=4)
        return read_bfloat16(b, base, at, self.lanes)

    # ---- what is multiplied: registers that are called float32, whatever `depth` numbers a lane has ----

    def factors(self, b: Builder, base: ir.Value, at: ir.Value) -> ir.Value:
        """A register of queries or keys, neighbours in d."""
        return b.read(float32s(self.lanes), base, at, align=2) if self.pairs else self.numbers(b, base, at)

    def joined(self, b: Builder, numbers: list[ir.Value]) -> ir.Value:
        """Of `depth` slots, float32 numbers that have no more digits than the cache's."""
        return bfloat16_pairs(b, *numbers) if self.pairs else numbers[0]

    def rounded(self, b: Builder, weights: ir.Value) -> tuple[ir.Value, ir.Value]:
        """(Neighbouring slots' weights to be written, what they count for in sums)."""
        if not self.pairs:
            return weights, weights
        written = b.fptrunc(weights, ir.VectorType(BFloat16(), self.lanes))
        return written, b.fpext(written, weights.type)

    def add_products(self, b: Builder, x: ir.Value, y: ir.Value, sums: ir.Value) -> ir.Value:
        if not self.pairs:
            return multiply_add(b, x, y, sums)
        kind = ir.VectorType(BFloat16(), 2 * self.lanes)
        return add_pair_products(b, sums, b.bitcast(x, kind), b.bitcast(y, kind))
