"""What the host computes of the sizes of pictures for the towers of Qwen's VL models: the arrays of a batch.

Patches of a picture come in the order of the embeddings that they are merged into. Where layers have windows they are
put into an order in which those of a window are neighbours, and the embeddings are put back.

Letters: P patches. Host code: numpy only.
"""

from collections.abc import Sequence

import numpy as np

from jaxpaged.models.vision.interface import PIXELS, Picture, Shape
from jaxpaged.models.vision.parts import patch_positions
from jaxpaged.models.vision.qwen_config import QwenVisionConfig

POSITIONS, PICTURES, WINDOWS, ORDER, PLACES, SHARES = "positions", "pictures", "windows", "order", "places", "shares"
"""Names of arrays of a batch: row and column of each patch; the segment that is its picture, or its window; for each
embedding, in the order of pictures, where it is in the batch; four rows of the table of positions for each patch, and
how much of each it gets."""


def shapes(config: QwenVisionConfig, size: int, frames: int = 1) -> dict[str, Shape]:
    """`Vision.shapes`."""
    of_windows = {WINDOWS: ((size,), "int32"), ORDER: ((config.num_embeds(size),), "int32")}
    of_table = {PLACES: ((size, 4), "int32"), SHARES: ((size, 4), "float32")}
    return {
        PIXELS: ((size, 3 * frames * config.patch**2), "uint8"),
        POSITIONS: ((size, 2), "int32"),
        PICTURES: ((size,), "int32"),
        **(of_windows if config.window else {}),
        **(of_table if config.num_positions else {}),
    }


def pack(config: QwenVisionConfig, pictures: Sequence[Picture], size: int) -> dict[str, np.ndarray]:
    """`Vision.pack`. Patches that only pad are segments of one patch each."""
    frames = pictures[0][0].shape[1] // (3 * config.patch**2)
    arrays = {name: np.zeros(shape, dtype) for name, (shape, dtype) in shapes(config, size, frames).items()}
    end = num_pictures = num_windows = 0
    for pixels, (items, rows, columns) in pictures:
        for item in np.split(pixels, items):
            begin, end = end, end + len(item)
            position, order = patch_positions(config.merge, rows, columns), np.arange(rows * columns)
            if config.window:
                window, order = windows_of(config.window, rows, columns)
                of_patch = np.repeat(window[order], config.merge**2)
                arrays[WINDOWS][begin:end] = num_windows + of_patch
                arrays[ORDER][begin // config.merge**2 :][: len(order)] = begin // config.merge**2 + np.argsort(order)
                num_windows += window.max() + 1
            patches = (order[:, None] * config.merge**2 + np.arange(config.merge**2)).reshape(-1)
            by_embedding = arrays[PIXELS][begin:end].reshape(len(order), -1)
            np.take(item.reshape(len(order), -1), order, axis=0, out=by_embedding, mode="clip")
            arrays[POSITIONS][begin:end] = position[patches]
            arrays[PICTURES][begin:end] = num_pictures
            num_pictures += 1
            if config.num_positions:
                side = (rows * config.merge, columns * config.merge)
                arrays[PLACES][begin:end], arrays[SHARES][begin:end] = interpolation(config, position, side)
    arrays[PICTURES][end:] = num_pictures + np.arange(size - end)
    if config.window:
        arrays[WINDOWS][end:] = num_windows + np.arange(size - end)
        first = end // config.merge**2
        arrays[ORDER][first:] = np.arange(first, config.num_embeds(size))
    return arrays


def windows_of(side: int, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """The number of each embedding's window, and the order in which windows follow one another."""
    row, column = np.divmod(np.arange(rows * columns), columns)
    window = row // side * -(-columns // side) + column // side
    return window, np.argsort(window, kind="stable")


def interpolation(config: QwenVisionConfig, position: np.ndarray, sides: tuple[int, int]) -> tuple[np.ndarray, ...]:
    """(int32 [P, 4], float32 [P, 4]): for each patch the four nearest rows of the table, which is a square, laid over
    a picture with these sides in patches, corner on corner; and their shares, which add up to 1."""
    side = round(config.num_positions**0.5)
    taps, weights = [], []
    for axis, patches in enumerate(sides):
        where = position[:, axis].astype(np.float32) * np.float32(side - 1) / np.float32(max(patches - 1, 1))
        below = np.floor(where)
        part = (where - below)[:, None]
        taps.append(np.minimum(below.astype(np.int32)[:, None] + np.arange(2, dtype=np.int32), side - 1))
        weights.append(np.concatenate([1 - part, 1 - np.abs(part - 1)], axis=1))
    (row, column), (of_row, of_column) = taps, weights
    places = row[:, :, None] * side + column[:, None, :]
    return places.reshape(-1, 4), (of_row[:, :, None] * of_column[:, None, :]).reshape(-1, 4)
