"""Texts and pairs as token ids within a length."""

import pytest
from tokenizers import processors

from jaxpaged.engine.input.tokenizer import Tokenizer
from jaxpaged.engine.pooling.prompts import check_keep, cut_ids, lengths_within, text_ids
from jaxpaged.errors import RequestError
from tests.engine.small_tokenizer import CONFIG, make_backend


@pytest.fixture(scope="module")
def tokenizer():
    """Adds <bos> before and <eos> after a text, and <end> between two."""
    backend = make_backend()
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>",
        pair="<bos> $A <end> $B <eos>",
        special_tokens=[("<bos>", 1), ("<eos>", 2), ("<end>", 4)],
    )
    return Tokenizer(backend, CONFIG)


def test_a_text_that_is_cut_keeps_its_special_tokens(tokenizer):
    text = "the cat sat on the mat"
    whole = tokenizer.encode(text)
    inner = whole[1:-1]
    assert text_ids(tokenizer, [text], None) == whole
    assert text_ids(tokenizer, [text], 5) == [1, *inner[:3], 2]
    assert text_ids(tokenizer, [text], 5, from_left=True) == [1, *inner[-3:], 2]
    assert text_ids(tokenizer, [text], 5, add_special_tokens=False) == inner[:5]


def test_a_pair_is_joined_as_the_tokenizer_says_and_the_longer_is_cut_first(tokenizer):
    first, second = (tokenizer.encode(text, False) for text in ("the cat", "the dog sat on the log"))
    assert text_ids(tokenizer, ["the cat", "the dog sat on the log"], None) == [1, *first, 4, *second, 2]
    assert text_ids(tokenizer, ["the cat", "the dog sat on the log"], 7) == [1, *first, 4, *second[:2], 2]


def test_a_text_without_tokens_is_refused(tokenizer):
    with pytest.raises(RequestError, match="no tokens"):
        text_ids(tokenizer, [""], None, add_special_tokens=False)
    with pytest.raises(RequestError, match="surrogate"):
        text_ids(tokenizer, ["\ud800"], None)


@pytest.mark.parametrize(
    ("lengths", "total", "expected"),
    [
        ([3, 4], 7, [3, 4]),
        ([3, 4], 6, [3, 3]),
        ([9, 2], 6, [4, 2]),
        ([9, 9], 5, [2, 3]),
        ([5], 3, [3]),
        ([5], -1, [0]),
        ([2, 1], 2, [1, 1]),
    ],
)
def test_lengths_are_cut_to_a_total(lengths, total, expected):
    assert lengths_within(lengths, total) == expected


def test_ids_are_cut_from_either_side():
    assert cut_ids([1, 2, 3], 2) == [1, 2] and cut_ids([1, 2, 3], 2, from_left=True) == [2, 3]
    assert cut_ids([1, 2, 3], None) == [1, 2, 3]


@pytest.mark.parametrize("keep", [0, -2, 9, True, 2.0])
def test_a_length_that_cannot_be_is_refused(keep):
    with pytest.raises(RequestError, match="truncate_prompt_tokens"):
        check_keep(keep, 8)
    assert (check_keep(-1, 8), check_keep(8, 8), check_keep(None, 8)) == (8, 8, None)
