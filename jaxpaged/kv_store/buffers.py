"""Memory for pages: aligned as jax takes host memory without a copy, and pieces that are put together.

jax.device_put copies what begins at an address that is no multiple of 64. Nothing here knows what the bytes mean.
"""

from collections.abc import Sequence

import numpy as np

Buffer = bytes | bytearray | memoryview | np.ndarray
"""Contiguous memory. Arrays are of bytes (uint8)."""

ALIGNMENT = 64


def aligned_empty(num_bytes: int, alignment: int = ALIGNMENT) -> np.ndarray:
    """Bytes of any content, whose first lies at a multiple of `alignment`."""
    raw = np.empty(num_bytes + alignment - 1, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + num_bytes]


def bytes_of(buffer: Buffer) -> memoryview:
    """The buffer as a flat view of bytes. ValueError or TypeError where it is no contiguous memory."""
    return memoryview(buffer).cast("B")


def total_bytes(buffers: Sequence[Buffer]) -> int:
    return sum(bytes_of(buffer).nbytes for buffer in buffers)


def joined(buffers: Sequence[Buffer]) -> np.ndarray:
    """A copy of all buffers, one behind the other, aligned."""
    views = [bytes_of(buffer) for buffer in buffers]
    whole = aligned_empty(sum(view.nbytes for view in views))
    start = 0
    for view in views:
        whole[start : start + view.nbytes] = np.frombuffer(view, np.uint8)
        start += view.nbytes
    return whole


def read_only(whole: np.ndarray) -> np.ndarray:
    """A view that cannot be written to: a page that several may hold."""
    view = whole.view()
    view.flags.writeable = False
    return view
