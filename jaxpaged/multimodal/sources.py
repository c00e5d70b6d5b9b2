"""What callers give as a picture or a video, each brought into one form: where it comes from, its name, and the field
it is in.

Parts of messages in the forms of several APIs, and the values of `multi_modal_data`. Nothing is fetched or decoded
here, and no other process is asked.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from jaxpaged.errors import RequestError, check_unicode, shown
from jaxpaged.multimodal.embeddings import EMBEDS, GRID, Embeddings, as_array, is_float, split
from jaxpaged.multimodal.videos import Clip, Frames, frames_of, videos_in

URL_SCHEME = re.compile(r"(https?|file):", re.IGNORECASE)
MOST_UUID_LETTERS = 256
KEYS = {"image": "image", "image_url": "image_url", "input_image": "image_url", "image_pil": "image_pil"}
"""Types of parts with a picture -> the key that holds it."""
VIDEO_KEYS = {"video": "video", "video_url": "video_url"}
"""Types of parts with a video -> the key that holds it."""
OTHER_MEDIA = (
    *("image_embeds", "input_video", "audio", "audio_url", "input_audio", "audio_embeds"),
    *("vision_chunk", "file", "input_file"),
)
"""Further types of parts that are no text."""
MODALITIES = ("image", "video")
OTHER_KEYS = ("url", "path", "base64")
"""Where a part of type image may have its picture, too, as in chats of transformers."""


@dataclass(frozen=True)
class PictureSource:
    """One picture, or video, as a caller gave it. Exactly one of these is the case: `data`, a file's bytes; `array`,
    uint8 in one of the shapes of `pictures.array_pixels`; `image`, one of Pillow; `url`, http, https, file or data;
    `path`, a file of this machine; `embeddings`; `video`; or none of them, and the picture is known by its `uuid`.

    `field` is what errors name.
    """

    field: str
    uuid: str | None = None
    data: bytes | None = None
    array: np.ndarray | None = None
    image: Any = None
    url: str | None = None
    path: str | None = None
    embeddings: Embeddings | None = None
    video: "Frames[PictureSource] | None" = None
    clip: "Clip[PictureSource] | None" = None
    """What of a video a model is shown, once that is known."""

    @property
    def modality(self) -> str:
        return "image" if self.video is None else "video"

    @property
    def is_given(self) -> bool:
        """Whether there is anything but a name."""
        given = (self.data, self.array, self.image, self.url, self.path, self.embeddings, self.video)
        return any(each is not None for each in given)


def source_of(value: Any, field: str, uuid: Any = None, *, local_files: bool = False) -> PictureSource:
    """Any value that stands for a picture; None with a `uuid`. `local_files`: texts that are no URLs are paths.

    Raises RequestError that names `field`.
    """
    uuid = checked_uuid(uuid, field)
    if value is None:
        if uuid is None:
            raise RequestError(f"{field} is empty. Give a picture, or the uuid of one that was given before.", field)
        return PictureSource(field, uuid)
    if isinstance(value, bytes | bytearray | memoryview):
        return PictureSource(field, uuid, data=bytes(value))
    if isinstance(value, str):
        check_unicode(field, value)
        if value[:5].lower() == "data:" or URL_SCHEME.match(value):
            return PictureSource(field, uuid, url=value)
        if local_files:
            return PictureSource(field, uuid, path=value)
        raise RequestError(
            f"{field} is {shown(value[:40])}, no URL that begins with data:, https:, http: or file:. Send the picture "
            "as a data URL.",
            field,
        )
    if isinstance(value, os.PathLike):
        return PictureSource(field, uuid, path=os.fspath(value))
    if isinstance(value, Embeddings):
        return PictureSource(field, uuid, embeddings=value)
    if isinstance(value, Mapping) and EMBEDS in value:
        return PictureSource(field, uuid, embeddings=embeddings_of(value))
    pillow = sys.modules.get("PIL.Image")  # without it nobody can have made an image
    if pillow is not None and isinstance(value, pillow.Image):
        return PictureSource(field, uuid, image=value)
    if (array := as_array(value)) is not None:
        if is_float(array) and array.ndim in (2, 3):
            return PictureSource(field, uuid, embeddings=Embeddings(array))
        return PictureSource(field, uuid, array=array)
    raise RequestError(
        f"{field} is of type {type(value).__name__}, no picture. Give a PIL image, an array, a file's bytes, a path or "
        "a data URL.",
        field,
    )


def embeddings_of(value: Any) -> Embeddings:
    """vLLM's dict of embeddings and their grid, or embeddings alone."""
    is_dict = isinstance(value, Mapping) and EMBEDS in value
    return Embeddings(value[EMBEDS], value.get(GRID)) if is_dict else Embeddings(value)


def video_of(value: Any, field: str, uuid: Any = None, *, local_files: bool = False) -> PictureSource:
    """Any value that stands for a video. Raises RequestError that names `field`."""
    uuid = checked_uuid(uuid, field)
    if value is None:
        raise RequestError(f"{field} is empty. Give the frames of the video; a uuid alone names pictures only.", field)
    return PictureSource(field, uuid, video=frames_of(value, field, partial(frame_of, local_files=local_files)))


def frame_of(value: Any, field: str, *, local_files: bool) -> PictureSource:
    """A picture that is a frame. Raises RequestError that names `field`."""
    source = source_of(value, field, local_files=local_files)
    if source.embeddings is not None:
        raise RequestError(f"{field} has floating point numbers; a frame is an array of uint8, or a picture.", field)
    return source


