"""What processors share: the layout of a picture, settings read from JSON, resizing, and the table that normalises.

A processor stops at uint8: a quarter of the bytes to move, and `normalisation_table` makes float32 of them on the
device, with the bits that transformers' processors give. Letters: H rows, W columns, C channels (3), V values (256), P
patches.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxpaged.errors import RequestError, did_you_mean, shown


@dataclass(frozen=True)
class PictureLayout:
    """What a picture of one size becomes. Placeholders, pixels and the encoder's output all follow from it.

    The encoder gives `rows` x `columns` tokens for each of `num_items` items; a span of placeholders is one item.
    """

    num_items: int
    rows: int
    columns: int
    pixels_shape: tuple[int, ...]
    placeholder: str
    """What stands in the prompt in place of the template's mark, with one placeholder per token."""

    @property
    def num_tokens(self) -> int:
        return self.num_items * self.rows * self.columns

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of what is encoded by itself."""
        return (self.num_tokens,)


class ProcessedPicture(NamedTuple):
    """uint8 of shape `layout.pixels_shape`."""

    pixels: np.ndarray
    layout: PictureLayout


class Processor(Protocol):
    """One model's way with pictures. It has no state: processes and threads may share it."""

    mark: str
    """How a chat template says that here is a picture: a text in what it writes."""
    written_mark: str
    """What a chat template writes around it, for templates that know only texts."""
    other_marks: tuple[str, ...]
    """Further tokens that only templates and processors write."""
    placeholder_token: str
    """The token that stands once per token of the encoder's output."""
    table_CV: np.ndarray
    """float32 [3, 256]: the number that each value of each channel becomes."""
    videos: Any
    """The model's way with videos (`videos.QwenVideos`); None for a model that takes none."""

    @property
    def options(self) -> Mapping[str, Any]:
        """All that decides the pixels, as plain values: a part of a picture's identity."""

    @property
    def largest_grid(self) -> tuple[int, int, int]:
        """Items, rows and columns of no fewer tokens than any picture has."""

    def with_options(self, options: Mapping[str, Any], field: str) -> "Processor":
        """A processor with some settings otherwise, as `mm_processor_kwargs` has them. Raises RequestError."""

    def layout(self, width: int, height: int, field: str) -> PictureLayout:
        """Of a picture with this size in pixels. Raises RequestError for a size that the model cannot take."""

    def layout_of_embeds(self, num_embeds: int, grid: tuple[int, int, int] | None, field: str) -> PictureLayout:
        """Of so many embeddings in place of a picture. `grid`: frames, rows and columns of patches, where a caller says
        them. Raises RequestError where no picture has so many."""

    def process(self, pixels_HWC: np.ndarray, field: str) -> ProcessedPicture:
        """RGB pixels, uint8, to what the encoder takes. Raises RequestError as `layout` does."""


BICUBIC = 3
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
"""Of the pictures that CLIP was trained with, which other models took over."""


class BadSetting(Exception):
    """A setting cannot be used. The message says which and why, as a clause."""


