"""Texts of single tokens against the text of the sequence, for every kind of decoder."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.engine.output.detokenizer import TextStream, make_detokenizer
from jaxpaged.engine.output.logprobs import SequenceLogprobs, prompt_logprob_dicts
from jaxpaged.engine.output.plain_pieces import INCOMPLETE
from jaxpaged.engine.output.token_texts import TokenTexts, texts_of
from jaxpaged.messages import TokenLogprobs
from jaxpaged.sampling_params import SamplingParams
from tests.engine.kinds_of_tokenizers import TOKENIZERS, WORDS
from tests.engine.small_tokenizer import make_tokenizer

EVERY_KIND = pytest.mark.parametrize("name", TOKENIZERS)


@functools.cache
def tokenizer_of(name):
    return TOKENIZERS[name]()


def params_of(data):
    skip, spaces = data.draw(st.booleans()), data.draw(st.booleans())
    return SamplingParams(skip_special_tokens=skip, spaces_between_special_tokens=spaces, logprobs=0)


def ids_of(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


@EVERY_KIND
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_texts_of_tokens_join_to_the_text(name, data):
    tokenizer, params = tokenizer_of(name), params_of(data)
    ids = st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=25)
    prompt, output = data.draw(ids), data.draw(ids)
    detokenizer = make_detokenizer(tokenizer, prompt, params)
    detokenizer.push(output, False)
    detokenizer.finish()
    logprobs = SequenceLogprobs(tokenizer, prompt, params)
    for token_id in output:
        logprobs.push(TokenLogprobs([token_id], [-1.0], 1))
    logprobs.finish()
    silent = tokenizer.special_ids if params.skip_special_tokens else ()
    texts = [(i, position[i].decoded_token) for i, position in zip(output, logprobs.positions, strict=True)]
    if any(i not in silent for i in output):
        assert "".join(text for i, text in texts if i not in silent) == detokenizer.text
    assert [text for i, text in texts if i in silent] == [tokenizer.added_tokens[i] for i in output if i in silent]


@EVERY_KIND
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_a_candidate_has_the_text_that_it_would_add(name, data):
    tokenizer, params = tokenizer_of(name), params_of(data)
    ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12)
    prompt, output, others = data.draw(ids), data.draw(ids), data.draw(ids)
    options = params.skip_special_tokens, params.spaces_between_special_tokens
    texts = TokenTexts(tokenizer, prompt, *options)
    for place, token_id in enumerate(output):
        for other in [token_id, *others]:
            stream = TextStream(tokenizer, prompt, *options)
            for before in output[:place]:
                stream.push(before)
            if not texts.is_silent(other):
                assert texts.of(other) == stream.push(other)
        texts.advance(token_id)


@pytest.mark.parametrize("name", ["Llama 2", "Gemma", "metaspace"])
def test_words_with_and_without_a_space_differ_but_for_the_first_of_a_text(name):
    tokenizer = tokenizer_of(name)
    the, spaced, bare = (WORDS.index(word) for word in ("▁the", "▁cat", "cat"))
    assert texts_of(tokenizer, [the, spaced, bare, spaced])[1:] == [" cat", "cat", " cat"]
    texts = TokenTexts(tokenizer, [the])
    assert (texts.of(spaced), texts.of(bare)) == (" cat", "cat")


def test_word_pieces_join_words():
    ids = [WORDS.index(word) for word in ("cat", "##cat", "cat", ".")]
    assert texts_of(tokenizer_of("wordpiece"), ids) == ["cat", "cat", " cat", "."]


def test_tokens_of_a_prompt_have_their_text_too():
    tokenizer = tokenizer_of("Llama 2")
    ids = [tokenizer.backend.token_to_id("<bos>"), *(WORDS.index(word) for word in ("▁the", "▁cat", "s"))]
    lines = [TokenLogprobs([i, WORDS.index("cat"), WORDS.index("▁cat")], [-1.0, -2.0, -3.0], 1) for i in ids[1:]]
    dicts = prompt_logprob_dicts(lines, tokenizer, ids, SamplingParams(prompt_logprobs=2))
    assert [position[i].decoded_token for position, i in zip(dicts[1:], ids[1:])] == ["the", " cat", "s"]
    assert {each.decoded_token for each in dicts[3].values()} == {"s", "cat", " cat"}
    assert texts_of(tokenizer, ids) == ["<bos>", "the", " cat", "s"]


def test_a_character_in_parts_is_the_text_of_its_last_token():
    tokenizer = make_tokenizer()
    ids = ids_of(tokenizer, "a😀b")
    assert texts_of(tokenizer, ids) == ["a", "", "", "", "😀", "b"]
    broken = [ids_of(tokenizer, "😀")[0], *ids_of(tokenizer, "é")]
    assert texts_of(tokenizer, broken)[-1] == f"{INCOMPLETE}é"


def test_text_that_waits_for_a_character_is_the_last_tokens_in_the_end():
    """A byte-level token may be a whole character and the beginning of another one."""
    tokenizer = make_tokenizer()
    space, face = ids_of(tokenizer, " ")[0], ids_of(tokenizer, "😀")[0]
    logprobs = SequenceLogprobs(tokenizer, [], SamplingParams(logprobs=0))
    logprobs._texts._stream.push = lambda token_id: ""  # as if the two were one token
    logprobs._texts._stream._held = [space, face]
    for token_id in (face, tokenizer.eos_token_id):
        logprobs.push(TokenLogprobs([token_id], [-1.0], 1))
    logprobs.finish()
    assert [next(iter(each.values())).decoded_token for each in logprobs.positions] == [" ", "<eos>"]


# ---- bytes


@EVERY_KIND
@settings(max_examples=50, deadline=None)
@given(text=st.text(alphabet="ab é€😀\n", max_size=12))
def test_bytes_of_tokens_join_to_the_bytes_of_the_text(name, text):
    tokenizer = tokenizer_of(name)
    ids = ids_of(tokenizer, text)
    texts = texts_of(tokenizer, ids)
    joined = b"".join(tokenizer.bytes_of(i, each) for i, each in zip(ids, texts))
    decoded = tokenizer.decode(ids)
    if INCOMPLETE not in decoded:
        assert joined == decoded.encode()


def test_parts_of_a_character_have_their_own_bytes():
    tokenizer = make_tokenizer()
    ids = ids_of(tokenizer, "😀")
    assert [tokenizer.bytes_of(i, text) for i, text in zip(ids, ["", "", "", "😀"], strict=True)] == [
        b"\xf0",
        b"\x9f",
        b"\x98",
        b"\x80",
    ]
    llama = tokenizer_of("Llama 2")
    assert llama.bytes_of(llama.backend.token_to_id("<0xE2>"), "") == b"\xe2"
    assert llama.bytes_of(WORDS.index("<0xyz>"), "<0xyz>") == b"<0xyz>"
    assert llama.bytes_of(WORDS.index("▁cat"), "cat") == b"cat"
    assert llama.bytes_of(llama.backend.token_to_id("<bos>"), "<bos>") == b"<bos>"
    assert tokenizer.bytes_of(tokenizer.eos_token_id, "<eos>") == b"<eos>"
