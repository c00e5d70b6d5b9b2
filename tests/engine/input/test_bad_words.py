"""Words as the tokens of which a model would make them, inside a text."""

import pytest

from jaxpaged.engine.input.params_of_model import words_in_tokens
from tests.engine.input.test_long_text import TOKENIZERS


def tokens_of(kind, *words):
    tokenizer = TOKENIZERS[kind]
    return [[tokenizer.backend.id_to_token(i) for i in ids] for ids in words_in_tokens(tokenizer, words)]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("byte-level", [["cat"], ["Ġcat"]]),
        ("sentence-piece", [["cat"], ["▁cat"]]),
        ("word-piece", [["cat"]]),
    ],
)
@pytest.mark.parametrize("word", ["cat", " cat", "   cat"])
def test_a_word_is_banned_with_and_without_a_space_whatever_the_tokenizer_puts_before_it(kind, expected, word):
    """A tokenizer that puts a space before every text writes `cat` in `the "cat` without one."""
    assert tokens_of(kind, word) == expected


def test_words_of_several_tokens_and_words_that_are_the_same_become_each_sequence_once():
    assert tokens_of("sentence-piece", "cats", "cat", " cat") == [["cat", "s"], ["▁cat", "s"], ["cat"], ["▁cat"]]
    assert tokens_of("byte-level", ".") == [["."], ["Ġ", "."]]


def test_white_space_alone_is_a_word():
    assert tokens_of("byte-level", " ") == [["Ġ"], ["Ġ", "Ġ"]]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("word", ["\n", "(", "cat", "ü", "a b"])
def test_the_border_that_helps_to_find_a_words_tokens_is_none_of_them(kind, word):
    tokenizer = TOKENIZERS[kind]
    longest = max(len(tokenizer.encode(f" {word}", add_special_tokens=False)), 1)
    assert all(len(ids) <= longest for ids in words_in_tokens(tokenizer, [word]))
