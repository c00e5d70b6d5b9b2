"""What `media_io_kwargs` of an engine or a request, or the metadata of a video, says of the frames that are given."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from jaxpaged.errors import ConfigError, did_you_mean, shown

OF_VIDEOS = ("fps", "num_frames", "frames_indices", "total_num_frames")
POINTLESS = ("duration", "do_sample_frames", "video_backend")
"""What vLLM says besides, which follows from the others or changes nothing where frames are given."""
MOST_FPS, MOST_INDEX = 1000, 1 << 31


@dataclass(frozen=True)
class VideoOptions:
    """How the frames of a video follow one another, where the video does not say it itself. `fps`: frames a second of
    the whole video. `num_frames`: how many are taken, evenly spread, of those that are given; None: all. `indices`:
    which of the whole video's frames they are, `total` how many that has; None: they are all."""

    fps: float | None = None
    num_frames: int | None = None
    indices: tuple[int, ...] | None = None
    total: int | None = None


def video_options_of(media_io_kwargs: Mapping[str, Any], where: str = "media_io_kwargs.video") -> VideoOptions:
    """What is said of videos under their key. Raises ConfigError for a key that means nothing here."""
    values = media_io_kwargs.get("video", {})
    for name in values:
        if name not in (*OF_VIDEOS, *POINTLESS):
            near = did_you_mean(str(name), OF_VIDEOS)
            raise ConfigError(f"{where} has the unknown key {shown(name)}.{near} Known are {', '.join(OF_VIDEOS)}.")
    fps, num_frames, indices, total = (values.get(name) for name in OF_VIDEOS)
    if fps is not None and (isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps <= MOST_FPS):
        raise ConfigError(f"{where}.fps is {shown(fps)}; it must be a number above 0, up to {MOST_FPS}.")
    if num_frames is not None and num_frames != -1 and not is_count(num_frames):
        raise ConfigError(
            f"{where}.num_frames is {shown(num_frames)}; it must be a whole number from 1, or -1 for all."
        )
    if total is not None and not is_count(total):
        raise ConfigError(f"{where}.total_num_frames is {shown(total)}; it must be a whole number from 1.")
    if indices is not None and not is_ascending(indices):
        raise ConfigError(
            f"{where}.frames_indices is {shown(indices)}; it must be a list of whole numbers from 0, each above the "
            "one before."
        )
    return VideoOptions(
        None if fps is None else float(fps),
        None if num_frames == -1 else num_frames,
        None if indices is None else tuple(indices),
        total,
    )


def is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value < MOST_INDEX


def is_ascending(values: Any) -> bool:
    whole = isinstance(values, list | tuple) and all(type(each) is int and 0 <= each < MOST_INDEX for each in values)
    return whole and all(first < second for first, second in pairwise(values))
