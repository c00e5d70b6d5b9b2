"""Pictures that are drawn for the tests: no photographs are kept here."""

import io

import numpy as np
from PIL import Image


def drawn(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Smooth colours with noise and edges, different in every corner."""
    rng = np.random.default_rng(seed)
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    waves = [np.sin(6 * x + each) + np.cos(9 * y * x - each) for each in range(4)]
    pixels = np.stack(waves, axis=-1) * 50 + 120 + rng.integers(-20, 20, (height, width, 4))
    pixels[: height // 3, : width // 4, 0] = 255
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8), "RGBA")
    return image if mode == "RGBA" else image.convert("RGB").convert(mode)


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()
