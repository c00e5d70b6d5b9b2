"""Qwen2.5-VL and Qwen3-VL: a picture keeps its shape and becomes a grid of patches, merged two by two into tokens.

The encoder of these models sees two frames at a time, which for a picture are twice the same: one is sent. Patches
come in the order of the tokens that they are merged into. Letters: P patches, H rows, W columns, C channels.
"""

import math
from collections.abc import Mapping
from typing import Any

from jaxpaged.errors import RequestError
from jaxpaged.multimodal.processors.base import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    BadSetting,
    PatchProcessor,
    PictureLayout,
    Settings,
    changed,
    normalisation_table,
    remade,
)

REQUEST_OPTIONS = ("min_pixels", "max_pixels", "size")
MOST_PIXELS = 1 << 26
MOST_RATIO = 200


class QwenVLProcessor(PatchProcessor):
    """See `base.Processor`."""

    mark = placeholder_token = "<|image_pad|>"
    written_mark = "<|vision_start|><|image_pad|><|vision_end|>"
    other_marks: tuple[str, ...] = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|video_pad|>")

    def __init__(self, config: Mapping[str, Any], preprocessor_config: Mapping[str, Any]):
        self._config, self._values = config, preprocessor_config
        settings = Settings(preprocessor_config)
        settings.always("do_resize", "do_rescale", "do_normalize")
        self.table_CV = normalisation_table(settings, CLIP_MEAN, CLIP_STD)
        self.resample = settings.number("resample", BICUBIC, 0, 5)
        self.patch = settings.number("patch_size", 14, 1, 256)
        self.merge = settings.number("merge_size", 2, 1, 16)
        size = settings.get("size", {})
        if not isinstance(size, Mapping) or not set(size) <= {"shortest_edge", "longest_edge"}:
            raise BadSetting("size has not just shortest_edge and longest_edge")
        fewest = Settings(size).number("shortest_edge", 56 * 56, 1, MOST_PIXELS)
        most = Settings(size).number("longest_edge", 28 * 28 * 1280, 1, MOST_PIXELS)
        self.min_pixels = settings.number("min_pixels", fewest, 1, MOST_PIXELS)
        self.max_pixels = settings.number("max_pixels", most, 1, MOST_PIXELS)
        if self.min_pixels > self.max_pixels or self.max_pixels < self.factor**2:
            raise BadSetting(
                f"max_pixels is {self.max_pixels}, below min_pixels, {self.min_pixels}, or {self.factor}x{self.factor}"
            )
        vision = Settings(config).get("vision_config", {})
        theirs = Settings(vision if isinstance(vision, Mapping) else {})
        for name, ours in (("patch_size", self.patch), ("spatial_merge_size", self.merge)):
            if theirs.get(name, ours) != ours:
                raise BadSetting(f"{name} of vision_config is not {ours}, as in preprocessor_config.json")

    @property
    def options(self) -> dict[str, Any]:
        pixels = [self.min_pixels, self.max_pixels]
        return {"patch": self.patch, "merge": self.merge, "resample": self.resample, "pixels": pixels}

    @property
    def largest_grid(self) -> tuple[int, int, int]:
        """By area; a narrow picture has more, since no side has less than a token, and one that grows, as its sides
        are rounded up."""
        most, fewest = self.max_pixels // self.factor**2, self.min_pixels / self.factor**2
        grown = math.floor((math.sqrt(fewest * MOST_RATIO) + 1) * (math.sqrt(fewest / MOST_RATIO) + 1))
        return 1, 1, max(most, MOST_RATIO, grown)

    def with_options(self, options: Mapping[str, Any], field: str) -> "QwenVLProcessor":
        """Options are `min_pixels` and `max_pixels`, or both in `size`. Raises RequestError that names `field`."""
        values = changed(self._values, options, REQUEST_OPTIONS, field)
        if "size" in options:  # it replaces what the checkpoint says in the other form
            values.update({name: options.get(name) for name in ("min_pixels", "max_pixels")})
        return remade(QwenVLProcessor, self._config, values, field)

    def layout(self, width: int, height: int, field: str) -> PictureLayout:
        """Raises RequestError for a picture more than 200 times as long as wide."""
        if max(width, height) > MOST_RATIO * min(width, height):
            raise RequestError(
                f"{field} is a picture of {width}x{height} pixels; this model takes none with one side more than "
                f"{MOST_RATIO} times the other. Cut it.",
                field,
            )
        new_width, new_height = self.resized_size(width, height)
        rows, columns = new_height // self.factor, new_width // self.factor
        return self.layout_of(rows, columns)

    def placeholder(self, rows: int, columns: int) -> str:
        return self.placeholder_token * (rows * columns)

    def resized_size(self, width: int, height: int) -> tuple[int, int]:
        """Width and height in multiples of `factor`, nearly in the old ratio, with an area between the limits."""
        factor = self.factor
        new_width, new_height = round(width / factor) * factor, round(height / factor) * factor
        if new_width * new_height > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            new_width = max(factor, math.floor(width / shrink / factor) * factor)
            new_height = max(factor, math.floor(height / shrink / factor) * factor)
        elif new_width * new_height < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            new_width = math.ceil(width * grow / factor) * factor
            new_height = math.ceil(height * grow / factor) * factor
        return new_width, new_height
