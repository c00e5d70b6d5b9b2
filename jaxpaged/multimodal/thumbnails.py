"""Small pictures to look at, made again from what processors made for an encoder. This module knows no caches.

Letters: H rows, W columns, C channels (3).
"""

import base64
import io
import math

import numpy as np

from jaxpaged.multimodal.processors.base import PictureLayout

SIDE = 96
"""Pixels of the longer side, at most."""


def seen_pixels(pixels: np.ndarray, layout: PictureLayout) -> np.ndarray:
    """uint8 [H, W, 3] as an encoder sees it, from `pixels` of shape `layout.pixels_shape`: the whole picture where
    there are crops of it, too; of patches, the inverse of `merged_patches`. Of a moment of a video the first frame."""
    if pixels.ndim == 4:
        return pixels[0]
    num_patches, numbers = pixels.shape
    rows, columns = layout.rows, layout.columns
    merge, num_frames = math.isqrt(num_patches // (rows * columns)), frames_in(numbers)
    side = math.isqrt(numbers // 3 // num_frames)
    cells = pixels.reshape(rows, columns, merge, merge, 3, num_frames, side, side)[:, :, :, :, :, 0]
    return cells.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * merge * side, columns * merge * side, 3)


def frames_in(numbers: int) -> int:
    """How many square frames of three channels a patch of so many numbers is."""
    count = 1
    while math.isqrt(numbers // 3 // count) ** 2 * 3 * count != numbers:
        count += 1
    return count


def thumbnail(pixels: np.ndarray, layout: PictureLayout) -> np.ndarray:
    """uint8 [H, W, 3] with sides of at most `SIDE`."""
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(seen_pixels(pixels, layout)))
    image.thumbnail((SIDE, SIDE))
    return np.asarray(image)


def data_url(pixels_HWC: np.ndarray) -> str:
    """A PNG as a URL that holds it."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels_HWC).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