def checked_uuid(uuid: Any, field: str) -> str | None:
    """A picture's name as a client gives it. Raises RequestError that names `field`."""
    if uuid is None:
        return None
    if not isinstance(uuid, str) or not 1 <= len(uuid) <= MOST_UUID_LETTERS:
        raise RequestError(
            f"{field} has the uuid {shown(uuid)}; it must be a text of 1 to {MOST_UUID_LETTERS} characters.", field
        )
    check_unicode(field, uuid)
    return uuid


# ---- parts of messages ---------------------------------------------------------------------------


def is_picture_part(part: Any) -> bool:
    """Whether it is a picture, or another medium, by its type, or by its keys where it says none."""
    if not isinstance(part, Mapping):
        return False
    kind = part.get("type")
    if kind is None:
        return any(key in part for key in (*KEYS, *VIDEO_KEYS))
    return isinstance(kind, str) and (kind in KEYS or kind in VIDEO_KEYS or kind in OTHER_MEDIA)


def is_video_part(part: Any) -> bool:
    """Whether it is a video, by its type, or by its keys where it says none."""
    return is_picture_part(part) and kind_of_part(part) in VIDEO_KEYS


def kind_of_part(part: Mapping[str, Any]) -> Any:
    """Its type, or what would be its type, by its keys."""
    return part.get("type") or next((key for key in (*KEYS, *VIDEO_KEYS) if key in part), None)


def source_of_part(part: Mapping[str, Any], place: str, *, local_files: bool = False) -> PictureSource:
    """The picture of a part that is one; `place` is where it stands, such as `messages[0].content[1]`.

    Raises RequestError for a part of another kind.
    """
    kind = kind_of_part(part)
    given_field = part.get("field")
    uuid = part.get("uuid")
    if kind == EMBEDS:
        field = given_field or f"{place}.{EMBEDS}"
        if part.get(EMBEDS) is None:
            return source_of(None, field, uuid)
        return PictureSource(field, checked_uuid(uuid, field), embeddings=embeddings_of(part[EMBEDS]))
    if isinstance(kind, str) and kind in VIDEO_KEYS:
        key = VIDEO_KEYS[kind]
        value, field = part.get(key), f"{place}.{key}"
        if key == "video_url" and isinstance(value, Mapping):
            value, field = value.get("url"), f"{field}.url"
        if key == "video_url" and value is not None and not isinstance(value, str):
            raise RequestError(f"{field} is {shown(value)}; it must be a URL.", field)
        return video_of(value, given_field or field, uuid, local_files=local_files)
    if not isinstance(kind, str) or kind not in KEYS:
        raise RequestError(
            f"{place} is a part of type {shown(kind)}; texts, pictures and videos are taken. Leave it out.",
            f"{place}.type",
        )
    key = next((name for name in (KEYS[kind], *OTHER_KEYS) if part.get(name) is not None), KEYS[kind])
    value, field = part.get(key), f"{place}.{key}"
    if key == "image_url" and isinstance(value, Mapping):
        value, field = value.get("url"), f"{field}.url"
    if key == "base64" and isinstance(value, str):
        value = value if value[:5].lower() == "data:" else f"data:image/png;base64,{value}"
    if key in ("image_url", "url") and value is not None and not isinstance(value, str):
        raise RequestError(f"{field} is {shown(value)}; it must be a URL.", given_field or field)
    return source_of(value, given_field or field, uuid, local_files=local_files)


# ---- multi_modal_data ----------------------------------------------------------------------------


def sources_of_data(data: Any, uuids: Any = None, *, local_files: bool = False) -> list[PictureSource]:
    """The pictures, then the videos of vLLM's `multi_modal_data` and `multi_modal_uuids`, in order. Raises
    RequestError."""
    check_keys(data, "multi_modal_data")
    check_keys(uuids, "multi_modal_uuids")
    found = []
    for modality in MODALITIES:
        items_in = pictures_in if modality == "image" else videos_in
        values = items_in(data[modality]) if data and modality in data else None
        names = listed(uuids[modality]) if uuids and modality in uuids else None
        if values is None:
            values = [None] * len(names or ())
        if names is None:
            names = [None] * len(values)
        if len(names) != len(values):
            what = "pictures" if modality == "image" else "videos"
            raise RequestError(
                f"multi_modal_uuids has {len(names)} names for {len(values)} {what}. Give one for each, or None.",
                "multi_modal_uuids",
            )
        make = source_of if modality == "image" else video_of
        for number, (value, name) in enumerate(zip(values, names, strict=True)):
            field = f"multi_modal_data.{modality}" + (f"[{number}]" if len(values) > 1 else "")
            found.append(make(value, field, name, local_files=local_files))
    return found


def check_keys(data: Any, parameter: str) -> None:
    """Raise RequestError for other modalities, by name."""
    if data is not None and not isinstance(data, Mapping):
        raise RequestError(f"{parameter} is {shown(data)}; it must be a dict such as {{'image': ...}}.", parameter)
    for modality, value in (data or {}).items():
        if modality not in MODALITIES and value is not None and not (isinstance(value, Sequence) and not value):
            raise RequestError(
                f"{parameter} has the key {shown(modality)}; only 'image' and 'video' are taken. Leave it out.",
                parameter,
            )


def pictures_in(value: Any) -> list[Any]:
    """The pictures of a value under the key `image`, which may be embeddings of several in one. Raises RequestError."""
    if isinstance(value, Mapping) and EMBEDS in value:
        return list(split(embeddings_of(value), "multi_modal_data.image"))
    array = as_array(value)
    if array is not None and is_float(array) and array.ndim == 3:
        return list(split(Embeddings(array), "multi_modal_data.image"))
    return listed(value)


def listed(values: Any) -> list[Any]:
    """One value as a list of it."""
    return list(values) if isinstance(values, list | tuple) else [values]
