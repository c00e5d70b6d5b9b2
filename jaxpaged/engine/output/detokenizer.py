"""Token ids to text, one token at a time, and stop strings.

The text does not depend on how tokens are cut into steps: every token is decoded, and looked at for stop strings,
by itself. A character that several tokens make up appears with its last token, never in parts. Most tokens have a text
that does not depend on their neighbours (see `plain_pieces`); only the others go through the tokenizer's decoder.
This module knows nothing of requests or of the engine.
"""

import copy
from collections.abc import Sequence
from typing import Protocol

from tokenizers.decoders import DecodeStream

from jaxpaged.engine.input.tokenizer import Tokenizer
from jaxpaged.engine.output.plain_pieces import INCOMPLETE
from jaxpaged.sampling_params import SamplingParams

CONTEXT_TOKENS = 8
"""Prompt tokens that prime the decoder: enough to know whether a space belongs before the next token."""
MAX_HELD_TOKENS = 64
"""More tokens than this without a character are broken bytes. The decoder looks at all of them at every step."""
BEGUN_TOKENS = 3
"""Most tokens of a character that is not complete: each has at least one of its first three bytes."""


class TextStream:
    """Decodes one sequence that continues a prompt."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool,
    ):
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._silent = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._join_special = not (skip_special_tokens or spaces_between_special_tokens)
        self._after_special = False
        whole, begun = split_incomplete(tokenizer, prompt_token_ids[-CONTEXT_TOKENS:])
        self._stream = DecodeStream(ids=whole, skip_special_tokens=skip_special_tokens)
        self.plain = tokenizer.plain_pieces
        self.settled = False  # the text so far ends with a whole character, so a plain piece can follow it
        self.last_plain: int | None = None  # the last token, when the decoder has not seen it
        self._held: list[int] = []  # tokens since the last that gave text
        for token_id in begun:  # the token that completes a character has all of it
            self._decode(token_id)
        self._prompt_incomplete = bool(begun)
        self.settled = False  # only output counts

    def push_all(self, token_ids: Sequence[int]) -> list[str]:
        """The text that each of these tokens completes."""
        if self.settled:
            plain = self.plain
            pieces = [plain[token_id] for token_id in token_ids]
            if all(pieces):
                self.last_plain = token_ids[-1] if token_ids else self.last_plain
                return pieces
        return [self.push(token_id) for token_id in token_ids]

    def push(self, token_id: int) -> str:
        """The text that this token completes."""
        if self.settled and (piece := self.plain[token_id]):
            self.last_plain = token_id
            return piece
        text = self._decode(token_id)
        if self._prompt_incomplete and text:
            text = text.lstrip(INCOMPLETE)  # bytes at the end of the prompt that nothing completed
            self._prompt_incomplete = False
        if self._join_special:
            special = self._tokenizer.added_tokens.get(token_id)
            if special is not None and self._after_special:
                text = special
            self._after_special = special is not None
        return text

    def peek(self, token_id: int) -> str:
        """The text that this token would complete, were it the next."""
        other = copy.copy(self)
        other._stream, other._held = copy.copy(self._stream), self._held[:]
        return other.push(token_id)

    def _decode(self, token_id: int) -> str:
        if token_id in self._silent or token_id >= self._tokenizer.vocab_size:
            return ""
        text = self._step(token_id)
        self.settled = text is not None and not self._join_special
        if text is not None:
            self._held.clear()
            return text
        self._held.append(token_id)
        return self._drop_broken() if len(self._held) > MAX_HELD_TOKENS else ""

    def _drop_broken(self) -> str:
        """The text of bytes that can no longer become characters; only what may be one's beginning is kept."""
        broken, self._held = self._held[:-BEGUN_TOKENS], self._held[-BEGUN_TOKENS:]
        self._stream = DecodeStream(skip_special_tokens=self._skip_special)
        for token_id in self._held:
            self._stream.step(self._tokenizer.backend, token_id)
        return self._tokenizer.decode(broken, self._skip_special)

    def _step(self, token_id: int) -> str | None:
        if self.last_plain is not None:  # what the decoder would keep of all that it has not seen
            self._stream = DecodeStream(ids=[self.last_plain], skip_special_tokens=self._skip_special)
            self.last_plain = None
        try:
            return self._stream.step(self._tokenizer.backend, token_id)
        except Exception as error:  # the library has no class of its own for this
            if "Invalid prefix" not in str(error):
                raise
        # Some decoders change text that they already gave, when bytes turn out to be no character.
        self._stream = DecodeStream(skip_special_tokens=self._skip_special)
        return self._stream.step(self._tokenizer.backend, token_id)

    def flush(self) -> str:
        """Whole characters that wait with the beginning of another one, when no more tokens come."""
        text = self._tokenizer.decode(self._held, self._skip_special).rstrip(INCOMPLETE)
        self._held.clear()
        return text


class Detokenizer(Protocol):
    """The text of one sequence, as far as it may be shown, and the stop string that ended it."""

    def push(self, token_ids: Sequence[int], ended_by_token: bool) -> tuple[int, str | None]:
        """Add new tokens; `ended_by_token`: the last one is an end-of-sequence or stop token.

        Returns how many of the tokens belong to the output, and the stop string found, if any: tokens past the
        one that completes a stop string do not belong to it.
        """
        ...

    def finish(self) -> None:
        """No more tokens come: nothing is withheld any longer."""
        ...

    @property
    def text(self) -> str:
        """All text that may be shown."""
        ...

    def take_new_text(self) -> str:
        """Text that may be shown and was not taken yet."""
        ...


