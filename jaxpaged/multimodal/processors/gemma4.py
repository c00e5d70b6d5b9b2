"""Gemma 4: a picture keeps its shape, and grows or shrinks until its patches are as many as `max_soft_tokens` allow.

Letters: C channels, V values of a pixel.
"""

import math
from collections.abc import Mapping
from typing import Any

from jaxpaged.multimodal.processors.base import (
    BICUBIC,
    BadSetting,
    PatchProcessor,
    PictureLayout,
    Settings,
    changed,
    normalisation_table,
    remade,
)

NUMBERS_OF_TOKENS = (70, 140, 280, 560, 1120)
REQUEST_OPTIONS = ("max_soft_tokens",)


class Gemma4Processor(PatchProcessor):
    """See `base.Processor`."""

    mark = written_mark = placeholder_token = "<|image|>"
    begin, end = "<|image>", "<image|>"
    other_marks: tuple[str, ...] = (begin, end)
    videos = None

    def __init__(self, config: Mapping[str, Any], preprocessor_config: Mapping[str, Any]):
        self._config, self._values = config, preprocessor_config
        settings = Settings(preprocessor_config)
        settings.always("do_resize", "do_rescale")
        unused = () if settings.flag("do_normalize", False) else ("image_mean", "image_std")
        used = {name: value for name, value in preprocessor_config.items() if name not in unused}
        values_CV = normalisation_table(Settings(used), (0, 0, 0), (1, 1, 1))
        self.table_CV = 2 * (values_CV - values_CV.dtype.type(0.5))  # the model's own, of what its processor gives
        self.resample = settings.number("resample", BICUBIC, 0, 5)
        vision = Settings(config).get("vision_config", {})
        own = Settings(vision if isinstance(vision, Mapping) else {})
        self.patch = own.number("patch_size", 16, 1, 256)
        self.merge = own.number("pooling_kernel_size", 3, 1, 16)
        for name, expected in (("patch_size", self.patch), ("pooling_kernel_size", self.merge)):
            if (found := settings.number(name, expected, 1, 256)) != expected:
                raise BadSetting(f"{name} is {found}, but {expected} in vision_config")
        self.max_tokens = settings.number("max_soft_tokens", 280, 1, 1 << 16)
        if self.max_tokens not in NUMBERS_OF_TOKENS:
            raise BadSetting(f"max_soft_tokens is {self.max_tokens}, none of {', '.join(map(str, NUMBERS_OF_TOKENS))}")
        places = own.number("position_embedding_size", 10_240, 1, 1 << 20)
        if self.max_tokens * self.merge > places:
            raise BadSetting(f"max_soft_tokens is {self.max_tokens}, too many for {places} places of a patch in a row")

    @property
    def options(self) -> dict[str, Any]:
        return {"patch": self.patch, "merge": self.merge, "resample": self.resample, "max_tokens": self.max_tokens}

    @property
    def largest_grid(self) -> tuple[int, int, int]:
        return 1, 1, self.max_tokens

    def with_options(self, options: Mapping[str, Any], field: str) -> "Gemma4Processor":
        """The only option is `max_soft_tokens`. Raises RequestError that names `field`."""
        values = changed(self._values, options, REQUEST_OPTIONS, field)
        return remade(Gemma4Processor, self._config, values, field)

    def layout(self, width: int, height: int, field: str) -> PictureLayout:
        """Any size will do. As many tokens as there may be, and whole ones; a thin picture has one row or column."""
        growth = math.sqrt(self.max_tokens * self.factor**2 / (height * width))
        rows, columns = (math.floor(growth * side / self.factor) for side in (height, width))
        if not rows:
            rows, columns = 1, min(width // height, self.max_tokens)
        elif not columns:
            rows, columns = min(height // width, self.max_tokens), 1
        return self.layout_of(rows, columns)

    def placeholder(self, rows: int, columns: int) -> str:
        return self.begin + self.placeholder_token * (rows * columns) + self.end
