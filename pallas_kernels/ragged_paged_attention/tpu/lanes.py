"""How keys and values of one token lie in the 128 lanes of a TPU register. Knows nothing of kernels and arrays.

A slot of the cache holds the key and the value of one token and head side by side: `[blocks, kv heads, slots, lanes]`.
Slots lie along sublanes, which come in tiles: 8 for 32-bit types, 16 for 16-bit and 32 for 8-bit ones.
"""

import dataclasses
import functools
import math
from typing import Any

import numpy as np

NUM_LANES = 128
HALF = NUM_LANES // 2


@dataclasses.dataclass(frozen=True)
class Lanes:
    """The lanes of one slot, for a head dim. Up to 64, key and value share one tile of 128 lanes."""

    head_dim: int

    @functools.cached_property
    def padded(self) -> int:
        """Lanes from a slot's first key number to its first value number."""
        return HALF if self.head_dim <= HALF else math.ceil(self.head_dim / NUM_LANES) * NUM_LANES

    @property
    def slot(self) -> int:
        """Lanes of a slot: key and value."""
        return 2 * self.padded

    @property
    def operand(self) -> int:
        """Lanes of the operands of both products: whole tiles, so that none is ever shifted.

        Where key and value share a tile, queries are zero in the value's lanes, and outputs have something
        meaningless in the key's.
        """
        return max(self.padded, NUM_LANES)

    @property
    def keys(self) -> slice:
        return slice(0, self.operand)

    @property
    def values(self) -> slice:
        return slice(self.slot - self.operand, self.slot)

    @property
    def outputs(self) -> slice:
        """Where the head's numbers are in an output of `operand` lanes."""
        start = self.operand - self.padded
        return slice(start, start + self.head_dim)


def sublane_tile(dtype: Any) -> int:
    """Slots in one tile of the cache: the grain of what can be read and written."""
    return 32 // np.dtype(dtype).itemsize


def round_up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple
