"""What a prompt may be, as types. This module knows no tokenizer."""

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
    """A prompt as token ids, and perhaps the text that they stand for."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]
"""Text, token ids, or a dict with "prompt" or "prompt_token_ids", and perhaps "cache_salt" and "priority"."""
