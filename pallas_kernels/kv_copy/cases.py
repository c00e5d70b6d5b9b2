"""The one list of named shapes for tests, benchmarks and tuning. Knows no arrays."""

import dataclasses

from pallas_kernels.shapes import array_bytes


@dataclasses.dataclass(frozen=True)
class Case:
    """A pool of `num_arrays` arrays [num_blocks, *block], and (source, target) pairs to copy in it."""

    name: str
    pairs: tuple[tuple[int, int], ...]
    block: tuple[int, ...] = (2, 16, 8)
    dtype: str = "float32"
    num_blocks: int = 12
    num_arrays: int = 2

    @property
    def num_pairs(self) -> int:
        return len(self.pairs)

    @property
    def num_bytes(self) -> int:
        """What must move: each real pair's block is read and written."""
        real = sum(all(0 <= block < self.num_blocks for block in pair) for pair in self.pairs)
        return 2 * real * self.num_arrays * array_bytes(self.dtype, *self.block)

    @property
    def flops(self) -> int:
        return 0


_FAN_OUT = ((3, 0), (3, 1), (5, 2), (7, 11))
_PADDED = ((3, 1), (-1, 4), (4, -1), (-1, -1), (12, 5), (5, 12), (2**31 - 1, 6), (6, -(2**31)), (10, 2))

CASES = (
    Case("one pair", ((1, 2),)),
    Case("one source for several targets", _FAN_OUT),
    Case("padding of every kind", _PADDED),
    Case("nothing but padding", ((-1, -1), (12, 3), (3, 12))),
    Case("no pairs", ()),
    Case("more pairs than are in flight", tuple((i, 20 + i) for i in range(20)), num_blocks=40, num_arrays=1),
    Case("four axes and three arrays", ((2, 3), (5, 6)), block=(16, 4, 2, 8), num_arrays=3),
    Case("bfloat16", _PADDED, dtype="bfloat16"),
    Case("float8", _FAN_OUT, dtype="float8_e4m3fn"),
    Case("int8", _FAN_OUT, dtype="int8"),
    Case("blocks of odd size", _FAN_OUT, block=(3, 5, 7)),
    Case("blocks of several pieces", _FAN_OUT, block=(5, 20, 24)),
)


def _scattered(num_pairs: int, num_blocks: int) -> tuple[tuple[int, int], ...]:
    """From even blocks to odd ones, far from each other; 37 shares no factor with powers of two."""
    return tuple((2 * (37 * i % (num_blocks // 2)), 2 * (53 * i % (num_blocks // 2)) + 1) for i in range(num_pairs))


_FEW, _MANY = _scattered(64, 4096), _scattered(1024, 4096)

# What an engine compiles; and as many blocks as no cache holds.
SERVING_CASES = (
    Case("keys and values apart", _FEW, block=(8, 16, 128), dtype="bfloat16", num_blocks=4096),
    Case("one array, float8", _FEW, (4, 32, 256), "float8_e4m3fn", num_blocks=4096, num_arrays=1),
    Case("1,024 pairs, keys and values apart", _MANY, block=(8, 16, 128), dtype="bfloat16", num_blocks=4096),
)
# For machines without an accelerator: that the benchmark runs, and ratios.
TINY_CASES = (Case("64 pairs, keys and values apart", _FEW, block=(2, 16, 16), num_blocks=4096),)
