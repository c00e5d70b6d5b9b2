"""What callers give as a video: frames, and when they were. Files of videos are not decoded here.

Frames are pictures in any of their forms. Nothing is fetched or decoded, and no model is known.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpaged.config.video_options import OF_VIDEOS, VideoOptions, video_options_of
from jaxpaged.errors import ConfigError, RequestError, shown
from jaxpaged.multimodal.embeddings import as_array

MOST_FRAMES = 768
"""Of a video as a model is shown it."""
DEFAULT_FPS = 1.0
"""Frames a second, where nobody says it: vLLM's number."""
WHAT_TO_DO = (
    "Send its frames: a list of pictures, an array of uint8 [frames, height, width, 3], or "
    "data:video/jpeg;base64,FRAME,FRAME,..."
)
JPEGS = "data:video/jpeg;base64,"


@dataclass(frozen=True)
class Frames[Picture]:
    """A video as it was given. `said`: what its metadata says of when the frames were."""

    frames: tuple[Picture, ...]
    said: VideoOptions = VideoOptions()


@dataclass(frozen=True)
class Clip[Picture]:
    """A video as a model is shown it: frames, the second at which each was, and how many of them make a second."""

    frames: tuple[Picture, ...]
    seconds: tuple[float, ...]
    fps: float


def frames_of[Picture](value: Any, field: str, source_of: Callable[[Any, str], Picture]) -> Frames[Picture]:
    """A list of pictures, one array of all, a data URL of JPEGs, or vLLM's pair of one of these and metadata.
    `source_of` makes a picture of a value and its field.

    Raises RequestError that names `field`.
    """
    if is_pair(value):
        return Frames(frames_of(value[0], field, source_of).frames, metadata_of(value[1], field))
    if isinstance(value, str):
        value = jpegs_of(value, field)
    if (array := as_array(value)) is not None:
        if array.ndim != 4 or array.dtype != np.uint8:
            raise RequestError(
                f"{field} is an array of {array.dtype} with shape {list(array.shape)}, no video. Give uint8 [frames, "
                "height, width, 3].",
                field,
            )
        value = list(array)
    if not isinstance(value, list | tuple):
        raise RequestError(
            f"{field} is of type {type(value).__name__}, and files of videos are not decoded here. {WHAT_TO_DO}", field
        )
    if not value:
        raise RequestError(f"{field} is a video without frames. Give one at least.", field)
    return Frames(tuple(source_of(each, f"{field}[{number}]") for number, each in enumerate(value)))


def videos_in(value: Any) -> list[Any]:
    """The videos of a value under the key `video`: a list of pictures is one, and a list of anything else several."""
    if value is None:
        return []
    if (array := as_array(value)) is not None and array.ndim == 5:
        return list(array)
    if isinstance(value, list | tuple) and not is_pair(value) and (not value or any(map(is_video_in_list, value))):
        return list(value)
    return [value]


def is_pair(value: Any) -> bool:
    """Whether it is vLLM's pair of frames and metadata."""
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping)


def is_video_in_list(value: Any) -> bool:
    """Whether something in a list is a video, and not one of its frames."""
    if isinstance(value, str):
        return value[:11].lower() == "data:video/"
    return value is None or isinstance(value, list | tuple) or (hasattr(value, "ndim") and value.ndim == 4)


def metadata_of(metadata: Mapping[str, Any], field: str) -> VideoOptions:
    """What says when frames were; the rest is not read. Raises RequestError that names `field`."""
    known = {name: metadata[name] for name in OF_VIDEOS if metadata.get(name) is not None}
    known.pop("num_frames", None)
    if isinstance(indices := known.get("frames_indices"), np.ndarray):
        known["frames_indices"] = indices.tolist()
    try:
        return video_options_of({"video": known}, f"the metadata of {field}")
    except ConfigError as error:
        raise RequestError(str(error), field) from None


def jpegs_of(url: str, field: str) -> list[str]:
    """The data URLs of the frames in vLLM's data URL of a video. Raises RequestError."""
    if url[: len(JPEGS)].lower() != JPEGS:
        kind = url[5:].partition(";")[0] if url[:5].lower() == "data:" else url
        raise RequestError(
            f"{field} is {shown(kind[:40])}, and files of videos are not decoded here. {WHAT_TO_DO}", field
        )
    return [f"data:image/jpeg;base64,{frame}" for frame in url[len(JPEGS) :].split(",")]


def clip_of[Picture](video: Frames[Picture], asked: VideoOptions, field: str) -> Clip[Picture]:
    """What of a video a model is shown, and when that was. `asked` says what the video's metadata does not.

    Raises RequestError that names `field`.
    """
    frames, said = video.frames, video.said
    fps = said.fps or asked.fps or DEFAULT_FPS
    given = said if said.indices is not None or said.total is not None else asked
    indices = given.indices or tuple(range(len(frames)))
    if len(indices) != len(frames):
        raise RequestError(
            f"{field} has {len(frames)} frames, and frames_indices has {len(indices)}. Give one for each.", field
        )
    total = given.total or (len(frames) if given.indices is None else spread(indices))
    if total <= indices[-1]:
        raise RequestError(
            f"{field} has the frame {indices[-1]} of a video of {total} (total_num_frames). Frames count from 0.", field
        )
    if asked.num_frames is not None and asked.num_frames < len(frames):
        places = np.linspace(0, len(frames) - 1, asked.num_frames).round().astype(int).tolist()
        frames, indices = tuple(frames[i] for i in places), tuple(indices[i] for i in places)
    if len(frames) > MOST_FRAMES:
        raise RequestError(
            f"{field} has {len(frames)} frames, and {MOST_FRAMES} at most are taken. Give fewer, or let "
            "media_io_kwargs choose some: {'video': {'num_frames': 64}}.",
            field,
        )
    return Clip(frames, tuple(index / fps for index in indices), len(frames) / total * fps)


def spread(indices: Sequence[int]) -> int:
    """How many frames there were, if those that are known stand evenly."""
    if len(indices) == 1:
        return indices[0] + 1
    return max(indices[-1] + 1, round((indices[-1] - indices[0]) / (len(indices) - 1) * len(indices)))
