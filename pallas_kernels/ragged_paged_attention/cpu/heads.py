"""What kernels of attention are made for: the shape of heads, and what the CPU has for them."""

import dataclasses

from llvmlite import ir

from pallas_kernels.llvm.builder import Builder
from pallas_kernels.llvm.functions import float32s, read_bfloat16


@dataclasses.dataclass(frozen=True)
class Heads:
    """`pairs`: the CPU multiplies pairs of bfloat16, and single queries come as such."""

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

    def numbers(self, b: Builder, base: ir.Value, at: ir.Value) -> ir.Value:
        """A register of the cache in float32."""
        if self.dtype == "float32":
            return b.read(float32s(self.lanes), base, at, align=4)
        return read_bfloat16(b, base, at, self.lanes)
