"""What is static of a layer for every binding of the kernels: its rule, and the vectors that a head is made of.

This module knows nothing of Pallas, of Triton, or of how large tiles should be.
"""

import dataclasses
import math

LOWEST = -1e30  # below any score, yet finite, so that the difference of two is not NaN
LOG2_E = math.log2(math.e)
MIN_PIECE = 16  # the shortest side of a matrix product in Triton


@dataclasses.dataclass(frozen=True)
class LayerRule:
    """What a layer's attention is, whatever its shapes. sees_ahead: queries may see positions behind their own."""

    scale: float
    window: int | None
    soft_cap: float | None
    has_sinks: bool
    kv_scales: str
    sees_ahead: bool = False


def pieces(head_dim: int) -> list[tuple[int, int]]:
    """(offset, size) of the powers of two that make up a head; the last one may reach beyond it."""
    result, offset = [], 0
    while offset < head_dim:
        left = head_dim - offset
        size = max(1 << (left.bit_length() - 1), MIN_PIECE)
        result.append((offset, size))
        offset += size
    return result
