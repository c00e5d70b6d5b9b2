"""Words that must not be written, as the tokens of which they would be made.

This module knows no request.
"""

from collections.abc import Iterable

from jaxpaged.engine.input.tokenizer import Tokenizer

BORDERS = ("\n", "(")
"""Texts behind which a word is written as it is, by tokenizers that put a space before the first word of a text."""


def words_in_tokens(tokenizer: Tokenizer, words: Iterable[str]) -> list[list[int]]:
    """Every word as it is written inside a text, with and without a space before it."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip() or word
        for written in (bare, f" {bare}"):
            sequences[tuple(ids_inside(tokenizer, written))] = None
    return [list(ids) for ids in sequences]


def ids_inside(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text that is not the first: those behind a border, where that stays a token of its own."""
    for border in BORDERS:
        before = tokenizer.encode(border, add_special_tokens=False)
        ids = tokenizer.encode(border + text, add_special_tokens=False)
        if before and ids[: len(before)] == before and len(ids) > len(before):
            return ids[len(before) :]
    return tokenizer.encode(text, add_special_tokens=False)
