"""Pictures in the messages of a chat: taken out, so that a template sees only that here is one.

What requests say of pictures is here, too. Nothing is read or decoded.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxpaged.errors import RequestError
from jaxpaged.multimodal.budget import MakeRoom
from jaxpaged.multimodal.sources import PictureSource, is_picture_part, source_of_part

if TYPE_CHECKING:
    from jaxpaged.engine.input.tokenizer import Truncation  # tokenizers are slow to import, and commands look at parts


@dataclass(frozen=True)
class PictureOptions:
    """What one request says of its pictures. `salt` is its `cache_salt`."""

    processor_kwargs: Mapping[str, Any] | None = None
    io_kwargs: Mapping[str, Any] | None = None
    salt: str | None = None
    make_room: MakeRoom | None = None


def has_pictures(messages: Any) -> bool:
    """Whether a message has a part that is a picture, or another medium. Messages may be malformed still."""
    return first_part(messages, is_picture_part) is not None


def first_part(messages: Any, is_wanted: Callable[[Any], bool]) -> str | None:
    """Where the first such part is, such as `messages[0].content[1]`."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        return None
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list | tuple):
            for place, part in enumerate(content):
                if is_wanted(part):
                    return f"messages[{number}].content[{place}]"
    return None


def without_pictures(
    messages: Sequence[Mapping[str, Any]], *, local_files: bool
) -> tuple[list[dict[str, Any]], list[PictureSource]]:
    """Copies of messages with parts of type image or video where these were, and they in order. Raises RequestError."""
    copies: list[dict[str, Any]] = []
    sources: list[PictureSource] = []
    for number, message in enumerate(messages):
        copy = dict(message)
        content = copy.get("content")
        if isinstance(content, list | tuple):
            parts = []
            for place, part in enumerate(content):
                if is_picture_part(part):
                    source = source_of_part(part, f"messages[{number}].content[{place}]", local_files=local_files)
                    sources.append(source)
                    part = {"type": source.modality}
                parts.append(part)
            copy["content"] = parts
        copies.append(copy)
    return copies, sources


def as_texts(
    messages: Sequence[Mapping[str, Any]], marks_of: Mapping[str, str], *, interleaved: bool
) -> list[dict[str, Any]]:
    """Messages for a template that knows only texts: the mark of its modality in place of each picture or video, before
    all texts of its message or, `interleaved`, where it stands."""
    copies = []
    for message in messages:
        copy = dict(message)
        content = copy.get("content")
        if isinstance(content, list):
            parts = [
                {"type": "text", "text": marks_of[part["type"]]} if is_picture_part(part) else part for part in content
            ]
            if not interleaved:
                marks = [part for part, given in zip(parts, content, strict=True) if part is not given]
                parts = [*marks, *(part for part in content if not is_picture_part(part))]
            copy["content"] = parts
        copies.append(copy)
    return copies


def refuse_pictures(messages: Any, why: str) -> None:
    """Raise RequestError where a chat has pictures; `why` there can be none, as the second half of a sentence."""
    place = first_part(messages, is_picture_part)
    if place is not None:
        raise RequestError(f"{place} is a picture, or another medium, but {why}. Leave it out.", place)


def check_not_cut(token_ids: Sequence[int], truncation: "Truncation", room: int) -> None:
    """Raise RequestError where a prompt with pictures would be cut."""
    keep = truncation.length(room)
    if keep is not None and len(token_ids) > keep:
        raise RequestError(
            f"the prompt has {len(token_ids)} tokens, and truncate_prompt_tokens keeps {keep}, but a prompt with "
            "pictures cannot be cut. Shorten it.",
            "truncate_prompt_tokens",
        )
