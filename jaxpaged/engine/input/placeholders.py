"""Where pictures stand in a prompt: a template's own marks become placeholder tokens, and words of users stay words.

A mark is a special token, such as `<start_of_image>`, so a user could type it. Before a template writes its own ones,
those in the words of a conversation are replaced by a code that nobody can guess; afterwards they are put back, and are
tokenised as the letters that they are. This module knows neither pixels nor requests.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpaged.engine.input.tokenizer import Tokenizer
from jaxpaged.errors import RequestError
from jaxpaged.multimodal.processors.base import PictureLayout, Processor

ALWAYS_TRUSTED = ("system", "developer", "assistant")
"""Roles whose special tokens stay tokens: those of earlier answers mark thinking and calls."""


@dataclass(frozen=True)
class Placed:
    """Where one picture's embeddings go: runs of placeholder tokens, each a start and a length."""

    runs: list[tuple[int, int]]

    @property
    def offset(self) -> int:
        return self.runs[0][0]

    @property
    def length(self) -> int:
        """From the first placeholder to the last, what stands between included."""
        start, length = self.runs[-1]
        return start + length - self.offset


class Placeholders:
    """The marks of one model and its tokenizer. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, processor: Processor):
        self._tokenizer = tokenizer
        self.mark = processor.mark
        ids = {text: token_id for token_id, text in tokenizer.added_tokens.items()}
        self.token_id = ids.get(processor.placeholder_token)
        """None: the tokenizer lacks it, so nothing can be placed."""
        self._mark_id = ids.get(processor.mark)
        marks = [processor.mark, processor.placeholder_token, *processor.other_marks]
        special = [tokenizer.added_tokens[each] for each in tokenizer.special_ids]
        self._words = list(dict.fromkeys([*marks, *special]))
        self._number = {word: number for number, word in enumerate(self._words)}
        self._marks, self._special = any_of(marks), any_of(self._words)
        digits = [str(10**17 + secrets.randbelow(9 * 10**17)) for _ in range(2)]  # no filter of a template changes them
        self._begin, self._end = digits
        self._codes = re.compile(f"{self._begin}(\\d+?){self._end}")

    # ---- words of users

    def guarded(self, messages: Sequence[Mapping[str, Any]], has_pictures: bool) -> list[dict[str, Any]]:
        """Copies of messages in which what users and tools typed cannot be taken for a mark; in prompts with pictures
        for no special token at all."""
        return [
            {
                name: self._guarded_value(value, self._pattern(message, has_pictures)) if name != "role" else value
                for name, value in message.items()
            }
            for message in messages
        ]

    def guarded_value(self, value: Any) -> Any:
        """The same of tools, or of anything else that a template reads: no text in it can be taken for a mark."""
        return self._guarded_value(value, self._marks)

    def _pattern(self, message: Mapping[str, Any], has_pictures: bool) -> re.Pattern[str]:
        return self._special if has_pictures and message.get("role") not in ALWAYS_TRUSTED else self._marks

    def _guarded_value(self, value: Any, pattern: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return pattern.sub(self._code, value)
        if isinstance(value, Mapping):
            return {key: self._guarded_value(each, pattern) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self._guarded_value(each, pattern) for each in value]
        return value

    def _code(self, found: re.Match[str]) -> str:
        return f"{self._begin}{self._number[found[0]]}{self._end}"

    def shown(self, text: str) -> str:
        """A rendered text as its user wrote it."""
        return self._codes.sub(lambda found: self._words[int(found[1])], text)

    def has_marks(self, text: str) -> bool:
        """Whether a text, as somebody typed it, has words that look like marks."""
        return self._marks.search(text) is not None

    def has_codes(self, text: str) -> bool:
        """Whether somebody typed something that must stay words."""
        return self._begin in text

    # ---- texts

    def num_marks(self, text: str) -> int:
        return text.count(self.mark)

    def expanded(self, text: str, layouts: Sequence[PictureLayout]) -> str:
        """A text with each mark, one for each picture, replaced by what stands for the picture."""
        pieces = text.split(self.mark)
        assert len(pieces) == len(layouts) + 1, f"{len(pieces) - 1} marks for {len(layouts)} pictures"
        fillings = [layout.placeholder for layout in layouts] + [""]
        return "".join(part for pair in zip(pieces, fillings, strict=True) for part in pair)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids, where what a user typed as a special token is cut behind its first letter: it is none then."""
        if not self.has_codes(text):
            return self._tokenizer.encode(text, add_special_tokens)
        pieces, at, head = [], 0, ""
        for found in self._codes.finditer(text):
            word = self._words[int(found[1])]
            pieces.append(head + text[at : found.start()] + word[:1])
            head, at = word[1:], found.end()
        pieces.append(head + text[at:])
        ids: list[int] = []
        for number, piece in enumerate(pieces):
            ids += self._tokenizer.encode(piece, add_special_tokens and number == 0) if piece else []
        return ids

    # ---- token ids

    def expanded_ids(self, token_ids: list[int], layouts: Sequence[PictureLayout]) -> list[int]:
        """Token ids of a caller with one mark for each picture, or with all placeholders already, as they should be.

        Returns them as they are when the number of marks fits nothing: `placed` says so.
        """
        if self._mark_id is None:
            return token_ids
        marks = [at for at, token_id in enumerate(token_ids) if token_id == self._mark_id]
        placeholders = sum(token_id == self.token_id for token_id in token_ids)
        is_expanded = placeholders == sum(layout.num_tokens for layout in layouts)
        if is_expanded or len(marks) != len(layouts) or (self._mark_id != self.token_id and placeholders):
            return token_ids
        ids: list[int] = []
        at = 0
        for mark, layout in zip(marks, layouts, strict=True):
            ids += token_ids[at:mark]
            text, at = layout.placeholder, mark + 1
            if text[:1] == "\n" and ids and (before := self._line_breaks(ids[-1])):
                text = before + text
                ids.pop()
            if text[-1:] == "\n" and at < len(token_ids) and (behind := self._line_breaks(token_ids[at])):
                text, at = text + behind, at + 1
            ids += self._tokenizer.encode(text, add_special_tokens=False)
        return ids + token_ids[at:]

    def _line_breaks(self, token_id: int) -> str:
        """The text of a token that is nothing but line breaks: several of them are one token."""
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text if text and not text.strip("\n") else ""

    def placed(self, token_ids: Sequence[int], layouts: Sequence[PictureLayout], field: str) -> list[Placed]:
        """Where each picture's embeddings go. Raises RequestError that names `field` unless all placeholders and all
        pictures go together."""
        runs = runs_of(token_ids, self.token_id)
        total, needed = sum(length for _, length in runs), sum(layout.num_tokens for layout in layouts)
        if total != needed:
            raise self.mismatch(f"{total} placeholder tokens, and {len(layouts)} pictures need {needed}", field)
        found, left = [], iter(runs)
        start = length = 0
        for layout in layouts:
            own: list[tuple[int, int]] = []
            missing = layout.num_tokens
            while missing:
                if not length:
                    start, length = next(left)
                taken = min(missing, length)
                own.append((start, taken))
                start, length, missing = start + taken, length - taken, missing - taken
            found.append(Placed(own))
        return found

    def mismatch(self, what: str, field: str) -> RequestError:
        return RequestError(f"the prompt has {what}. Write {self.mark} once for each picture, where it belongs.", field)


def runs_of(token_ids: Sequence[int], token_id: int | None) -> list[tuple[int, int]]:
    """Start and length of each run of one token."""
    if token_id is None:
        return []
    places = np.flatnonzero(np.asarray(token_ids) == token_id)
    parts = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1) if places.size else []
    return [(int(part[0]), part.size) for part in parts]


def any_of(words: Sequence[str]) -> re.Pattern[str]:
    """A pattern of any of these words, the longest that stands at a place."""
    return re.compile("|".join(re.escape(word) for word in sorted(set(words), key=len, reverse=True)))
