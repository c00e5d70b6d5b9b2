"""The one list of named shapes for tests, benchmarks and tuning. Knows no arrays."""

import dataclasses


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

# What an engine compiles; the pairs are padding, since only their number matters there.
SERVING_CASES = (
    Case("keys and values apart", ((-1, -1),) * 64, block=(8, 16, 128), dtype="bfloat16", num_blocks=4096),
    Case("one array, float8", ((-1, -1),) * 64, (4, 32, 256), "float8_e4m3fn", num_blocks=4096, num_arrays=1),
)
