"""The one list of named shapes for tests, benchmarks and tuning. Knows no arrays."""

import dataclasses

from pallas_kernels.shapes import array_bytes


@dataclasses.dataclass(frozen=True)
class Case:
    """`num_tokens` times a weight of `num_inputs` and `num_outputs`, in groups of `group` inputs (0: all in one)."""

    name: str
    weights: str
    group: int = 0
    num_tokens: int = 5
    num_inputs: int = 256
    num_outputs: int = 96
    zeros: bool = False
    activations: str | None = None
    dtype: str = "bfloat16"
    scales: str = "float32"

    @property
    def num_groups(self) -> int:
        return self.num_inputs // (self.group or self.num_inputs)

    @property
    def num_bytes(self) -> int:
        """What must move: the weight with its scales, tokens and results, each once."""
        T, D, F = self.num_tokens, self.num_inputs, self.num_outputs
        scales = array_bytes(self.scales, self.num_groups, F) + array_bytes("float32", self.zeros, self.num_groups, F)
        return array_bytes(self.weights, F, D) + scales + array_bytes(self.dtype, T, D + F)

    @property
    def flops(self) -> int:
        return 2 * self.num_tokens * self.num_inputs * self.num_outputs


CASES = (
    Case("w8a16 per channel", "int8"),
    Case("w8a16 per channel, float8", "float8_e4m3fn", dtype="float16"),
    Case("w8a16 per channel, float8_e5m2, float32", "float8_e5m2", dtype="float32"),
    Case("w4a16 per channel", "int4", num_tokens=33),
    Case("w8a8 int8", "int8", activations="int8"),
    Case("w8a8 float8", "float8_e4m3fn", activations="float8_e4m3fn"),
    Case("w8a16 in groups", "int8", group=128),
    Case("w8a16 in groups, float8", "float8_e4m3fn", group=128, num_tokens=40),
    Case("w4a16 in groups", "int4", group=128),
    Case("w4a16 in groups with zeros", "int4", group=128, zeros=True, num_outputs=100),
    Case("w4a16, one group with zeros", "int4", zeros=True, num_tokens=1),
    Case("w4a16 in small groups", "int4", group=32, zeros=True),
    Case("w4a16, many tokens", "int4", group=128, num_tokens=530, num_inputs=128 * 5, num_outputs=300),
    Case("w8a16, inputs of several tiles", "int8", group=128, num_tokens=3, num_inputs=128 * 34, num_outputs=32),
    Case("w8a16, groups larger than a tile", "int8", group=384, num_inputs=1152, zeros=True),
    Case("w4a16 in groups of 64, several tiles", "int4", 64, num_inputs=4608, num_tokens=70, zeros=True),
    Case("w8a16 in groups of 16", "int8", group=16, num_inputs=384, num_outputs=130),
    Case("float4 in groups of 32", "float4_e2m1fn", group=32, num_inputs=1280, dtype="float16", scales="bfloat16"),
    Case("float4 in groups of 16, scales of float8", "float4_e2m1fn", group=16, scales="float8_e4m3fn", num_tokens=33),
    Case("w4a16 in odd groups, float32", "int4", group=48, num_inputs=96, dtype="float32"),
)

_DOWN = {"num_inputs": 14336, "num_outputs": 4096}
# What an engine compiles: an 8-billion-parameter model's second feed-forward product.
SERVING_CASES = (
    Case("w4a16, 16 tokens", "int4", group=128, num_tokens=16, **_DOWN),
    Case("w4a16 with zeros, 2048 tokens", "int4", 128, 2048, zeros=True, **_DOWN),
    Case("w4a16 in groups of 32, 16 tokens", "int4", group=32, num_tokens=16, **_DOWN),
    Case("w4a16 in groups of 64 with zeros, 512 tokens", "int4", 64, 512, zeros=True, **_DOWN),
    Case("float4 in groups of 32, 16 tokens", "float4_e2m1fn", 32, 16, scales="bfloat16", **_DOWN),
    Case("float4 in groups of 16, 16 tokens", "float4_e2m1fn", 16, 16, scales="float8_e4m3fn", **_DOWN),
    Case("w8a16, 16 tokens", "int8", group=128, num_tokens=16, **_DOWN),
    Case("w8a16 float8, 512 tokens", "float8_e4m3fn", group=128, num_tokens=512, **_DOWN),
    Case("w8a16 per channel, 16 tokens", "int8", num_tokens=16, **_DOWN),
    Case("w8a8 int8, 2048 tokens", "int8", num_tokens=2048, activations="int8", **_DOWN),
    Case("w8a8 float8, 2048 tokens", "float8_e4m3fn", num_tokens=2048, activations="float8_e4m3fn", **_DOWN),
)
# For machines without an accelerator: that the benchmark runs, and ratios.
TINY_CASES = (
    Case("w4a16 with zeros, 8 tokens", "int4", 128, 8, zeros=True, dtype="float32"),
    Case("w8a16 per channel, 8 tokens", "int8", num_tokens=8),
    Case("w8a8 int8, 32 tokens", "int8", num_tokens=32, activations="int8"),
)
