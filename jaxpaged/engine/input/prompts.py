"""What a prompt may be, as types, and which ones take long to turn into tokens. This module knows no tokenizer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

from jaxpaged.messages import MultiModalFeature


class PromptOptions(TypedDict):
    """What a prompt in a dict may carry besides. Pictures are the values under "image"; see guides/images.md."""

    cache_salt: NotRequired[str]
    priority: NotRequired[int]
    multi_modal_data: NotRequired[Mapping[str, Any]]
    multi_modal_uuids: NotRequired[Mapping[str, Any]]
    mm_processor_kwargs: NotRequired[Mapping[str, Any]]


class TextPrompt(PromptOptions):
    """A prompt as text."""

    prompt: str


class TokensPrompt(PromptOptions):
    """A prompt as token ids, and perhaps the text that they stand for; of a chat also the text's end that its template
    wrote behind the last message, which says whether the model thinks already. `mm_features` are its pictures once
    they are processed; the ids have their placeholders then."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    ending: NotRequired[str]
    mm_features: NotRequired[Sequence[MultiModalFeature]]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]
"""Text, token ids, or a dict with "prompt" or "prompt_token_ids", and perhaps "cache_salt" and "priority"."""

LONG_PROMPT = 2000
"""Characters, token ids or entries from which on something holds up everybody's stream."""
LONG_FIELDS = ("stop_token_ids", "allowed_token_ids", "extra_args")
"""Of sampling parameters: they are looked through, and as long as the client likes."""


@dataclass(frozen=True)
class ChatWithPictures:
    """A conversation that becomes a prompt when its turn comes, so that not all pictures of a batch are in memory. It
    stands under the key "chat" of a prompt dict. `options` are those of `InputProcessor.chat_prompt`."""

    messages: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]


def carries_pictures(prompt: Any) -> bool:
    """Whether it holds pictures that are not processed yet: a call that may wait for long."""
    return isinstance(prompt, Mapping) and any(
        prompt.get(key) for key in ("multi_modal_data", "multi_modal_uuids", "chat")
    )


def takes_long(prompt: Any, params: Any) -> bool:
    """Whether a request is worth a thread, since others would wait meanwhile: its prompt is long, or a list of its
    parameters, or the words to tokenise that they ban."""
    parts = [*prompt.values()] if isinstance(prompt, dict) else [prompt]
    parts += [getattr(params, name, None) for name in LONG_FIELDS]
    if any(hasattr(part, "__len__") and len(part) > LONG_PROMPT for part in parts):
        return True
    return sum(map(len, getattr(params, "bad_words", None) or ())) > LONG_PROMPT
