"""What callers give as a picture, to an array of RGB pixels: files' bytes, data URLs, base64, arrays, Pillow's images.

A path is read by the caller, who knows whether it may be. Letters: H rows, W columns.
"""

import base64
import binascii
import re
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxpaged.errors import RequestError, shown
from jaxpaged.multimodal.decoding import PictureLimits, decode_picture, rgb_of_image
from jaxpaged.multimodal.identity import WHITE, Colour

MEDIA_TYPES = ("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif")
BASE64_PIECE = 1 << 16
"""Characters; a multiple of four."""
DATA_URL = re.compile(r"data:([^,;]*)((?:;[^,;]*)*),", re.IGNORECASE)


def picture_pixels(picture: Any, field: str, limits: PictureLimits, background: Colour = WHITE) -> np.ndarray:
    """uint8 [H, W, 3] of bytes, a data URL, an array or an image of Pillow. Raises RequestError that names `field`."""
    if isinstance(picture, bytes | bytearray | memoryview):
        return decode_picture(bytes(picture), field, limits, background)
    if isinstance(picture, str):
        return decode_picture(data_url_bytes(picture, field, limits), field, limits, background)
    if isinstance(picture, np.ndarray):
        return array_pixels(picture, field, limits, background)
    pillow = sys.modules.get("PIL.Image")  # without it nobody can have made an image
    if pillow is not None and isinstance(picture, pillow.Image):
        return image_pixels(picture, field, limits, background)
    raise RequestError(
        f"{field} is of type {type(picture).__name__}, no picture. "
        "Give a PIL image, an array, a file's bytes or a data URL.",
        field,
    )


def array_pixels(array: np.ndarray, field: str, limits: PictureLimits, background: Colour = WHITE) -> np.ndarray:
    """Grey [H, W] or [H, W, 1], RGB [H, W, 3] and RGBA [H, W, 4], all of uint8, to uint8 [H, W, 3]."""
    array_size(array, field, limits)
    channels = array if array.ndim == 3 else array[:, :, None]
    if channels.shape[2] == 4:
        from PIL import Image

        return rgb_of_image(Image.fromarray(np.ascontiguousarray(channels), "RGBA"), background)
    return np.ascontiguousarray(np.broadcast_to(channels, (*channels.shape[:2], 3)))


def array_size(array: np.ndarray, field: str, limits: PictureLimits) -> tuple[int, int]:
    """Width and height. Raises RequestError for an array that is no picture, or too large."""
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        raise RequestError(
            f"{field} is an array of {array.dtype} with shape {list(array.shape)}. Give uint8 [height, width, 3], or "
            "1 or 4 channels in the last axis.",
            field,
        )
    limits.check_size(array.shape[1], array.shape[0], field)
    return array.shape[1], array.shape[0]


def image_pixels(image: Any, field: str, limits: PictureLimits, background: Colour = WHITE) -> np.ndarray:
    """The pixels of an image of Pillow, which may not have been read from its file yet."""
    limits.check_size(image.width, image.height, field)
    if image.mode in ("F", "I"):
        raise RequestError(f"{field} is an image of mode {image.mode}, without a range. Convert it to RGB.", field)
    try:
        return rgb_of_image(image, background)
    except Exception:
        raise RequestError(
            f"{field} is an image of mode {shown(image.mode)} that cannot be read as RGB. Convert it to RGB.", field
        ) from None


def data_url_bytes(url: str, field: str, limits: PictureLimits) -> bytes:
    """What a `data:` URL holds. Raises RequestError that names `field`."""
    found = DATA_URL.match(url)
    if found is None:
        raise RequestError(f"{field} is no data URL: it begins {shown(url[:16])}, not data:image/...;base64,", field)
    media_type, options = found[1].strip().lower(), found[2].lower().split(";")
    if media_type not in MEDIA_TYPES:
        raise RequestError(f"{field} has media type {shown(media_type)}. Known are {', '.join(MEDIA_TYPES)}.", field)
    if options[-1].strip() != "base64":
        raise RequestError(f"{field} is a data URL without ;base64. Encode the picture as base64.", field)
    return base64_bytes(url[found.end() :], field, limits)


def base64_bytes(text: str, field: str, limits: PictureLimits) -> bytes:
    """The bytes of a text in base64 with its padding, of the standard alphabet and nothing else."""
    limits.check_bytes(len(text) // 4 * 3 - 2, field)
    try:
        return b"".join(decoded_pieces(text))
    except (binascii.Error, ValueError):
        raise RequestError(f"{field} is not valid base64: use the standard alphabet with padding.", field) from None


def decoded_pieces(text: str) -> Iterator[bytes]:
    """The bytes of a text in base64, a piece after the other: the whole of a large picture would hold up all other
    threads for as long as several steps take. Raises ValueError."""
    for start in range(0, len(text), BASE64_PIECE):
        piece = text[start : start + BASE64_PIECE]
        if start + BASE64_PIECE < len(text) and piece.endswith("="):
            raise ValueError("padding that is not at the end")
        yield base64.b64decode(piece, validate=True)
