"""The one list of named shapes for tests and benchmarks. Knows no arrays."""

import dataclasses

from pallas_kernels.shapes import array_bytes


@dataclasses.dataclass(frozen=True)
class Case:
    """`slots` of tokens, -1 for none, of `num_slots`."""

    name: str
    slots: tuple[int, ...]
    num_slots: int
    num_ranks: int = 16
    num_inputs: int = 96
    num_outputs: int = 160
    dtype: str = "bfloat16"

    @property
    def num_bytes(self) -> int:
        """What must move: slots that tokens have, tokens, what is added to, and results, once."""
        used, of_token = len({*self.slots} - {-1}), self.num_inputs + 2 * self.num_outputs
        of_slot = self.num_ranks * (self.num_inputs + self.num_outputs)
        return array_bytes(self.dtype, used, of_slot) + array_bytes(self.dtype, len(self.slots), of_token)

    @property
    def flops(self) -> int:
        adapted = sum(slot >= 0 for slot in self.slots)
        return 2 * adapted * self.num_ranks * (self.num_inputs + self.num_outputs)


CASES = (
    Case("two tokens, one of no slot", (3, -1), 4),
    Case("each its own", (4, 0, 2, -1, 1), 6),
    Case("runs of one slot, float32", (2,) * 9 + (0,) * 6 + (-1,) * 5 + (2,), 3, dtype="float32"),
    Case("runs of one slot, and odd sizes", (1,) * 8 + (-1,) * 5 + (3,) * 12, 4, 5, 75, 139),
    Case("ranks of several pieces", (0, 4, 4, 1), 5, 48),
    Case("several tiles of tokens", tuple(t % 3 - 1 for t in range(50)), 2),
    Case("none has any", (-1,) * 7, 8),
)
# What an engine compiles of Llama-3.1-8B, with queries, keys and values, and gate and up as one.
SERVING_CASES = tuple(
    Case(f"{name}, {T} tokens, {S} slots of rank {r}", tuple(t % S for t in range(T)), S, r * joined, inputs, outputs)
    for T, S, r in ((8, 8, 16), (64, 8, 16), (64, 32, 64))
    for name, joined, inputs, outputs in (("qkv", 3, 4096, 6144), ("o", 1, 4096, 4096), ("down", 1, 14336, 4096))
)
# For machines without an accelerator: that the benchmark runs, and ratios.
TINY_CASES = (Case("8 tokens of 8 slots", tuple(range(8)), 8, 16, 768, 768),)
