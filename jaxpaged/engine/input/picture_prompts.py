"""Prompts with pictures: what a caller wrote and what the pictures become, put together as token ids and features."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpaged.engine.input.picture_parts import (
    PictureOptions,
    as_texts,
    first_part,
    has_pictures,
    without_pictures,
)
from jaxpaged.engine.input.pictures import PictureIntake, features_of, fillings_of
from jaxpaged.engine.input.placeholders import NAMES
from jaxpaged.engine.input.tokenizer import PromptTooLongError
from jaxpaged.errors import RequestError, check_unicode, shown
from jaxpaged.messages import MultiModalFeature
from jaxpaged.multimodal.budget import MakeRoom
from jaxpaged.multimodal.sources import PictureSource, is_video_part, sources_of_data
from jaxpaged.multimodal.videos import videos_in


@dataclass(frozen=True)
class SeenPrompt:
    """Token ids with placeholders, the text as its user wrote it, and the pictures."""

    token_ids: list[int]
    text: str | None
    features: tuple[MultiModalFeature, ...]


class PicturePrompts:
    """Prompts for one model that sees."""

    def __init__(self, intake: PictureIntake, max_model_len: int):
        self.intake = intake
        self.placeholders = intake.placeholders
        self._max_model_len = max_model_len

    # ---- prompts as dicts

    def of_dict(self, prompt: Mapping[str, Any], add_special_tokens: bool, make_room: MakeRoom | None) -> SeenPrompt:
        """A text or checked token ids with `multi_modal_data`: a mark for each picture, or, in ids, all placeholders.

        Raises RequestError.
        """
        data = prompt.get("multi_modal_data")
        has_videos = isinstance(data, Mapping) and bool(videos_in(data.get("video")))
        self.intake.check_videos("multi_modal_data.video" if has_videos else None)
        sources = sources_of_data(
            prompt.get("multi_modal_data"), prompt.get("multi_modal_uuids"), local_files=self.intake.local_files
        )
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        options = PictureOptions(
            checked_options(prompt.get("mm_processor_kwargs")), salt=prompt.get("cache_salt"), make_room=make_room
        )
        if token_ids is None:
            assert text is not None, "one of them is there"
            return self.of_text(text, sources, options, add_special_tokens, "prompt")
        shown = self.intake.shown(sources, options)
        fillings = fillings_of(shown)
        token_ids = self.placeholders.expanded_ids(token_ids, fillings)
        places = self.placeholders.placed(token_ids, fillings, "prompt_token_ids")
        return SeenPrompt(token_ids, text, features_of(shown, places))

    def of_text(
        self,
        text: str,
        sources: Sequence[PictureSource],
        options: PictureOptions,
        add_special_tokens: bool,
        field: str,
        most: int | None = None,
    ) -> SeenPrompt:
        """A text with a mark for each picture, in which codes stand for what users typed."""
        check_unicode(field, text)
        self.intake.check_number(sources)
        for modality, marks in self.placeholders.num_marks(text).items():
            num_sources = sum(source.modality == modality for source in sources)
            if marks != num_sources:
                raise self.placeholders.mismatch(f"{marks} marks for {num_sources} {NAMES[modality]}s", modality, field)
        shown = self.intake.shown(sources, options)
        fillings = fillings_of(shown)
        self._check_length(sum(sum(each.layout.sizes) for each in shown), most)
        whole = self.placeholders.expanded(text, fillings)
        token_ids = self.placeholders.encode(whole, add_special_tokens)
        self._check_length(len(token_ids), most)
        places = self.placeholders.placed(token_ids, fillings, field)
        return SeenPrompt(token_ids, self.placeholders.shown(whole), features_of(shown, places))

    def words(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text without pictures, in which codes may stand for what users typed: what looks like a mark
        is words."""
        return self.placeholders.encode(self.placeholders.guarded_value(text), add_special_tokens)

    def check_no_placeholders(self, token_ids: Sequence[int]) -> None:
        """Raise RequestError for token ids with placeholders, where there are no pictures."""
        if (token_id := self.placeholders.placeholder_in(token_ids)) is not None:
            raise RequestError(
                f"the prompt has the token id {token_id}, a placeholder of pictures or videos, and none of these. Give "
                "them as multi_modal_data, or leave it out.",
                "prompt",
            )

    def _check_length(self, num_tokens: int, most: int | None) -> None:
        most = self._max_model_len if most is None else most
        if num_tokens > most:
            raise PromptTooLongError(
                f"the prompt has at least {num_tokens} tokens with its pictures, and may have {most}. Send fewer or "
                "smaller pictures, or raise max_model_len.",
                "prompt",
            )

    # ---- chats

    def opened(
        self, messages: Sequence[Mapping[str, Any]], takes_parts: bool
    ) -> tuple[list[dict[str, Any]], list[PictureSource]]:
        """A checked conversation without its pictures, in which nobody can type a mark, and the pictures. Raises
        RequestError."""
        sources: list[PictureSource] = []
        seen = has_pictures(messages)
        if seen:
            self.intake.check_videos(first_part(messages, is_video_part))
            messages, sources = without_pictures(messages, local_files=self.intake.local_files)
            self.intake.check_number(sources)
        guarded = self.placeholders.guarded(messages, seen)
        if seen and not takes_parts:
            guarded = as_texts(guarded, self.intake.written_marks, interleaved=self.intake.config.interleave_mm_strings)
        return guarded, sources

    def of_chat(
        self,
        text: str,
        sources: Sequence[PictureSource],
        options: PictureOptions,
        add_special_tokens: bool,
        most: int | None,
    ) -> dict[str, Any]:
        """What a template made of an opened chat, as a prompt dict. Raises RequestError."""
        checked_options(options.processor_kwargs)
        seen = self.of_text(text, sources, options, add_special_tokens, "messages", most)
        return {"prompt": seen.text, "prompt_token_ids": seen.token_ids, "mm_features": seen.features}


def checked_options(given: Any) -> Mapping[str, Any] | None:
    """`mm_processor_kwargs` of a request. Raises RequestError."""
    if given is not None and not isinstance(given, Mapping):
        raise RequestError(
            f"mm_processor_kwargs is {shown(given)}; it must be a dict, such as {{'do_pan_and_scan': True}}.",
            "mm_processor_kwargs",
        )
    return given