def make_detokenizer(tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> Detokenizer:
    """The detokenizer that a request needs."""
    stream = TextStream(tokenizer, prompt_token_ids, params.skip_special_tokens, params.spaces_between_special_tokens)
    keep_stop = params.include_stop_str_in_output
    if params.stop:
        assert isinstance(params.stop, list), "parameters were verified, which makes a list of one text"
        return StopDetokenizer(stream, params.stop, keep_stop, params.min_tokens)
    return PlainDetokenizer(stream, keep_stop)


class PlainDetokenizer:
    """Without stop strings nothing depends on the text, so tokens are decoded when their text is asked for."""

    def __init__(self, stream: TextStream, keep_end: bool):
        self._stream = stream
        self._keep_end = keep_end
        self._waiting: list[int] = []  # tokens that are not decoded
        self._pieces: list[str] = []
        self._num_new = 0  # pieces that were not taken
        self._joined, self._num_joined = "", 0  # the text of the first pieces
        self._done = False

    def push(self, token_ids: Sequence[int], ended_by_token: bool) -> tuple[int, str | None]:
        # The token that ends the text stays in the ids, but its text is not shown.
        self._waiting += token_ids[:-1] if ended_by_token and not self._keep_end else token_ids
        return len(token_ids), None

    def push_and_take(self, token_ids: Sequence[int]) -> str:
        """The text of tokens that do not end the sequence, where all text before was taken. It is not kept: `text`
        lacks it. A single token is the usual case."""
        if len(token_ids) != 1:
            return "".join(self._stream.push_all(token_ids))
        stream, token_id = self._stream, token_ids[0]
        if stream.settled and (piece := stream.plain[token_id]):  # `push`, without the call
            stream.last_plain = token_id
            return piece
        return stream.push(token_id)

    def finish(self) -> None:
        if not self._done:
            self._decode()
            self._pieces.append(self._stream.flush())
            self._num_new += 1
            self._done = True

    @property
    def text(self) -> str:
        self._decode()
        self._joined += "".join(self._pieces[self._num_joined :])
        self._num_joined = len(self._pieces)
        return self._joined

    def take_new_text(self) -> str:
        self._decode()
        new = self._pieces[len(self._pieces) - self._num_new :]
        self._num_new = 0
        return "".join(new)

    def _decode(self) -> None:
        if self._waiting:
            self._pieces += self._stream.push_all(self._waiting)
            self._num_new += len(self._waiting)
            self._waiting.clear()


class StopDetokenizer:
    """Looks for stop strings with every token.

    While the sequence runs, as many characters are withheld as could still turn out to begin a stop string.
    """

    def __init__(self, stream: TextStream, stops: list[str], keep_stop: bool, min_tokens: int):
        self._stream = stream
        self._stops = stops
        self._keep_stop = keep_stop
        self._min_tokens = min_tokens
        self._longest = max(map(len, stops))
        self._withheld = 0 if keep_stop else self._longest - 1
        self._text = ""
        self._num_tokens = 0
        self._num_shown = 0
        self._done = False

    def push(self, token_ids: Sequence[int], ended_by_token: bool) -> tuple[int, str | None]:
        for count, token_id in enumerate(token_ids, start=1):
            self._num_tokens += 1
            if ended_by_token and count == len(token_ids) and not self._keep_stop:
                break  # the token stays in the ids, but its text is not shown
            piece = self._stream.push(token_id)
            self._text += piece
            may_stop = piece and self._num_tokens > self._min_tokens
            if may_stop and (stop := self._cut_at_stop(len(piece))) is not None:
                return count, stop
        return len(token_ids), None

    def _cut_at_stop(self, num_new: int) -> str | None:
        """End the text at the stop string that the last `num_new` characters complete first."""
        tail = self._text[-(num_new + self._longest - 1) :]
        if not any([stop in tail for stop in self._stops]):  # noqa: C419 (a generator takes three times as long)
            return None
        best: tuple[int, int] | None = None  # (end, place in the list)
        for place, stop in enumerate(self._stops):
            start = self._text.find(stop, max(0, len(self._text) - num_new - len(stop) + 1))
            if start >= 0 and (best is None or start + len(stop) < best[0]):
                best = (start + len(stop), place)
        if best is None:
            return None
        end, place = best
        stop = self._stops[place]
        self._text = self._text[: end if self._keep_stop else end - len(stop)]
        self._done = True
        return stop

    def finish(self) -> None:
        if not self._done:
            self._text += self._stream.flush()
            self._done = True

    @property
    def text(self) -> str:
        return self._text[: self._shown_until()]

    def take_new_text(self) -> str:
        until = self._shown_until()
        new = self._text[self._num_shown : until]
        self._num_shown = max(self._num_shown, until)
        return new

    def _shown_until(self) -> int:
        return len(self._text) if self._done else max(0, len(self._text) - self._withheld)


def split_incomplete(tokenizer: Tokenizer, token_ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Split ids into those that end with a whole character and those that begin another one."""
    ids = list(token_ids)
    end = len(ids)
    while end and tokenizer.decode(ids[:end], skip_special_tokens=False).endswith(INCOMPLETE):
        end -= 1
    return ids[:end], ids[end:]
