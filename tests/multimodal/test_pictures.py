import base64
import contextlib
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from jaxpaged.errors import RequestError
from jaxpaged.multimodal import pictures
from jaxpaged.multimodal.decoding import PictureLimits, decode_picture, picture_size
from jaxpaged.multimodal.headers import Header, read_header
from jaxpaged.multimodal.pictures import base64_bytes, picture_pixels
from tests.multimodal.drawn import drawn, encoded

FIELD = "messages[0].content[1].image_url"
LIMITS = PictureLimits()


def refusal(picture, limits=LIMITS) -> str:
    with pytest.raises(RequestError) as caught:
        picture_pixels(picture, FIELD, limits)
    assert caught.value.parameter == FIELD
    message = str(caught.value)
    assert message.startswith(FIELD)
    for word in ("PIL", "at 0x", "BytesIO", "cannot identify", "truncated", "zlib"):
        assert word not in message.replace("PIL image", "")
    return message


def png(width, height, depth=8, colour=0, rows=b"", extra=b"") -> bytes:
    """A PNG made by hand, so that its header can lie."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    start = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + start + extra + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


# ---- formats, sizes, modes ---------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(1, 1), (7, 5), (640, 480), (1, 2000)])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PNG", {}),
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        ("WEBP", {}),
        ("WEBP", {"lossless": True}),
        ("WEBP", {"exif": Image.Exif().tobytes()}),
        ("GIF", {}),
    ],
)
def test_every_format_gives_the_pixels_that_pillow_gives(kind, options, size):
    data = encoded(drawn(*size), kind, **options)
    assert read_header(data) == Header(kind, *size)
    pixels = decode_picture(data, FIELD, LIMITS)
    assert pixels.dtype == np.uint8 and pixels.shape == (size[1], size[0], 3) and pixels.flags.c_contiguous
    assert np.array_equal(pixels, np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))
    assert picture_size(data, FIELD, LIMITS) == size


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB"])
def test_modes_of_png_become_rgb(mode):
    image = drawn(30, 20, mode=mode)
    assert np.array_equal(decode_picture(encoded(image), FIELD, LIMITS), np.asarray(image.convert("RGB")))


def test_cmyk_becomes_rgb():
    data = encoded(drawn(30, 20, mode="CMYK"), "JPEG")
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.array_equal(decode_picture(data, FIELD, LIMITS), expected)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_transparent_pixels_are_laid_on_white(kind):
    image = Image.fromarray(np.array([[[200, 0, 0, 0], [200, 0, 0, 255], [0, 0, 0, 128]]], np.uint8), "RGBA")
    pixels = decode_picture(encoded(image, kind, **({"lossless": True} if kind == "WEBP" else {})), FIELD, LIMITS)
    assert pixels.tolist() == [[[255, 255, 255], [200, 0, 0], [127, 127, 127]]]


def test_a_transparent_colour_of_a_palette_and_of_rgb_is_laid_on_white():
    palette = drawn(8, 8, mode="P")
    pixels = decode_picture(encoded(palette, transparency=palette.getpixel((0, 0))), FIELD, LIMITS)
    assert pixels[0, 0].tolist() == [255, 255, 255]
    image = Image.new("RGB", (2, 1), (9, 8, 7))
    image.putpixel((1, 0), (9, 8, 6))
    pixels = decode_picture(encoded(image, transparency=(9, 8, 7)), FIELD, LIMITS)
    assert pixels.tolist() == [[[255, 255, 255], [9, 8, 6]]]


def test_16_bits_become_8_by_their_upper_half():
    grey = np.array([[0, 255, 256, 0x8040, 0xFFFF]], np.uint16)
    rows = b"\0" + grey.astype(">u2").tobytes()
    assert decode_picture(png(5, 1, 16, 0, rows), FIELD, LIMITS)[0, :, 0].tolist() == [0, 0, 1, 0x80, 0xFF]
    clear = struct.pack(">I", 2) + b"tRNS" + b"\x80\x40" + struct.pack(">I", zlib.crc32(b"tRNS\x80\x40"))
    with_clear = decode_picture(png(5, 1, 16, 0, rows, clear), FIELD, LIMITS)
    assert with_clear[0, :, 1].tolist() == [0, 0, 1, 0xFF, 0xFF]
    colour = b"\0" + np.array([0x1234, 0x5678, 0x9ABC], ">u2").tobytes()
    assert decode_picture(png(1, 1, 16, 2, colour), FIELD, LIMITS).tolist() == [[[0x12, 0x56, 0x9A]]]


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame_counts(kind):
    frames = [Image.new("RGB", (9, 9), colour) for colour in ("red", "blue", "lime")]
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
    pixels = decode_picture(data, FIELD, LIMITS)
    assert pixels.shape == (9, 9, 3) and pixels[4, 4, 0] > 240 and pixels[4, 4, 2] < 15


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_orientation_is_applied_to_pixels_and_size(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(drawn(30, 20), kind, exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    pixels = decode_picture(data, FIELD, LIMITS)
    assert np.array_equal(pixels, expected)
    assert picture_size(data, FIELD, LIMITS) == (pixels.shape[1], pixels.shape[0])
    assert np.array_equal(picture_pixels(Image.open(io.BytesIO(data)), FIELD, LIMITS), expected)


def test_broken_exif_leaves_the_picture_upright():
    data = encoded(drawn(30, 20), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert decode_picture(data, FIELD, LIMITS).shape == (20, 30, 3)


# ---- bad files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_file_cut_anywhere_or_damaged_gives_pixels_or_one_clear_error(kind):
    data = encoded(drawn(64, 48), kind)
    assert "damaged or incomplete" in refusal(data[: len(data) // 2])
    rng = np.random.default_rng(0)
    for end in [0, 1, 8, 12, 20, 30, *rng.integers(0, len(data) - 100, 20)]:
        assert "Send" in refusal(data[:end]) or "send" in refusal(data[:end])
    for place in rng.integers(0, len(data), 60):
        damaged = bytearray(data)
        damaged[place] ^= 0xFF
        with contextlib.suppress(RequestError):  # any other exception fails
            assert picture_pixels(bytes(damaged), FIELD, LIMITS).shape[2] == 3


def test_a_bomb_is_refused_by_its_header_before_anything_is_decoded(monkeypatch):
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("nothing may open it"))
    huge = encoded_header("WEBP", 16383, 16383)
    for data in (png(20000, 20000), huge, encoded_header("GIF", 60000, 2000), encoded_header("JPEG", 30000, 30000)):
        assert "are allowed" in refusal(data) or "may have 32768" in refusal(data)
    assert "it has none" in refusal(encoded_header("GIF", 0, 7))


def encoded_header(kind: str, width: int, height: int) -> bytes:
    if kind == "GIF":
        return b"GIF89a" + struct.pack("<HH", width, height) + bytes(20)
    if kind == "WEBP":
        size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
        return b"RIFF" + struct.pack("<I", 100) + b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + size + bytes(80)
    return b"\xff\xd8\xff\xe0\x00\x04xx\xff\xff\xc2" + struct.pack(">HBHH", 17, 8, height, width) + bytes(40)


def test_a_header_that_lies_is_found():
    gif = bytearray(encoded(drawn(40, 30), "GIF"))
    gif[6:10] = struct.pack("<HH", 1, 1)  # its frame is larger
    assert "damaged" in refusal(bytes(gif))
    assert "damaged" in refusal(png(5000, 5000, rows=bytes(100)))
    webp = encoded(drawn(40, 30), "WEBP", exif=Image.Exif().tobytes())
    assert webp[12:16] == b"VP8X"
    assert "damaged" in refusal(webp[:24] + b"\x07\0\0\x07\0\0" + webp[30:])


@pytest.mark.parametrize(
    ("kind", "mode"), [("BMP", "RGB"), ("TIFF", "RGB"), ("PPM", "RGB"), ("JPEG2000", "RGB"), ("ICO", "RGB")]
)
def test_other_formats_are_refused_even_those_that_pillow_knows(kind, mode):
    assert "PNG, JPEG, WebP or GIF" in refusal(encoded(drawn(32, 32, mode=mode), kind))


@pytest.mark.parametrize(
    "data", [b"", b"%PDF-1.7", b"<svg/>", b"\xff\xd8", b"\xff\xd8\xff\xd9", b"RIFF\0\0\0\0WEBPVP8L"]
)
def test_what_is_no_picture_is_refused(data):
    assert "no picture that can be read" in refusal(data)


def test_limits_name_what_was_sent_and_what_is_allowed():
    data = encoded(drawn(100, 50))
    assert "5000 pixels, and 4999 are allowed" in refusal(data, PictureLimits(max_pixels=4999))
    assert "a side may have 99" in refusal(data, PictureLimits(max_side=99))
    assert f"has {len(data)} bytes" in refusal(data, PictureLimits(max_bytes=len(data) - 1))
    fits = PictureLimits(max_bytes=len(data), max_pixels=5000, max_side=100)
    assert picture_pixels(data, FIELD, fits).shape == (50, 100, 3)


# ---- other inputs ------------------------------------------------------------------------------------


def test_a_data_url_an_array_and_an_image_are_the_same_picture():
    image = drawn(20, 10)
    data = encoded(image)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    for picture in (
        image,
        np.asarray(image),
        url,
        url.replace("data:image/png", "DATA:image/PNG;name=x"),
        bytearray(data),
    ):
        assert np.array_equal(picture_pixels(picture, FIELD, LIMITS), np.asarray(image))


def test_arrays_of_one_two_and_four_channels():
    grey = np.arange(6, dtype=np.uint8).reshape(2, 3)
    for array in (grey, grey[:, :, None]):
        assert picture_pixels(array, FIELD, LIMITS).tolist() == np.stack([grey] * 3, -1).tolist()
    clear = np.full((2, 3, 4), 9, np.uint8)
    clear[..., 3] = 0
    assert (picture_pixels(clear, FIELD, LIMITS) == 255).all()


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((3, 8, 8), np.uint8),
        np.zeros((8, 8, 3), np.float32),
        np.zeros((8, 8, 2), np.uint8),
        np.zeros((2, 8, 8, 3), np.uint8),
        np.zeros(8, np.uint8),
        np.array(["x"]),
    ],
)
def test_other_arrays_are_refused_with_their_shape(array):
    assert str(list(array.shape)) in refusal(array)


def test_empty_arrays_are_refused():
    assert "it has none" in refusal(np.zeros((0, 8, 3), np.uint8))


def test_images_that_cannot_be_rgb_and_objects_that_are_no_picture_are_refused():
    assert "mode F" in refusal(Image.new("F", (2, 2)))
    assert "mode I" in refusal(Image.new("I", (2, 2)))
    assert "is of type int, no picture" in refusal(7)
    lazy = Image.open(io.BytesIO(encoded(drawn(64, 48))[:800]))
    assert "cannot be read as RGB" in refusal(lazy)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:image/bmp;base64,AAAA", "has media type 'image/bmp'"),
        ("data:text/plain;base64,AAAA", "has media type 'text/plain'"),
        ("data:;base64,AAAA", "has media type ''"),
        ("data:image/png,AAAA", "without ;base64"),
        ("data:image/png;base64", "no data URL"),
        ("https://example.com/a.png", "no data URL"),
        ("data:image/png;base64,AA\nAA", "not valid base64"),
        ("data:image/png;base64,AAA", "not valid base64"),
        ("data:image/png;base64,AA-_", "not valid base64"),
        ("data:image/png;base64,AAé=", "not valid base64"),
        ("data:image/png;base64,", "no picture"),
    ],
)
def test_bad_data_urls_are_refused(url, words):
    assert words in refusal(url)


def test_base64_is_decoded_in_pieces_that_are_one_text(monkeypatch):
    monkeypatch.setattr(pictures, "BASE64_PIECE", 8)
    for count in range(1, 30):
        data = bytes(range(count))
        assert base64_bytes(base64.b64encode(data).decode(), FIELD, LIMITS) == data
    for wrong in ("AAAAAA==AAAA", "AAAAAAA=AAAAAA==", "AAAAAAAAA", "AAAAAAAA="):
        with pytest.raises(RequestError, match="not valid base64"):
            base64_bytes(wrong, FIELD, LIMITS)


def test_base64_too_long_is_refused_before_it_is_decoded(monkeypatch):
    limits = PictureLimits(max_bytes=30)
    assert base64_bytes("A" * 40, FIELD, limits) == bytes(30)
    monkeypatch.setattr(base64, "b64decode", lambda *_, **__: pytest.fail("too long"))
    with pytest.raises(RequestError, match="may have 30"):
        base64_bytes("A" * 48, FIELD, limits)
