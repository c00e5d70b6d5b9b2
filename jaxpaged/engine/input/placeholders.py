"""Where pictures stand in a prompt: a template's own marks become placeholder tokens, and words of users stay words.

A mark is a special token, such as `<start_of_image>`, so a user could type it. Before a template writes its own ones,
those in the words of a conversation are replaced by a code that nobody can guess; afterwards they are put back, and are
tokenised as the letters that they are. This module knows neither pixels nor requests.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxpaged.engine.input.tokenizer import Tokenizer
from jaxpaged.errors import RequestError
from jaxpaged.multimodal.processors.base import Processor

ALWAYS_TRUSTED = ("system", "developer", "assistant")
"""Roles whose special tokens stay tokens: those of earlier answers mark thinking and calls."""


class Filling(Protocol):
    """What one mark stands for: the layout of a picture, or of a video."""

    @property
    def placeholder(self) -> str: ...

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each of its items: a picture is one, a moment of a video is one."""


Fillings = Mapping[str, Sequence[Filling]]
"""By modality, in the order of the prompt."""


class Kind(NamedTuple):
    """How a prompt says that there is a picture, or a video: any of `marks`, the first one that fits, each as a text
    and as token ids; and the placeholder token."""

    modality: str
    marks: tuple[str, ...]
    token_id: int
    mark_ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Placed:
    """Where the embeddings of one picture, or of one moment of a video, go: runs of placeholder tokens, each a start
    and a length."""

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
        ids = {text: token_id for token_id, text in tokenizer.added_tokens.items()}
        self._kinds = {"image": kind_of("image", (processor.mark,), processor.placeholder_token, ids)}
        if (videos := processor.videos) is not None:
            self._kinds["video"] = kind_of("video", videos.marks, videos.placeholder_token, ids)
        self._in_texts = any_of([mark for kind in self._kinds.values() for mark in kind.marks])
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

    def num_marks(self, text: str) -> dict[str, int]:
        """By modality."""
        found = [self._kind_of_mark(mark).modality for mark in self._in_texts.findall(text)]
        return {modality: found.count(modality) for modality in self._kinds}

    def _kind_of_mark(self, mark: str) -> Kind:
        return next(kind for kind in self._kinds.values() if mark in kind.marks)

    def expanded(self, text: str, fillings: Fillings) -> str:
        """A text with each mark, one for each picture or video, replaced by what stands for it."""
        left = {modality: iter(own) for modality, own in fillings.items()}
        return self._in_texts.sub(lambda found: next(left[self._kind_of_mark(found[0]).modality]).placeholder, text)

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

    def expanded_ids(self, token_ids: list[int], fillings: Fillings) -> list[int]:
        """Token ids of a caller with one mark for each picture or video, or with all placeholders already, as they
        should be.

        Returns them as they are when the number of marks fits nothing: `placed` says so.
        """
        if all(token_ids.count(kind.token_id) == needed(fillings, kind) for kind in self._kinds.values()):
            return token_ids
        marks = self._marks_in(token_ids)
        for kind in self._kinds.values():
            own = [mark for mark in marks if mark[2] is kind]
            in_marks = sum(token_ids[start:end].count(kind.token_id) for start, end, _ in own)
            if len(own) != len(fillings.get(kind.modality, ())) or in_marks != token_ids.count(kind.token_id):
                return token_ids
        left = {modality: iter(own) for modality, own in fillings.items()}
        ids: list[int] = []
        at = 0
        for start, end, kind in marks:
            ids += token_ids[at:start]
            text, at = next(left[kind.modality]).placeholder, end
            if text[:1] == "\n" and ids and (before := self._line_breaks(ids[-1])):
                text = before + text
                ids.pop()
            if text[-1:] == "\n" and at < len(token_ids) and (behind := self._line_breaks(token_ids[at])):
                text, at = text + behind, at + 1
            ids += self._tokenizer.encode(text, add_special_tokens=False)
        return ids + token_ids[at:]

    def _marks_in(self, token_ids: list[int]) -> list[tuple[int, int, Kind]]:
        """Where marks begin and end."""
        ways = [(mark, kind) for kind in self._kinds.values() for mark in kind.mark_ids]
        firsts = {mark[0] for mark, _ in ways}
        found, end = list[tuple[int, int, Kind]](), 0
        for at in [at for at, token_id in enumerate(token_ids) if token_id in firsts]:
            fitting = (each for each in ways if tuple(token_ids[at : at + len(each[0])]) == each[0])
            if at >= end and (way := next(fitting, None)) is not None:
                end = at + len(way[0])
                found.append((at, end, way[1]))
        return found

    def _line_breaks(self, token_id: int) -> str:
        """The text of a token that is nothing but line breaks: several of them are one token."""
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text if text and not text.strip("\n") else ""

    def placed(self, token_ids: Sequence[int], fillings: Fillings, field: str) -> dict[str, list[list[Placed]]]:
        """Where the embeddings of each item of each filling go, by modality. Raises RequestError that names `field`
        unless all placeholders and all pictures and videos go together."""
        placed = {}
        for kind in self._kinds.values():
            runs, own = runs_of(token_ids, kind.token_id), fillings.get(kind.modality, ())
            if (total := sum(length for _, length in runs)) != (need := needed(fillings, kind)):
                what = f"{total} placeholder tokens, and {len(own)} {NAMES[kind.modality]}s need {need}"
                raise self.mismatch(what, kind.modality, field)
            places = iter(divided(runs, [size for filling in own for size in filling.sizes]))
            placed[kind.modality] = [[next(places) for _ in filling.sizes] for filling in own]
        return placed

    def placeholder_in(self, token_ids: Sequence[int]) -> int | None:
        """A placeholder among token ids, if there is one."""
        return next((kind.token_id for kind in self._kinds.values() if kind.token_id in token_ids), None)

    def mismatch(self, what: str, modality: str, field: str) -> RequestError:
        mark, name = self._kinds[modality].marks[0], NAMES[modality]
        return RequestError(f"the prompt has {what}. Write {mark} once for each {name}, where it belongs.", field)


