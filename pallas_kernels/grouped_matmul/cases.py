"""The one list of named shapes for tests, benchmarks and tuning. Knows no arrays."""

import dataclasses

from pallas_kernels.shapes import array_bytes


@dataclasses.dataclass(frozen=True)
class Case:
    """`sizes` tokens of each expert and `padding` after them, weights in groups of `group` inputs (0: all in one).

    `weights` is the type of weights; a float type has no scales.
    """

    name: str
    weights: str
    sizes: tuple[int, ...]
    padding: int = 0
    group: int = 0
    num_inputs: int = 256
    num_outputs: int = 96
    dtype: str = "bfloat16"
    zeros: bool = False
    scales: str = "float32"

    @property
    def num_tokens(self) -> int:
        return sum(self.sizes) + self.padding

    @property
    def num_groups(self) -> int:
        return self.num_inputs // (self.group or self.num_inputs)

    @property
    def num_bytes(self) -> int:
        """What must move: the weights of experts that have tokens, with their scales, tokens and results, once."""
        busy, D, F = sum(size > 0 for size in self.sizes), self.num_inputs, self.num_outputs
        scales = (
            0 if self.weights == self.dtype else array_bytes(self.scales, busy, self.num_groups, F) * (1 + self.zeros)
        )
        return array_bytes(self.weights, busy, F, D) + scales + array_bytes(self.dtype, self.num_tokens, D + F)

    @property
    def flops(self) -> int:
        return 2 * sum(self.sizes) * self.num_inputs * self.num_outputs


_MIXED = (3, 0, 40, 1, 0, 0, 17)
_LARGE = (130, 0, 5, 250, 1)

CASES = (
    Case("bfloat16", "bfloat16", _MIXED),
    Case("float32, padding", "float32", _MIXED, padding=30, dtype="float32"),
    Case("float32, several chunks", "float32", (5, 0, 9), num_inputs=250, num_outputs=150, dtype="float32"),
    Case("int8 per channel, padding", "int8", _MIXED, padding=9),
    Case("int8 in groups, several tiles of tokens", "int8", _LARGE, group=128),
    Case("float8 in groups, padding of whole tiles", "float8_e4m3fn", (20, 0, 30), padding=300, group=128),
    Case("float8 per channel, float16", "float8_e4m3fn", _MIXED, dtype="float16"),
    Case("int4 in groups", "int4", _LARGE, padding=7, group=128, num_outputs=300),
    Case("int4 per channel", "int4", _MIXED, num_outputs=64),
    Case("int4 in small groups", "int4", _MIXED, group=32, padding=3),
    Case("int4 in groups of 64 with zeros, several tiles", "int4", _LARGE, group=64, padding=3, zeros=True),
    Case("int8 in groups of 16, few tokens", "int8", (2, 0, 1), group=16, num_inputs=384, zeros=True),
    Case("int4 in groups with zeros", "int4", _MIXED, group=128, zeros=True),
    Case("float4 in groups of 32", "float4_e2m1fn", _MIXED, group=32, padding=3, scales="bfloat16"),
    Case("int8 per channel with zeros", "int8", (5, 0, 9), zeros=True),
    Case("int8, groups larger than a tile of inputs", "int8", (4, 4), group=384, num_inputs=1152),
    Case("int8, inputs of several tiles", "int8", (1, 0, 2), num_inputs=128 * 34, num_outputs=32),
    Case("one expert has all tokens", "int8", (0, 0, 33, 0)),
    Case("one token", "int4", (0, 1, 0), group=128),
    Case("no token at all", "int8", (0, 0, 0), padding=5),
    Case("groups end where tiles do", "int8", (128, 128, 0, 128), group=128),
)


def _spread(num_tokens: int, num_experts: int) -> tuple[int, ...]:
    """Sizes as chance makes them: a multiplicative hash of each token chooses its expert."""
    chosen = [(token * 2654435761 % 2**32 ^ 0x9E3779B9) * 40503 % 2**32 >> 16 for token in range(1, num_tokens + 1)]
    return tuple(sum(x % num_experts == expert for x in chosen) for expert in range(num_experts))


# What an engine compiles; how tokens are spread over the 128 experts is data.
SERVING_CASES = tuple(
    Case(f"{weights}, {sum(sizes)} tokens", weights, sizes, group=group, num_inputs=2048, num_outputs=768)
    for weights, group in (("bfloat16", 0), ("int8", 0), ("float8_e4m3fn", 128), ("int4", 32))
    for sizes in (_spread(128, 128), _spread(4096, 128))
)
SERVING_CASES += (
    Case("float4 in groups of 32, 128 tokens", "float4_e2m1fn", _spread(128, 128), 0, 32, 2048, 768, scales="bfloat16"),
)
# For machines without an accelerator: that the benchmark runs, and ratios.
TINY_CASES = (
    Case("bfloat16, 64 tokens", "bfloat16", _spread(64, 8)),
    Case("int4 in groups, 64 tokens", "int4", _spread(64, 8), group=128),
)