class Settings:
    """Values of JSON, each checked as it is read. `null` is the default."""

    def __init__(self, values: Mapping[str, Any]):
        self._values = values

    def get(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        return default if value is None else value

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise BadSetting(f"{name} is {shown(value)}, neither true nor false")
        return value

    def number(self, name: str, default: int | None, low: int, high: int) -> int:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise BadSetting(f"{name} is {shown(value)}, no whole number from {low} to {high}")
        return value

    def real(self, name: str, default: float, low: float, high: float) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise BadSetting(f"{name} is {shown(value)}, no number from {low} to {high}")
        return float(value)

    def channels(self, name: str, default: Sequence[float]) -> tuple[float, ...]:
        """One finite number for each of red, green and blue."""
        value = self.get(name, default)
        if not isinstance(value, list | tuple) or len(value) != 3 or not all(map(is_finite, value)):
            raise BadSetting(f"{name} is {shown(value)}, not three numbers")
        return tuple(float(each) for each in value)

    def always(self, *names: str) -> None:
        """Refuse a model for which one of these steps is off."""
        for name in names:
            if not self.flag(name, True):
                raise BadSetting(f"{name} is false, and only true is supported")


def is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def changed(values: Mapping[str, Any], options: Mapping[str, Any], known: Sequence[str], field: str) -> dict[str, Any]:
    """`values` with the options of a request, `mm_processor_kwargs`. Raises RequestError for unknown ones."""
    for name in options:
        if name not in known:
            near = did_you_mean(str(name), known)
            raise RequestError(f"{field} has no option {shown(name)}.{near} Known are {', '.join(known)}.", field)
    return {**values, **options}


def remade[Made](
    family: Callable[[Mapping[str, Any], Mapping[str, Any]], Made],
    config: Mapping[str, Any],
    values: Mapping[str, Any],
    field: str,
) -> Made:
    """A processor whose settings a request has changed. Raises RequestError that names `field`."""
    try:
        return family(config, values)
    except BadSetting as problem:
        raise RequestError(f"{field}: {problem}.", field) from None


def normalisation_table(settings: Settings, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """float32 [3, 256] by value of a pixel: rescaled in float64, rounded, then normalised in float32.

    `mean` and `std` are the family's, where the settings have none.
    """
    scale = settings.real("rescale_factor", 1 / 255, 1e-6, 1e6)
    values_V = (np.arange(256, dtype=np.float64) * scale).astype(np.float32)
    mean_C = np.array(settings.channels("image_mean", mean), np.float32)
    std_C = np.array(settings.channels("image_std", std), np.float32)
    if not (std_C > 0).all():
        raise BadSetting("image_std is not above zero")
    return (values_V[None, :] - mean_C[:, None]) / std_C[:, None]


def resized(pixels_HWC: np.ndarray, width: int, height: int, resample: int) -> np.ndarray:
    """uint8 [height, width, 3], by a filter of Pillow."""
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(pixels_HWC))
    return np.asarray(image.resize((width, height), resample=Image.Resampling(resample)))


def merged_patches(pixels_HWC: np.ndarray, side: int, merge: int) -> np.ndarray:
    """[P, 3 * side * side] of a picture whose sides are multiples of `side * merge`, a patch in the order channel, row,
    column. The patches that become one token follow one another; tokens come row by row."""
    height, width, _ = pixels_HWC.shape
    rows, columns = height // (side * merge), width // (side * merge)
    cells = pixels_HWC.reshape(rows, merge, side, columns, merge, side, 3)
    return cells.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns * merge**2, 3 * side**2)


class PatchProcessor(ABC):
    """What processors share whose pictures keep their shape. Pixels are uint8 [P, 3 * patch * patch], a patch in the
    order channel, row, column; `merge` x `merge` neighbours become one token."""

    patch: int
    merge: int
    resample: int

    @property
    def factor(self) -> int:
        """Both sides of a resized picture are multiples of it: the side of a token in pixels."""
        return self.patch * self.merge

    @abstractmethod
    def layout(self, width: int, height: int, field: str) -> PictureLayout:
        """See `Processor`."""

    @abstractmethod
    def placeholder(self, rows: int, columns: int) -> str:
        """What stands in a prompt for so many tokens."""

    def layout_of(self, rows: int, columns: int) -> PictureLayout:
        """Of a picture with so many tokens."""
        pixels_shape = (rows * columns * self.merge**2, 3 * self.patch**2)
        return PictureLayout(1, rows, columns, pixels_shape, self.placeholder(rows, columns))

    def layout_of_embeds(self, num_embeds: int, grid: tuple[int, int, int] | None, field: str) -> PictureLayout:
        """See `Processor`."""
        if grid is None:
            raise RequestError(
                f"{field} has embeddings without image_grid_thw, and pictures of this model have any size. Give a dict "
                "with image_embeds and image_grid_thw.",
                field,
            )
        frames, rows, columns = grid
        fits = frames == 1 and not rows % self.merge and not columns % self.merge
        if not fits or rows * columns != num_embeds * self.merge**2:
            raise RequestError(
                f"{field} has {num_embeds} embeddings and the image_grid_thw {list(grid)}. It must be 1 frame, and "
                f"rows and columns of patches, of which {self.merge}x{self.merge} are an embedding.",
                field,
            )
        return self.layout_of(rows // self.merge, columns // self.merge)

    def process(self, pixels_HWC: np.ndarray, field: str) -> ProcessedPicture:
        """See `Processor`."""
        height, width, _ = pixels_HWC.shape
        layout = self.layout(width, height, field)
        new_HWC = resized(pixels_HWC, layout.columns * self.factor, layout.rows * self.factor, self.resample)
        return ProcessedPicture(merged_patches(new_HWC, self.patch, self.merge), layout)
