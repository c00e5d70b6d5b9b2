"""What kernels of attention are made for: the shape of heads, and what the CPU has for them."""

import dataclasses

from llvmlite import ir

from pallas_kernels.llvm.builder import F32, Builder, whole
from pallas_kernels.llvm.functions import float32s, read_bfloat16, spread, tanh


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
    def part_bytes(self) -> int:
        """Of a block, what belongs to one kv head, of keys or of values."""
        return self.block_size * self.head_dim * self.size

    def part(self, b: Builder, block: ir.Value, num_heads: ir.Value, head: ir.Value) -> ir.Value:
        """Where in the cache the part of a block is that belongs to a head."""
        return b.mul(b.add(b.mul(block, num_heads), head), whole(self.part_bytes))

    def settings(self, b: Builder, base: ir.Value) -> tuple[ir.Value, ir.Value]:
        """(scale, soft cap) in every lane."""
        scale, cap = (spread(b, b.read(F32, base, 4 * i, align=4), self.lanes) for i in range(2))
        return scale, cap

    def cap_scores(self, b: Builder, scores: ir.Value, cap: ir.Value) -> ir.Value:
        """A register of scores, capped if they are to be."""
        return b.fmul(tanh(b, b.fdiv(scores, cap)), cap) if self.capped else scores

    def numbers(self, b: Builder, base: ir.Value, at: ir.Value) -> ir.Value:
        """A register of the cache in float32."""
        if self.dtype == "float32":
            return b.read(float32s(self.lanes), base, at, align=4)
        return read_bfloat16(b, base, at, self.lanes)
