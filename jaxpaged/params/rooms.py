"""Host memory for parameters: where XLA:CPU takes an array for its own, and in large pages of the system.

A product of few rows reads every weight once. With pages of 4 KiB each of which the CPU has to look up, and stops to
read ahead at, two cores read 21 GB/s of weights with 768 inputs, with pages of 2 MiB 31 GB/s (AMD EPYC of 2023). The
system gives those for memory that asks for them (Linux, where /sys/kernel/mm/transparent_hugepage/enabled does not say
never) and is as large, so small parameters lie one behind the other in a region. Elsewhere nothing is lost.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

ALIGNMENT = 64
"""Bytes; that of XLA:CPU's own buffers. Other addresses have it make a copy."""
LARGE_PAGE = 2 << 20
REGION_BYTES = 64 << 20
"""Of a region with several parameters. Memory is taken where it is written."""


class Rooms:
    """Those of one load. A region is given back with its last array."""

    def __init__(self) -> None:
        self._free = np.empty(0, np.uint8)

    def room(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """An array that is not filled yet."""
        dtype = np.dtype(dtype)
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > len(self._free):
            self._free = region(max(num_bytes, REGION_BYTES))
        own, self._free = self._free[:num_bytes], self._free[-(-num_bytes // ALIGNMENT) * ALIGNMENT :]
        return own.view(dtype).reshape(shape)


def region(num_bytes: int) -> np.ndarray:
    """New memory that begins with a large page. numpy asks for these wherever an array has 4 MiB."""
    memory = np.empty(num_bytes + LARGE_PAGE, np.uint8)
    begin = -memory.ctypes.data % LARGE_PAGE
    return memory[begin : begin + num_bytes]
