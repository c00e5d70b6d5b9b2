"""What a prompt may be, as types, and which ones take long to turn into tokens. This module knows no tokenizer."""

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict


class PromptOptions(TypedDict):
    """What a prompt in a dict may carry besides."""

    cache_salt: NotRequired[str]
    priority: NotRequired[int]


class TextPrompt(PromptOptions):
    """A prompt as text."""

    prompt: str


class TokensPrompt(PromptOptions):
    """A prompt as token ids, and perhaps the text that they stand for; of a chat also the text's end that its template
    wrote behind the last message, which says whether the model thinks already."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    ending: NotRequired[str]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]
"""Text, token ids, or a dict with "prompt" or "prompt_token_ids", and perhaps "cache_salt" and "priority"."""

LONG_PROMPT = 2000
"""Characters, token ids or entries from which on something holds up everybody's stream."""
LONG_FIELDS = ("stop_token_ids", "allowed_token_ids", "extra_args")
"""Of sampling parameters: they are looked through, and as long as the client likes."""


def takes_long(prompt: Any, params: Any) -> bool:
    """Whether a request is worth a thread, since others would wait meanwhile: its prompt is long, or a list of its
    parameters, or the words to tokenise that they ban."""
    parts = [*prompt.values()] if isinstance(prompt, dict) else [prompt]
    parts += [getattr(params, name, None) for name in LONG_FIELDS]
    if any(hasattr(part, "__len__") and len(part) > LONG_PROMPT for part in parts):
        return True
    return sum(map(len, getattr(params, "bad_words", None) or ())) > LONG_PROMPT
