"""Gemma 3: every picture becomes a square of one size, and with pan and scan a long one is sent in parts besides.

Letters: I items, H rows, W columns, C channels.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpaged.errors import RequestError
from jaxpaged.multimodal.processors.base import (
    BadSetting,
    PictureLayout,
    ProcessedPicture,
    Settings,
    changed,
    normalisation_table,
    remade,
    resized,
)

BILINEAR = 2
REQUEST_OPTIONS = (
    "do_pan_and_scan",
    "pan_and_scan_min_crop_size",
    "pan_and_scan_max_num_crops",
    "pan_and_scan_min_ratio_to_activate",
)
Box = tuple[int, int, int, int]
"""Left, top, right, bottom in pixels, right and bottom not included."""


class Gemma3Processor:
    """See `base.Processor`. Pixels are uint8 [I, H, W, C]: the whole picture, then its crops."""

    mark = written_mark = "<start_of_image>"
    placeholder_token = "<image_soft_token>"
    end = "<end_of_image>"
    other_marks: tuple[str, ...] = (end,)
    videos = None

    def __init__(self, config: Mapping[str, Any], preprocessor_config: Mapping[str, Any]):
        self._config, self._values = config, preprocessor_config
        settings = Settings(preprocessor_config)
        settings.always("do_resize", "do_rescale", "do_normalize")
        self.table_CV = normalisation_table(settings, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
        size = settings.get("size", {"height": 896, "width": 896})
        if not isinstance(size, Mapping) or set(size) != {"height", "width"}:
            raise BadSetting("size has not just height and width")
        self.height = Settings(size).number("height", None, 1, 8192)
        self.width = Settings(size).number("width", None, 1, 8192)
        self.resample = settings.number("resample", BILINEAR, 0, 5)
        num_tokens = Settings(config).number("mm_tokens_per_image", 256, 1, 65536)
        self.side = math.isqrt(num_tokens)
        if self.side**2 != num_tokens:
            raise BadSetting(f"mm_tokens_per_image is {num_tokens}, not the square of a whole number")
        if settings.number("image_seq_length", num_tokens, 1, 65536) != num_tokens:
            raise BadSetting(f"image_seq_length is not mm_tokens_per_image, {num_tokens}")
        self.pan_and_scan = settings.flag("do_pan_and_scan", False)
        self.min_crop = settings.number("pan_and_scan_min_crop_size", 256, 1, 1 << 20)
        self.max_crops = settings.number("pan_and_scan_max_num_crops", 4, 1, 64)
        self.min_ratio = settings.real("pan_and_scan_min_ratio_to_activate", 1.2, 0, 1e6)

    @property
    def options(self) -> dict[str, Any]:
        crops = [self.min_crop, self.max_crops, self.min_ratio] if self.pan_and_scan else None
        return {"size": [self.width, self.height], "resample": self.resample, "pan_and_scan": crops}

    @property
    def largest_grid(self) -> tuple[int, int, int]:
        return 1 + self.max_crops * self.pan_and_scan, self.side, self.side

    def with_options(self, options: Mapping[str, Any], field: str) -> "Gemma3Processor":
        """Options are those of pan and scan. Raises RequestError that names `field`."""
        values = changed(self._values, options, REQUEST_OPTIONS, field)
        return remade(Gemma3Processor, self._config, values, field)

    def layout(self, width: int, height: int, field: str) -> PictureLayout:
        """Any size will do."""
        return self.layout_of(len(self.crops(width, height)))

    def layout_of_embeds(self, num_embeds: int, grid: tuple[int, int, int] | None, field: str) -> PictureLayout:
        """A whole picture without crops."""
        if num_embeds != self.side**2 or grid is not None:
            raise RequestError(
                f"{field} has {num_embeds} embeddings{' and an image_grid_thw' if grid else ''}; a picture of this "
                f"model has {self.side**2}, and nothing more. Crops are pictures of their own.",
                field,
            )
        return self.layout_of(0)

    def layout_of(self, num_crops: int) -> PictureLayout:
        """Of a picture and so many crops of it."""
        one = f"\n\n{self.mark}{self.placeholder_token * self.side**2}{self.end}\n\n"
        text = one
        if num_crops:
            parts = " ".join([one] * num_crops)
            text = f"Here is the original image {one} and here are some crops to help you see better {parts}"
        return PictureLayout(
            num_items=1 + num_crops,
            rows=self.side,
            columns=self.side,
            pixels_shape=(1 + num_crops, self.height, self.width, 3),
            placeholder=text,
        )

    def process(self, pixels_HWC: np.ndarray, field: str) -> ProcessedPicture:
        height, width, _ = pixels_HWC.shape
        layout = self.layout(width, height, field)
        pixels_IHWC = np.empty(layout.pixels_shape, np.uint8)
        for item, (left, top, right, bottom) in enumerate([(0, 0, width, height), *self.crops(width, height)]):
            part_HWC = pixels_HWC[top:bottom, left:right]
            pixels_IHWC[item] = resized(part_HWC, self.width, self.height, self.resample)
        return ProcessedPicture(pixels_IHWC, layout)

    def crops(self, width: int, height: int) -> list[Box]:
        """The parts of pan and scan: side by side along the longer side, the last one may be narrower."""
        longer, shorter = max(width, height), min(width, height)
        if not self.pan_and_scan or longer / shorter < self.min_ratio:
            return []
        number = min(longer // self.min_crop, math.floor(longer / shorter + 0.5))
        number = min(self.max_crops, max(2, number))
        step = math.ceil(longer / number)
        if min(step, shorter) < self.min_crop:
            return []
        starts = range(0, longer, step)
        if width >= height:
            return [(start, 0, min(start + step, width), height) for start in starts]
        return [(0, start, width, min(start + step, height)) for start in starts]
