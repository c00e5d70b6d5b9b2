"""Looked-up texts against the tokenizer's own decoder, token by token, for every kind of decoder."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.engine.output.detokenizer import TextStream
from jaxpaged.engine.output.plain_pieces import INCOMPLETE
from tests.engine.kinds_of_tokenizers import BYTES, TOKENIZERS, WORDS


@functools.cache
def tokenizers(name):
    """A tokenizer, and the same without look-ups."""
    fast, exact = TOKENIZERS[name](), TOKENIZERS[name]()
    exact.plain_pieces._any = False
    return fast, exact


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans(), spaces=st.booleans())
def test_looked_up_text_is_that_of_the_decoder_token_by_token(name, data, skip, spaces):
    fast, exact = tokenizers(name)
    ids = st.lists(st.integers(0, fast.vocab_size + 1), max_size=25)
    prompt, output = data.draw(ids), data.draw(ids)
    streams = [TextStream(tokenizer, prompt, skip, spaces) for tokenizer in (fast, exact)]
    assert [streams[0].push(i) for i in output] == [streams[1].push(i) for i in output]
    assert streams[0].flush() == streams[1].flush()


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_many_tokens_at_once_give_the_text_of_one_by_one(name, data):
    fast, _ = tokenizers(name)
    ids = st.lists(st.integers(0, fast.vocab_size + 1), max_size=12)
    prompt, steps = data.draw(ids), data.draw(st.lists(ids, max_size=5))
    whole, single = TextStream(fast, prompt, True, True), TextStream(fast, prompt, True, True)
    for step in steps:
        assert whole.push_all(step) == [single.push(i) for i in step]
    assert whole.flush() == single.flush()


@pytest.mark.parametrize("name", ["embedded", "byte-level", "Gemma"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_stream_with_look_ups_gives_the_text_of_the_whole(name, data):
    fast, _ = tokenizers(name)
    # Bytes without a beginning make the decoder change text that was given already: the others do not.
    limit = fast.vocab_size if name != "Gemma" else len(WORDS)
    ids = data.draw(st.lists(st.integers(0, limit - 1), max_size=40))
    stream = TextStream(fast, [], True, True)
    text = "".join(stream.push_all(ids)) + stream.flush()
    assert text.rstrip(INCOMPLETE) == fast.decode(ids).rstrip(INCOMPLETE)


def test_plain_is_what_stands_alone():
    pieces = tokenizers("Llama 2")[0].plain_pieces
    texts = {token: pieces[i] for i, token in enumerate([*WORDS, *BYTES])}
    assert texts["▁the"] == " the" and texts["▁"] == " " and texts["▁▁"] == "  " and texts["s"] == "s"
    assert not any(texts[token] for token in BYTES)
    assert texts[INCOMPLETE] == texts["a" + INCOMPLETE] == ""
    backend = pieces._backend
    assert [pieces[backend.token_to_id(token)] for token in ("<bos>", "▁▁▁", "<tool>")] == ["", "", ""]
    assert pieces[10_000] == ""


@pytest.mark.parametrize("name", ["unknown", "wordpiece", "no decoder"])
def test_a_decoder_that_is_not_known_has_no_plain_pieces(name):
    fast, _ = tokenizers(name)
    assert not any(fast.plain_pieces[i] for i in range(fast.vocab_size))


def test_most_of_an_ordinary_vocabulary_is_plain():
    fast, _ = tokenizers("embedded")
    assert sum(bool(fast.plain_pieces[i]) for i in range(fast.vocab_size)) > 0.9 * fast.vocab_size
