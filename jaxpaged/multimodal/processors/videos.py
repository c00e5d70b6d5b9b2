"""Videos of Qwen's VL models: the frames of a moment become one grid of tokens, as a picture does.

Qwen2-VL and Qwen2.5-VL limit the area of each frame, and all moments are one run of tokens, which have positions in
time. Qwen3-VL limits the area of all frames together, and each moment stands between marks of its own, behind its time
in words. transformers' release 5.23 leaves the template's marks around all of that; here they are replaced, as in
releases before it and in vLLM.

Letters: P patches, H rows, W columns, C channels, F frames of a moment.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxpaged.errors import RequestError
from jaxpaged.multimodal.processors.base import (
    BadSetting,
    PictureLayout,
    ProcessedPicture,
    Settings,
    merged_patches,
    resized,
)

PAD, START, END = "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
MOST_PIXELS = 1 << 31
MOST_RATIO = 200
MOST_TIME = 1 << 24
"""The latest position in time of a moment, counted from the first."""


class Size(NamedTuple):
    """Pixels."""

    width: int
    height: int


@dataclass(frozen=True)
class VideoLayout:
    """What a video of one size becomes. The encoder gives `rows` x `columns` tokens for each moment; `places` has for
    each what `MultiModalFeature.moment` and `time` are."""

    rows: int
    columns: int
    placeholder: str
    """What stands in the prompt in place of the template's mark, with one placeholder per token."""
    places: tuple[tuple[int, int], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each moment."""
        return (self.rows * self.columns,) * len(self.places)

    @property
    def num_tokens(self) -> int:
        return sum(self.sizes)


class Grid(NamedTuple):
    """What pictures and videos of a model have in common: sides of patches and tokens, filter, a picture's tokens."""

    patch: int
    merge: int
    resample: int
    most_tokens: int


class QwenVideos:
    """The videos of Qwen2-VL and Qwen2.5-VL. `frames`: how many a moment has."""

    marks: tuple[str, ...] = (PAD,)
    """How a chat template says that here is a video, in either of these ways; the first that fits counts."""
    written_mark = START + PAD + END
    placeholder_token = PAD
    known: tuple[str, ...] = ("min_pixels", "max_pixels", "size")
    """Of `mm_processor_kwargs`."""
    default_size = (128 * 28 * 28, 28 * 28 * 768)

    def __init__(self, config: Mapping[str, Any], values: Mapping[str, Any], grid: Grid):
        settings = Settings(values)
        self.grid, self.factor = grid, grid.patch * grid.merge
        vision = Settings(config.get("vision_config") or {})
        self.frames = vision.number("temporal_patch_size", 2, 1, 64)
        self.tokens_per_second = vision.real("tokens_per_second", 4.0, 0, 1e4)
        same = {"patch_size": grid.patch, "merge_size": grid.merge, "temporal_patch_size": self.frames}
        for name, ours in {**same, "resample": grid.resample}.items():
            if settings.get(name, ours) != ours:
                raise BadSetting(
                    f"{name} of videos is {settings.get(name, ours)}, and {ours} of the tower or of pictures"
                )
        size = settings.get("size", {})
        if not isinstance(size, Mapping) or not set(size) <= {"shortest_edge", "longest_edge"}:
            raise BadSetting("size of videos has not just shortest_edge and longest_edge")
        fewest, most = self.default_size
        self.min_pixels = Settings(size).number("shortest_edge", fewest, 1, MOST_PIXELS)
        self.max_pixels = Settings(size).number("longest_edge", most, 1, MOST_PIXELS)
        if "min_pixels" in self.known:
            self.min_pixels = settings.number("min_pixels", self.min_pixels, 1, MOST_PIXELS)
            self.max_pixels = settings.number("max_pixels", self.max_pixels, 1, MOST_PIXELS)
        self.min_pixels = min(self.min_pixels, self.max_pixels)  # one of them may be of pictures

    @property
    def options(self) -> dict[str, Any]:
        """What decides the pixels of a moment besides its grid."""
        return {"patch": self.grid.patch, "merge": self.grid.merge, "resample": self.grid.resample}

    def layout(self, size: Size, seconds: Sequence[float], fps: float, field: str) -> VideoLayout:
        """Of a video whose frames have this size, and stand at these times; `fps` of them make a second.

        Raises RequestError for one that the model cannot take.
        """
        new = self.resized_size(size, len(seconds), field)
        rows, columns = new.height // self.factor, new.width // self.factor
        if rows * columns > self.grid.most_tokens:
            raise RequestError(
                f"{field} would have {rows * columns} tokens a moment, and a picture of this model has "
                f"{self.grid.most_tokens} at most. Give smaller frames, or lower size in mm_processor_kwargs.",
                field,
            )
        last = len(seconds) - 1
        times = [
            (seconds[first] + seconds[min(first + self.frames - 1, last)]) / 2
            for first in range(0, last + 1, self.frames)
        ]
        places = self.places(len(times), fps)
        if places[-1][1] > MOST_TIME:
            raise RequestError(f"{field} has {fps} frames a second, too few for positions in time. Give more.", field)
        return VideoLayout(rows, columns, self.placeholder(rows * columns, times), tuple(places))

    def process(self, frames: Sequence[np.ndarray], layout: PictureLayout) -> ProcessedPicture:
        """The RGB frames of a moment, uint8 [H, W, 3], the last one again where some are missing: uint8
        [P, 3 * F * patch * patch], a patch in the order channel, frame, row, column."""
        width, height = layout.columns * self.factor, layout.rows * self.factor
        own = [
            merged_patches(resized(each, width, height, self.grid.resample), self.grid.patch, self.grid.merge)
            for each in frames
        ]
        own += own[-1:] * (self.frames - len(own))
        patches = np.stack([each.reshape(len(each), 3, -1) for each in own], axis=2)
        return ProcessedPicture(patches.reshape(layout.pixels_shape), layout)

    def moment_layout(self, rows: int, columns: int) -> PictureLayout:
        """Of one moment."""
        numbers = 3 * self.frames * self.grid.patch**2
        return PictureLayout(1, rows, columns, (rows * columns * self.grid.merge**2, numbers), "")

    def resized_size(self, size: Size, num_frames: int, field: str) -> Size:
        """In multiples of a token's side, nearly in the old ratio. Raises RequestError."""
        check_ratio(size, field)
        return smart_size(size, self.factor, self.min_pixels, self.max_pixels)

    def places(self, num_moments: int, fps: float) -> list[tuple[int, int]]:
        """Positions in time, which are counted moment by moment."""
        return [(moment, moment) for moment in range(num_moments)]

    def placeholder(self, num_tokens: int, times: Sequence[float]) -> str:
        """The text in place of the mark, for moments at these seconds."""
        return PAD * (num_tokens * len(times))


class Qwen2_5Videos(QwenVideos):
    """Those of Qwen2.5-VL, whose positions in time follow the clock."""

    def places(self, num_moments: int, fps: float) -> list[tuple[int, int]]:
        step = np.float32(self.tokens_per_second * (self.frames / fps))
        times = np.minimum(np.arange(num_moments, dtype=np.float32) * step, np.float32(2 * MOST_TIME))
        return list(enumerate(times.astype(np.int64).tolist()))


class Qwen3Videos(QwenVideos):
    """Those of Qwen3-VL: limits are of all frames together, and times are words."""

    marks = (START + PAD + END, PAD)
    known = ("size",)
    default_size = (128 * 32 * 32, 32 * 32 * 768)

    def resized_size(self, size: Size, num_frames: int, field: str) -> Size:
        width, height = size
        if min(size) < self.factor:
            grow = max(self.factor / height, self.factor / width)
            width, height = int(width * grow), int(height * grow)
        check_ratio(Size(width, height), field)
        num_frames = max(num_frames, self.frames)
        rounded = round(num_frames / self.frames) * self.frames
        return smart_size(Size(width, height), self.factor, self.min_pixels, self.max_pixels, num_frames, rounded)

    def places(self, num_moments: int, fps: float) -> list[tuple[int, int]]:
        """Each begins at a position of its own."""
        return [(0, 0)] * num_moments

    def placeholder(self, num_tokens: int, times: Sequence[float]) -> str:
        return "".join(f"<{time:.1f} seconds>{START}{PAD * num_tokens}{END}" for time in times)


VIDEOS: dict[str, type[QwenVideos]] = {
    "qwen2_vl": QwenVideos,
    "qwen2_5_vl": Qwen2_5Videos,
    "qwen3_vl": Qwen3Videos,
    "qwen3_vl_moe": Qwen3Videos,
}
"""By `model_type` of config.json."""


def check_ratio(size: Size, field: str) -> None:
    """Raise RequestError for what is more than 200 times as long as wide."""
    if max(size) > MOST_RATIO * min(size):
        raise RequestError(
            f"{field} has frames of {size.width}x{size.height} pixels; this model takes none with one side more than "
            f"{MOST_RATIO} times the other. Cut them.",
            field,
        )


def smart_size(
    size: Size, factor: int, min_pixels: int, max_pixels: int, num_frames: int = 1, rounded_frames: int = 1
) -> Size:
    """Width and height in multiples of `factor`, nearly in the old ratio, with an area between the limits: that of a
    picture, or of frames together, whose number is rounded where limits are compared."""
    width, height = size
    new_width, new_height = round(width / factor) * factor, round(height / factor) * factor
    if rounded_frames * new_width * new_height > max_pixels:
        shrink = math.sqrt(num_frames * height * width / max_pixels)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
    elif rounded_frames * new_width * new_height < min_pixels:
        grow = math.sqrt(min_pixels / (num_frames * height * width))
        new_width = math.ceil(width * grow / factor) * factor
        new_height = math.ceil(height * grow / factor) * factor
    return Size(new_width, new_height)
