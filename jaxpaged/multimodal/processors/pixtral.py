"""Pixtral, the tower of Mistral 3 and of Pixtral 12B: a picture keeps its shape, shrinks to a longest edge, and has
breaks between rows.

Patches come in the order of the tokens that they are merged into. Letters: P patches, H rows, W columns, C channels.
"""

import math
from collections.abc import Mapping
from typing import Any

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

LONGEST = 8192
REQUEST_OPTIONS = ("size",)


class PixtralProcessor(PatchProcessor):
    """See `base.Processor`."""

    mark = written_mark = placeholder_token = "[IMG]"
    row_break = "[IMG_BREAK]"
    end = "[IMG_END]"
    other_marks: tuple[str, ...] = (row_break, end)
    videos = None

    def __init__(self, config: Mapping[str, Any], preprocessor_config: Mapping[str, Any]):
        self._config, self._values = config, preprocessor_config
        settings = Settings(preprocessor_config)
        settings.always("do_resize", "do_rescale", "do_normalize")
        self.table_CV = normalisation_table(settings, CLIP_MEAN, CLIP_STD)
        self.resample = settings.number("resample", BICUBIC, 0, 5)
        vision = Settings(config).get("vision_config", {})
        self.patch = Settings(vision if isinstance(vision, Mapping) else {}).number("patch_size", 16, 1, 256)
        merge = 1 if config.get("model_type") == "llava" else 2
        self.merge = Settings(config).number("spatial_merge_size", merge, 1, 16)
        for name, side in sides(settings.get("patch_size", self.patch), "patch_size").items():
            if side not in (self.patch, self.factor):
                raise BadSetting(f"{name} of patch_size is {side}, but patches of vision_config are {self.patch}")
        size = settings.get("size", {"longest_edge": 1024})
        if isinstance(size, Mapping) and set(size) == {"longest_edge"}:
            self.height = self.width = Settings(size).number("longest_edge", None, 1, LONGEST)
        else:
            size = sides(size, "size")
            self.height, self.width = size["height"], size["width"]

    @property
    def options(self) -> dict[str, Any]:
        size = [self.width, self.height]
        return {"patch": self.patch, "merge": self.merge, "resample": self.resample, "size": size}

    @property
    def largest_grid(self) -> tuple[int, int, int]:
        return 1, math.ceil(self.height / self.factor), math.ceil(self.width / self.factor)

    def with_options(self, options: Mapping[str, Any], field: str) -> "PixtralProcessor":
        """The only option is `size`. Raises RequestError that names `field`."""
        values = changed(self._values, options, REQUEST_OPTIONS, field)
        return remade(PixtralProcessor, self._config, values, field)

    def layout(self, width: int, height: int, field: str) -> PictureLayout:
        """Any size will do: a picture has at least one token."""
        ratio = max(height / self.height, width / self.width)
        if ratio > 1:
            height, width = max(1, math.floor(height / ratio)), max(1, math.floor(width / ratio))
        return self.layout_of(math.ceil(height / self.factor), math.ceil(width / self.factor))

    def placeholder(self, rows: int, columns: int) -> str:
        row = self.placeholder_token * columns + self.row_break
        return (row * rows).removesuffix(self.row_break) + self.end


def sides(value: Any, name: str) -> dict[str, int]:
    """Height and width of a square's side, or of both sides by name."""
    if isinstance(value, int):
        value = {"height": value, "width": value}
    if not isinstance(value, Mapping) or set(value) != {"height", "width"}:
        raise BadSetting(f"{name} has not just height and width")
    return {side: Settings(value).number(side, None, 1, LONGEST) for side in ("height", "width")}
