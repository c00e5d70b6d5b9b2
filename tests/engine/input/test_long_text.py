"""Of a long text only the part that matters is tokenised, and what is kept of it are the tokens of the whole text."""

import hypothesis
import pytest
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers

from jaxpaged.engine.input import tokenizer as tokenizers_module
from jaxpaged.engine.input.tokenizer import (
    LONG_TEXT,
    PromptTooLongError,
    Tokenizer,
    Truncation,
    checked_length,
    enough_text,
    pieces,
)
from jaxpaged.errors import RequestError
from tests.engine.small_tokenizer import make_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyzü"


def word_piece():
    """Unknown words are one token each, however long, and white space is none."""
    vocabulary = ["[UNK]", "the", "cat", "##s", "sat", "a"]
    backend = Backend(models.WordPiece({each: i for i, each in enumerate(vocabulary)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokenizer(backend)


def sentence_piece():
    """White space is a letter of its own, as Gemma and Llama 2 have it, and words are not told apart before merging."""
    letters = ["<unk>", "▁", *LETTERS, "th", "the", "▁the", "ca", "cat", "▁cat"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("c", "a"), ("ca", "t"), ("▁", "cat")]
    backend = Backend(models.BPE({each: i for i, each in enumerate(letters)}, merges, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return Tokenizer(backend)


TOKENIZERS = {"byte-level": make_tokenizer(), "word-piece": word_piece(), "sentence-piece": sentence_piece()}
WORDS = st.sampled_from(["the", "cat", "sat", "on", "log", "the cats", "ü" * 7, "\n\n", "  ", "1234", "🙂", "cat. The"])


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(tokenizers_module, "PIECE", 48)
    monkeypatch.setattr(tokenizers_module, "REACH", 24)
    monkeypatch.setattr(tokenizers_module, "MARGIN", 8)


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("from_right", [True, False])
def test_what_is_kept_are_the_tokens_of_the_whole_text(kind, from_right, small_pieces):
    tokenizer = TOKENIZERS[kind]

    @hypothesis.given(st.lists(WORDS, min_size=1, max_size=150).map(" ".join), st.integers(1, 30))
    def check(text, keep):
        truncation = Truncation(keep, from_right)
        part = enough_text(tokenizer, text, keep, from_end=not from_right)
        assert text.startswith(part) if from_right else text.endswith(part)
        whole = tokenizer.encode(text, add_special_tokens=from_right)
        assert truncation.cut(tokenizer.encode(part, from_right), 99) == truncation.cut(whole, 99)

    check()


@hypothesis.given(
    st.text("a b", max_size=400) | st.text(max_size=300),
    st.integers(1, 40),
    st.booleans(),
    st.sampled_from(sorted(TOKENIZERS)),
)
def test_where_nothing_shows_a_place_to_cut_there_are_still_enough_tokens(text, num_tokens, from_end, kind):
    tokenizer = TOKENIZERS[kind]
    part = enough_text(tokenizer, text, num_tokens, from_end)
    assert text.endswith(part) if from_end else text.startswith(part)
    assert part == text or len(tokenizer.encode(part, add_special_tokens=False)) >= num_tokens


@hypothesis.given(st.text("a \n", max_size=500), st.booleans())
def test_pieces_are_the_whole_text_and_none_is_empty_or_long(text, from_end):
    cut = list(pieces(text, from_end))
    assert "".join(reversed(cut) if from_end else cut) == text
    assert all(0 < len(piece) <= 48 + 24 for piece in cut)


def test_only_a_text_that_is_certainly_too_long_is_refused():
    tokenizer = TOKENIZERS["byte-level"]
    for count in (1, 20, 40):
        checked_length(tokenizer, "the " * count, 40)
    with pytest.raises(PromptTooLongError, match="has more than 40 tokens: .* in the first .* of its 4000 char"):
        checked_length(tokenizer, "the " * 1000, 40)
    checked_length(TOKENIZERS["word-piece"], "x" * 100_000, 40)  # one token, that of all unknown words


@pytest.mark.parametrize("keep", [0, -2, True, "5", 1.5])
def test_what_is_no_length_is_refused(keep):
    with pytest.raises(RequestError, match="truncate_prompt_tokens is"):
        Truncation(keep).length(10)


def test_a_long_text_is_tokenised_where_the_library_lets_go_of_the_interpreters_lock():
    """It does for batches only."""
    tokenizer = make_tokenizer()
    text = "the cat sat " * 1000
    ids = tokenizer.backend.encode(text).ids

    class OnlyBatches:
        encode = None
        encode_batch_fast = staticmethod(tokenizer.backend.encode_batch_fast)

    assert len(text) > LONG_TEXT
    tokenizer.backend = OnlyBatches
    assert tokenizer.encode(text) == ids
    with pytest.raises(RequestError, match="half of a surrogate pair"):
        tokenizer.encode(text + "\ud800")
