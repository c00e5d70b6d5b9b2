"""Bytes of a file to an array of RGB pixels, within limits, with one clear error for whatever is wrong with them.

What is decided here:
* Only PNG, JPEG, WebP and GIF are decoded, whatever else Pillow can do. The bytes decide, not a name or media type.
* Of an animation the first frame counts, as in vLLM.
* EXIF orientation is applied: the model sees what a person sees. transformers' processors ignore it.
* Transparent pixels are laid on white, or on another colour that is asked for. 16 bits become 8 by their upper half.
  Colour profiles are ignored.

No error repeats words of Pillow, which may hold addresses of memory. Letters: H rows, W columns, C channels (3).
"""

import io
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxpaged.errors import ConfigError, RequestError, how_to_install, is_installed
from jaxpaged.multimodal.headers import FORMATS, Header, read_header
from jaxpaged.multimodal.identity import WHITE, Colour

if TYPE_CHECKING:
    from PIL import Image

logger = logging.getLogger(__name__)

EXIF_ORIENTATION = 0x0112


@dataclass(frozen=True)
class PictureLimits:
    """What a picture may be. Units: bytes of the file, and pixels."""

    max_bytes: int = 64 << 20
    max_pixels: int = 89_478_485  # 256 MiB of RGB, above which Pillow warns
    max_side: int = 32_768

    def check_size(self, width: int, height: int, field: str) -> None:
        """Raise RequestError that names `field`."""
        if width < 1 or height < 1:
            raise RequestError(f"{field} is a picture of {width}x{height} pixels: it has none.", field)
        if max(width, height) > self.max_side:
            raise RequestError(
                f"{field} is a picture of {width}x{height} pixels, and a side may have {self.max_side}. Scale it down.",
                field,
            )
        if width * height > self.max_pixels:
            raise RequestError(
                f"{field} is a picture of {width}x{height} = {width * height} pixels, and {self.max_pixels} are "
                "allowed. Scale it down.",
                field,
            )

    def check_bytes(self, num_bytes: int, field: str) -> None:
        """Raise RequestError that names `field`."""
        if num_bytes > self.max_bytes:
            raise RequestError(
                f"{field} has {num_bytes} bytes, and a picture may have {self.max_bytes}. Send a smaller file.", field
            )


def decode_picture(data: bytes, field: str, limits: PictureLimits, background: Colour = WHITE) -> np.ndarray:
    """The pixels of a file: uint8 [H, W, 3], contiguous. Raises RequestError that names `field`."""
    header = checked_header(data, field, limits)
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.size == (header.width, header.height):  # a GIF's frame may be larger than its header says
                return rgb_of_image(image, background)
    except MemoryError:
        raise
    except Exception as error:  # what decoders raise is not limited to OSError
        logger.debug("a %s could not be decoded", header.format, exc_info=error)
    raise damaged(header, field)


def picture_size(data: bytes, field: str, limits: PictureLimits) -> tuple[int, int]:
    """Width and height that `decode_picture` will give. Nothing is decoded: the rest of the file may be damaged.

    Raises RequestError that names `field`.
    """
    header = checked_header(data, field, limits)
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            is_turned = orientation_of(image) >= 5
    except Exception as error:
        logger.debug("the header of a %s could not be read", header.format, exc_info=error)
        raise damaged(header, field) from None
    return (header.height, header.width) if is_turned else (header.width, header.height)


def checked_header(data: bytes, field: str, limits: PictureLimits) -> Header:
    """What a file says of itself, within the limits. Raises RequestError that names `field`."""
    if not is_installed("PIL"):
        raise ConfigError(f"Pictures need Pillow, which is not installed: {how_to_install('vision')}.")
    limits.check_bytes(len(data), field)
    header = read_header(data)
    if header is None:
        raise RequestError(f"{field} is no picture that can be read: send PNG, JPEG, WebP or GIF, complete.", field)
    limits.check_size(header.width, header.height, field)
    return header


def damaged(header: Header, field: str) -> RequestError:
    name = "WebP" if header.format == "WEBP" else header.format
    return RequestError(f"{field} is a damaged or incomplete {name}: it cannot be decoded. Send it whole.", field)


def rgb_of_image(image: "Image.Image", background: Colour = WHITE) -> np.ndarray:
    """uint8 [H, W, 3] of the first frame, turned as its EXIF says, on a colour. Raises whatever Pillow raises."""
    from PIL import Image

    orientation = orientation_of(image)
    if image.mode.startswith("I;16"):
        image = eight_bits(image)
    if image.has_transparency_data:
        front = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", front.size, (*background, 255)), front)
    image = image.convert("RGB")
    if orientation != 1:
        turn = Image.Transpose
        turns = (
            turn.FLIP_LEFT_RIGHT,
            turn.ROTATE_180,
            turn.FLIP_TOP_BOTTOM,
            turn.TRANSPOSE,
            turn.ROTATE_270,
            turn.TRANSVERSE,
            turn.ROTATE_90,
        )
        image = image.transpose(turns[orientation - 2])
    return np.array(image, dtype=np.uint8, order="C")


def eight_bits(image: "Image.Image") -> "Image.Image":
    """Grey of 16 bits to grey of 8; `convert` would make white of nearly all of it."""
    from PIL import Image

    deep_HW = np.asarray(image)
    grey = Image.fromarray((deep_HW >> 8).astype(np.uint8))
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        grey.putalpha(Image.fromarray(np.where(deep_HW == clear, 0, 255).astype(np.uint8)))
    return grey


def orientation_of(image: "Image.Image") -> int:
    """1 to 8 as EXIF has it; 1, upright, where it is missing or makes no sense."""
    from PIL import Image

    exif = Image.Exif()
    try:
        exif.load(image.info.get("exif", b""))
        orientation = exif.get(EXIF_ORIENTATION, 1)
    except Exception:  # EXIF of some cameras is broken, and their pictures are fine
        return 1
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1
