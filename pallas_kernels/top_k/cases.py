"""The one list of named shapes for tests and benchmarks. Knows no arrays."""

import dataclasses

from pallas_kernels.shapes import array_bytes


@dataclasses.dataclass(frozen=True)
class Case:
    """The `count` largest of `num_rows` rows of `num_columns` numbers of some `kind`.

    Kinds: "normal"; "equal"; "tied", few distinct values; "masked", all but a few are -inf; "rising" and "falling";
    "crowded", the largest are neighbours; "strange", infinities, NaN of both signs, both zeros, denormal numbers.
    """

    name: str
    num_rows: int
    num_columns: int
    count: int
    kind: str = "normal"

    @property
    def num_bytes(self) -> int:
        """What must move: all numbers once, and what is found."""
        wanted = self.num_rows, self.count
        return array_bytes("float32", self.num_rows, self.num_columns) + 2 * array_bytes("float32", *wanted)

    @property
    def flops(self) -> int:
        return 0  # comparisons only


CASES = (
    Case("candidates of a vocabulary", 3, 32_000, 256),
    Case("a large vocabulary, no multiple of a register", 2, 151_669, 256),
    Case("one of each", 5, 1_000, 1),
    Case("log probabilities", 2, 50_257, 20),
    Case("all of a row", 2, 256, 256),
    Case("fewer columns than a register has", 3, 5, 3),
    Case("nearly all, odd sizes", 2, 301, 257),
    Case("as many as there may be", 1, 40_000, 1024),
    Case("equal", 2, 10_007, 256, "equal"),
    Case("tied", 3, 32_000, 256, "tied"),
    Case("masked by a grammar", 2, 32_001, 256, "masked"),
    Case("rising", 2, 33_333, 100, "rising"),
    Case("falling", 2, 33_333, 100, "falling"),
    Case("crowded", 2, 131_072, 256, "crowded"),
    Case("numbers that are none", 4, 5_003, 256, "strange"),
)

SERVING_CASES = (
    Case("256 of 151,936, 1 row", 1, 151_936, 256),
    Case("256 of 128,256, 32 rows", 32, 128_256, 256),
    Case("20 of 32,000, 32 rows", 32, 32_000, 20),
)
# For machines without an accelerator: that the benchmark runs, and ratios.
TINY_CASES = (Case("256 of 32,000, 2 rows", 2, 32_000, 256),)