NO_TOKEN = -1
NAMES = {"image": "picture", "video": "video"}


def kind_of(modality: str, marks: tuple[str, ...], placeholder: str, ids: Mapping[str, int]) -> Kind:
    """A kind in a vocabulary with these tokens. Where it lacks them, there is no mark, and the placeholder is no token:
    then nothing can be placed."""
    parts = [[mark] if mark in ids else re.findall(r"<[^>]*>", mark) for mark in marks]
    mark_ids = [tuple(ids[part] for part in own) for own in parts if own and all(part in ids for part in own)]
    return Kind(modality, marks, ids.get(placeholder, NO_TOKEN), tuple(mark_ids))


def needed(fillings: Fillings, kind: Kind) -> int:
    """Placeholder tokens of all fillings of a kind."""
    return sum(size for filling in fillings.get(kind.modality, ()) for size in filling.sizes)


def divided(runs: Sequence[tuple[int, int]], sizes: Sequence[int]) -> list[Placed]:
    """The runs of items of these sizes, which are as many tokens together."""
    found, left = [], iter(runs)
    start = length = 0
    for size in sizes:
        own: list[tuple[int, int]] = []
        missing = size
        while missing:
            if not length:
                start, length = next(left)
            taken = min(missing, length)
            own.append((start, taken))
            start, length, missing = start + taken, length - taken, missing - taken
        found.append(Placed(own))
    return found


def runs_of(token_ids: Sequence[int], token_id: int) -> list[tuple[int, int]]:
    """Start and length of each run of one token."""
    places = np.flatnonzero(np.asarray(token_ids) == token_id)
    parts = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1) if places.size else []
    return [(int(part[0]), part.size) for part in parts]


def any_of(words: Sequence[str]) -> re.Pattern[str]:
    """A pattern of any of these words, the longest that stands at a place."""
    return re.compile("|".join(re.escape(word) for word in sorted(set(words), key=len, reverse=True)))
