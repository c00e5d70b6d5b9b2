"""Pictures that a command's user names by their files, as parts of a message: an engine and any server take them so."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpaged.errors import UsageError

Part = dict[str, Any]


def picture_part(path: str) -> Part:
    """The file as a data URL. Raises UsageError for one that cannot be read, or is no picture."""
    from jaxpaged.multimodal.decoding import PictureLimits
    from jaxpaged.multimodal.headers import read_header

    most_bytes = PictureLimits().max_bytes

    try:
        with Path(path).expanduser().open("rb") as file:
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}. Check the path of the picture.") from None
    header = read_header(data)
    if header is None:
        raise UsageError(f"{path} is no picture that can be read. Convert it to PNG, JPEG, WebP or GIF.")
    if len(data) > most_bytes:
        raise UsageError(f"{path} has more than {most_bytes} bytes. Make it smaller.")
    encoded = base64.b64encode(data).decode("ascii")
    return {"type": "image_url", "image_url": {"url": f"data:image/{header.format.lower()};base64,{encoded}"}}


def with_pictures(messages: Sequence[dict[str, Any]], pictures: Sequence[Part]) -> list[dict[str, Any]]:
    """Messages with pictures before the words of the last one that is a user's."""
    whole = list(messages)
    for index in range(len(whole) - 1, -1, -1):
        if isinstance(whole[index], dict) and whole[index].get("role") == "user":
            content = whole[index].get("content")
            words = content if isinstance(content, list) else [{"type": "text", "text": content}]
            whole[index] = {**whole[index], "content": [*pictures, *words]}
            break
    return whole


def url_of(part: Part) -> str:
    """The data URL of a part."""
    return part["image_url"]["url"]
