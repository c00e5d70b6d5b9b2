"""The one list of named shapes for tests, benchmarks and tuning. Knows no arrays."""

import dataclasses

from pallas_kernels.shapes import array_bytes


@dataclasses.dataclass(frozen=True)
class Case:
    """Logits [len(limits), vocabulary] of some `kind`, and (top_k, top_p, min_p) of each row.

    Kinds: "normal"; "tied", few distinct values; "masked", most are -inf; "peaked", one token has it all;
    "equal"; "wide", magnitudes from 1e-30 to 1e30 of both signs, and both zeros.
    """

    name: str
    limits: tuple[tuple[int, float, float], ...]
    vocabulary: int = 300
    kind: str = "normal"

    @property
    def num_rows(self) -> int:
        return len(self.limits)

    @property
    def num_bytes(self) -> int:
        """What must move: the logits, once; limits and results are next to nothing."""
        return array_bytes("float32", self.num_rows, self.vocabulary)

    @property
    def flops(self) -> int:
        return 0  # comparisons and sums only: no products of matrices


_OFF = (0, 1.0, 0.0)
_EVERY = (
    _OFF,
    (1, 1.0, 0.0),
    (7, 1.0, 0.0),
    (250, 1.0, 0.0),
    (10**6, 0.5, 0.0),
    (-1, 0.01, 0.0),
    (0, 0.9, 0.0),
    (0, 0.999, 0.0),
    (0, 1.0, 0.02),
    (0, 1.0, 1.0),
    (40, 0.9, 0.01),
    (3, 0.6, 0.3),
)

CASES = (
    Case("nothing cuts", (_OFF,) * 3),
    Case("every limit, rows no multiple of a tile", _EVERY),
    Case("a vocabulary that fills its pieces", _EVERY, vocabulary=1024),
    Case("a vocabulary of several pieces and a rest", _EVERY, vocabulary=9001),
    Case("a vocabulary below one piece", _EVERY[:9], vocabulary=7),
    Case("ties", _EVERY, kind="tied"),
    Case("grammar masks", _EVERY, kind="masked"),
    Case("one token has it all", _EVERY, kind="peaked"),
    Case("all tokens equal", _EVERY, kind="equal"),
    Case("any magnitude, both zeros", _EVERY, kind="wide"),
    Case("eight rows with top_k, then some with top_p", ((3, 1.0, 0.0),) * 8 + ((0, 0.9, 0.0),) * 3),
)

_USUAL = (50, 0.95, 0.0)

# What an engine compiles; limits are data.
SERVING_CASES = (
    Case("64 rows of 128,256", (_USUAL,) * 64, vocabulary=128_256),
    Case("8 rows of 262,144", (_USUAL,) * 8, vocabulary=262_144),
)
# For machines without an accelerator: that the benchmark runs, and ratios.
TINY_CASES = (Case("4 rows of 8,192", (_USUAL,) * 4, vocabulary=8192),)
