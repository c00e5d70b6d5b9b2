"""The part of a long text that matters: what is cut off a prompt, or makes it too long, is not tokenised.

A text is tokenised in pieces until there are enough tokens. So time and memory follow the model's limit, not the
length of the text that a client sends. No bound of bytes per token is assumed: a normalizer may drop characters, and
an unknown word may be a single token. This module knows no requests.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpaged.engine.input.tokenizer import Tokenizer
from jaxpaged.errors import RequestError

PIECE = 16_384
"""Characters that are tokenised at a time."""
REACH = 1024
"""Characters in which a place to cut is looked for. White space begins a token in all tokenizers of language models, so
tokens after such a place are those of the whole text."""
MARGIN = 256
"""Tokens that are kept beyond those asked for, since where a text has no white space (a run of one letter, a script
without spaces) its tokens near the cut may be others than those of the whole text."""
LOST_AT_CUT = 8
"""Tokens of a piece that are not counted: in the whole text it might have fewer."""
WHITE_SPACE_BEGINS = re.compile(r"(?<=\S)\s")


class PromptTooLongError(RequestError):
    """A prompt has more tokens than can be."""


@dataclass(frozen=True)
class Truncation:
    """Keep `keep` tokens of a prompt, the last ones or, from the right, the first. -1: as many as fit. None: all."""

    keep: int | None = None
    from_right: bool = False

    def length(self, room: int) -> int | None:
        """How many tokens are kept, where `room` fit. Raises RequestError for what is no length."""
        keep = self.keep
        if keep is None:
            return None
        if isinstance(keep, bool) or not isinstance(keep, int) or (keep < 1 and keep != -1):
            raise RequestError(
                f"truncate_prompt_tokens is {keep!r}; it must be at least 1, or -1 for what the model takes.",
                "truncate_prompt_tokens",
            )
        return room if keep == -1 else keep

    def cut(self, token_ids: Sequence[Any], room: int) -> list[Any]:
        """Those that are kept."""
        length = self.length(room)
        if length is None:
            return list(token_ids)
        return list(token_ids[:length] if self.from_right else token_ids[-length:])


def enough_text(tokenizer: Tokenizer, text: str, num_tokens: int, from_end: bool = False) -> str:
    """A beginning of `text`, or an end of it, with at least `num_tokens` + MARGIN tokens; all of it if it has fewer."""
    if len(text) <= max(num_tokens, PIECE):
        return text
    count, taken = 0, 0
    for piece in pieces(text, from_end):
        if count >= num_tokens + MARGIN:
            return text[len(text) - taken :] if from_end else text[:taken]
        count += max(len(tokenizer.encode(piece, add_special_tokens=False)) - LOST_AT_CUT, 0)
        taken += len(piece)
    return text


def pieces(text: str, from_end: bool) -> Iterator[str]:
    """The text in pieces from its beginning, or from its end."""
    if from_end:
        end = len(text)
        while end > 0:
            start = place_to_cut(text, end - PIECE)
            yield text[start:end]
            end = start
        return
    start = 0
    while start < len(text):
        end = place_to_cut(text, start + PIECE)
        yield text[start:end]
        start = end


def place_to_cut(text: str, at: int) -> int:
    """Where white space begins next after `at`, or `at` itself where there is none near."""
    if not 0 < at < len(text):
        return min(max(at, 0), len(text))
    found = WHITE_SPACE_BEGINS.search(text, at, min(at + REACH, len(text)))
    return at if found is None else found.start()


def checked_length(tokenizer: Tokenizer, text: str, most: int) -> None:
    """Raise PromptTooLongError when the text certainly has more than `most` tokens."""
    part = enough_text(tokenizer, text, most)
    if len(part) < len(text):
        raise PromptTooLongError(
            f"prompt has more than {most} tokens: so many are in the first {len(part)} of its {len(text)} "
            "characters. Shorten it.",
            "prompt",
        )
