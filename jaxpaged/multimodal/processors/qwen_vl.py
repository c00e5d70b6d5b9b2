"""Qwen2.5-VL and Qwen3-VL: a picture keeps its shape and becomes a grid of patches, merged two by two into tokens.

The encoder of these models sees two frames at a time, which for a picture are twice the same: one is sent. Patches
come in the order of the tokens that they are merged into. Letters: P patches, H rows, W columns, C channels.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

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
from jaxpaged.multimodal.processors.videos import MOST_RATIO, VIDEOS, Grid, QwenVideos, Size, smart_size

REQUEST_OPTIONS = ("min_pixels", "max_pixels", "size")
OF_VIDEOS = "video_processor"
"""The key of what video_preprocessor_config.json says."""
MOST_PIXELS = 1 << 26


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
        self.videos = self._videos()

    def _videos(self) -> QwenVideos | None:
        """The way with videos; None where the tower sees one frame at a time."""
        of_videos = self._values.get(OF_VIDEOS)
        if of_videos is None:
            of_videos = self._values
        elif not isinstance(of_videos, Mapping):
            raise BadSetting("what it says of videos is no JSON object")
        else:
            settings = Settings({**self._values, **of_videos})
            settings.always("do_resize", "do_rescale", "do_normalize")
            if not np.array_equal(normalisation_table(settings, CLIP_MEAN, CLIP_STD), self.table_CV):
                raise BadSetting("image_mean, image_std or rescale_factor of videos are not those of pictures")
        grid = Grid(self.patch, self.merge, self.resample, math.prod(self.largest_grid))
        videos = VIDEOS[self._config["model_type"]](self._config, of_videos, grid)
        return videos if videos.frames > 1 else None

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
        """Options are `min_pixels` and `max_pixels`, or both in `size`; they are of videos as well, as far as these
        know them. Raises RequestError that names `field`."""
        given = changed({}, options, REQUEST_OPTIONS, field)
        if "size" in options:  # it replaces what the checkpoint says in the other form
            given.update({name: options.get(name) for name in ("min_pixels", "max_pixels")})
        values = {**self._values, **given}
        if isinstance(of_videos := values.get(OF_VIDEOS), Mapping):
            values[OF_VIDEOS] = {**of_videos, **given}
        return remade(QwenVLProcessor, self._config, values, field)

    def layout(self, width: int, height: int, field: str) -> PictureLayout:
        """Raises RequestError for a picture more than 200 times as long as wide."""
        if max(width, height) > MOST_RATIO * min(width, height):
            raise RequestError(
                f"{field} is a picture of {width}x{height} pixels; this model takes none with one side more than "
                f"{MOST_RATIO} times the other. Cut it.",
                field,
            )
        new_width, new_height = smart_size(Size(width, height), self.factor, self.min_pixels, self.max_pixels)
        rows, columns = new_height // self.factor, new_width // self.factor
        return self.layout_of(rows, columns)

    def placeholder(self, rows: int, columns: int) -> str:
        return self.placeholder_token * (rows * columns)
