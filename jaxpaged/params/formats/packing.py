"""Numbers of 4 and 8 bits out of the bytes and words that hold them: lowest bits first, words little endian.

Letters: O outputs and I inputs of a matrix, W words, B bytes, R some rows.
"""

import numpy as np

from jaxpaged.params.formats.stored_weight import row_ranges

BITS = (4, 8)
"""Those of numbers that are read. Other numbers do not divide words, and writers do not agree how they lie."""


def fields_of_words(words: np.ndarray, bits: int, less: int = 0) -> np.ndarray:
    """uint8 [..., fields] of 32-bit words [..., W], in order, in memory of their own: numbers - `less`, modulo 256."""
    packed = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return packed - np.uint8(less)
    *outer, width = packed.shape
    packed_RB = packed.reshape(-1, width)
    pairs_RB = np.empty(packed_RB.shape, np.uint16)
    for rows in row_ranges(*packed_RB.shape):
        pairs = pairs_RB[rows]
        pairs[...] = packed_RB[rows]
        pairs |= pairs << 4
        pairs &= 0x0F0F
        if less:
            fields = pairs.view(np.uint8)
            fields -= np.uint8(less)
    return pairs_RB.view(np.uint8).reshape(*outer, 2 * width)


def signed_fields(words: np.ndarray, bits: int) -> np.ndarray:
    """int8 [..., fields] of words [..., W]: numbers less 2^(bits - 1)."""
    return fields_of_words(words, bits, middle_of(bits)).view(np.int8)


def middle_of(bits: int) -> int:
    """What stands for zero where numbers are stored without a sign."""
    return 1 << (bits - 1)


def turned(words_WO: np.ndarray) -> np.ndarray:
    """The transpose, in memory of its own. Tiles of it pass through a buffer in the cache: rows of a matrix are often
    a power of two apart, where few of them fit a cache at once."""
    num_rows, num_columns = words_WO.shape
    out_OW = np.empty((num_columns, num_rows), words_WO.dtype)
    buffer = np.empty((TILE_ROWS, TILE_COLUMNS + 1), words_WO.dtype)
    for column in range(0, num_columns, TILE_COLUMNS):
        for row in range(0, num_rows, TILE_ROWS):
            tile = words_WO[row : row + TILE_ROWS, column : column + TILE_COLUMNS]
            near = buffer[: tile.shape[0], : tile.shape[1]]
            near[...] = tile
            out_OW[column : column + TILE_COLUMNS, row : row + TILE_ROWS] = near.T
    return out_OW


TILE_ROWS, TILE_COLUMNS = 512, 64


def check_words(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """ValueError unless a tensor of words has the shape that numbers of so many bits have."""
    if shape != expected:
        raise ValueError(f"{name} has shape {shape}, but its numbers fill {expected}")


def check_bits(bits: int) -> None:
    """ValueError for a number of bits that is not read."""
    if bits not in BITS:
        raise ValueError(f"weights have {bits} bits; 4 and 8 are read")
