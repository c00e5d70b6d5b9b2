"""Which log probabilities belong to the text of an answer, where some of its tokens are thinking, calls or markers.

This module knows no format: it sees what a parser makes of one token after the other.
"""

from collections.abc import Sequence

from jaxpaged.entrypoints.http.openai.logprobs import TokenLogprob
from jaxpaged.messages import CompletionOutput
from jaxpaged.parsing.deltas import Delta


class TextLogprobs:
    """Holds the entries of tokens until it is known what they are. `is_plain`: all of them are text."""

    def __init__(self, is_plain: bool):
        self._is_plain = is_plain
        self._waiting: list[TokenLogprob] = []

    def of(self, deltas: Sequence[Delta], entries: Sequence[TokenLogprob]) -> list[TokenLogprob]:
        """The entries of the content in `deltas`, which the tokens of `entries` have settled."""
        self._waiting += entries
        if not deltas:
            return []
        waiting, self._waiting = self._waiting, []
        if self._is_plain:
            return waiting
        if any(delta.content is None for delta in deltas):
            return []
        return newest(waiting, sum(len(delta.content or "") for delta in deltas))

    def rest(self) -> list[TokenLogprob]:
        """Entries of tokens without text at the end of the answer, such as the one that ends it."""
        return self._waiting


def newest(entries: list[TokenLogprob], num_characters: int) -> list[TokenLogprob]:
    """The last entries, that have so many characters: those before them were of a marker."""
    first = len(entries)
    while first and num_characters > 0:
        first -= 1
        num_characters -= len(entries[first].token)
    return entries[first:]


def by_token(completion: CompletionOutput) -> list[CompletionOutput]:
    """A result per token, if the texts of the tokens are known and begin with the result's text; else it alone.

    The last texts may be longer: a stop text and the token that ends an answer are not part of it.
    """
    positions = completion.logprobs or []
    texts = [candidates[token_id].decoded_token or "" for token_id, candidates in zip(completion.token_ids, positions)]
    if len(texts) < 2 or not "".join(texts).startswith(completion.text):
        return [completion]
    pieces, place = [], 0
    for text, token_id, candidates in zip(texts, completion.token_ids, positions):
        text_here = completion.text[place : place + len(text)]
        pieces.append(CompletionOutput(completion.index, text_here, [token_id], None, [candidates]))
        place += len(text)
    pieces[-1].finish_reason, pieces[-1].stop_reason = completion.finish_reason, completion.stop_reason
    return pieces
