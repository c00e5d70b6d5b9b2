"""Format and size of a picture from its first bytes, so that too large a picture is refused before anything decodes it.

The header may lie. `decoding.py` looks again once a decoder is at work. Nothing here needs Pillow.
"""

import struct
from typing import NamedTuple

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


class Header(NamedTuple):
    """What a file says of itself. EXIF orientation is not applied to the size. Units: pixels."""

    format: str
    width: int
    height: int


def read_header(data: bytes) -> Header | None:
    """None: this is no PNG, JPEG, WebP or GIF, or ends within its header."""
    try:
        if data[:8] == b"\x89PNG\r\n\x1a\n" and data[12:16] == b"IHDR":
            return Header("PNG", *struct.unpack_from(">II", data, 16))
        if data[:6] in (b"GIF87a", b"GIF89a"):
            return Header("GIF", *struct.unpack_from("<HH", data, 6))
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            return webp_header(data)
        if data[:2] == b"\xff\xd8":
            return jpeg_header(data)
    except (struct.error, IndexError):
        pass
    return None


def webp_header(data: bytes) -> Header | None:
    """The first chunk decides (RFC 9649): extended, lossless or lossy."""
    kind = data[12:16]
    if kind == b"VP8X":
        width, height = (int.from_bytes(each, "little") + 1 for each in (data[24:27], data[27:30]))
        return Header("WEBP", width, height) if len(data) >= 30 else None
    if kind == b"VP8L" and data[20] == 0x2F:
        (bits,) = struct.unpack_from("<I", data, 21)
        return Header("WEBP", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 26)
        return Header("WEBP", width & 0x3FFF, height & 0x3FFF)
    return None


def jpeg_header(data: bytes) -> Header | None:
    """The first start-of-frame segment has the size (ITU T.81, section B.2.2)."""
    at = 2
    while True:
        if data[at] != 0xFF:
            return None
        while data[at] == 0xFF:
            at += 1
        marker = data[at]
        at += 1
        if marker == 0x01 or 0xD0 <= marker <= 0xD7:
            continue
        if marker in (0xD9, 0xDA):
            return None
        (length,) = struct.unpack_from(">H", data, at)
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", data, at + 3)
            return Header("JPEG", width, height)
        at += length
