"""Texts and pairs as token ids within a length."""

import pytest
from tokenizers import processors

from jaxpaged.engine.input.tokenizer import Tokenizer
from jaxpaged.engine.pooling.pooler import Pooler
from jaxpaged.engine.pooling.prompts import check_keep, cut_ids, lengths_within, pair_prompt, text_ids, with_types
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


TOLD, UNTOLD = (Pooler("classify", 1, "sigmoid", labels=("fits",), type_stride=stride) for stride in (500, 0))


def test_a_model_that_is_told_of_a_second_text_finds_its_ids_moved_up(tokenizer):
    ids, types = [1, 7, 2, 8, 2], [0, 0, 0, 1, 1]
    moved = with_types(ids, types, 5, TOLD)
    assert moved == [1, 7, 2, 508, 502] and TOLD.token_ids(moved) == ids
    assert with_types(ids[:4], types, 5, TOLD) == moved[:4]  # a prompt that was cut
    assert pair_prompt(tokenizer, UNTOLD, ("the cat", "the dog"), None)["token_type_ids"] is None
    assert UNTOLD.token_ids(ids) is ids


@pytest.mark.parametrize(
    ("types", "pooler", "message"),
    [
        ([0, 1], UNTOLD, "is told of no second text"),
        ([0, 1], None, "is told of no second text"),
        ([0], TOLD, "one for each of the 2 prompt_token_ids"),
        ([0, 2], TOLD, "a list of 0 and 1"),
        ([0, True], TOLD, "a list of 0 and 1"),
        ("01", TOLD, "a list of 0 and 1"),
    ],
)
def test_other_types_of_tokens_are_refused(types, pooler, message):
    with pytest.raises(RequestError, match=message):
        with_types([5, 6], types, 2, pooler)


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
