"""Lines break at words, however the text comes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.entrypoints.terminal import WordWrap, fitted, width_of


def wrapped(pieces, columns):
    written = []
    wrap = WordWrap(written.append, columns)
    for piece in pieces:
        wrap.write(piece)
    wrap.end()
    return "".join(written)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("one two three", "one two\nthree"),
        ("exactly10! more", "exactly10!\nmore"),
        ("a\n\n  b c", "a\n\n  b c"),
        ("don\u2019t break here", "don\u2019t\nbreak here"),
        ("abcdefghijklmno p", "abcdefghijklmno p"),
        ("\u4f60\u597d\u4f60\u597d\u4f60\u597d", "\u4f60\u597d\u4f60\u597d\u4f60\n\u597d"),
        ("tail  ", "tail"),
        ("word abcdefghijklmno", "word\nabcdefghijklmno"),
        ("a\tb", f"a{8 * ' '}b"),
        ("", ""),
    ],
)
def test_a_line_ends_before_the_word_that_does_not_fit(text, shown):
    assert wrapped([text], 10) == shown
    assert wrapped(list(text), 10) == shown


@given(st.lists(st.text(alphabet="ab \n\u4f60", max_size=9), max_size=12), st.integers(2, 12))
def test_pieces_make_no_difference_and_no_word_is_lost(pieces, columns):
    text = "".join(pieces)
    shown = wrapped(pieces, columns)
    assert shown == wrapped([text], columns)
    assert "".join(shown.split()) == "".join(text.split())
    assert shown.count("\n") >= text.count("\n")
    longest = max((width_of(word) for word in text.split()), default=0)
    if longest <= columns and "\u4f60" not in text and "  " not in text:
        assert all(width_of(line) <= columns for line in shown.split("\n"))


def test_without_a_terminal_nothing_changes():
    assert wrapped(["a  ", "very long ", "line  "], None) == "a  very long line  "


def test_fitted_lines_keep_their_second_column():
    assert fitted("/set      sets a parameter of sampling\nshort", 24) == (
        "/set      sets a\n          parameter of\n          sampling\nshort"
    )
    assert fitted("  plain words that are long", 12) == "  plain\n  words that\n  are long"
