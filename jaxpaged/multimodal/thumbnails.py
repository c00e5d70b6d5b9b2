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
    there are crops of it, too; of patches, the inverse of `merged_patches`."""
    if pixels.ndim == 4:
        return pixels[0]
    num_patches, numbers = pixels.shape
    rows, columns = layout.rows, layout.columns
    merge, side = math.isqrt(num_patches // (rows * columns)), math.isqrt(numbers // 3)
    cells = pixels.reshape(rows, columns, merge, merge, 3, side, side)
    return cells.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * merge * side, columns * merge * side, 3)


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
