"""Tokens of log probabilities join to the text that the client gets, and offsets point into it: for every decoder."""

import pytest

from jaxpaged.entrypoints.http.openai.logprobs import top_by_text
from jaxpaged.messages import Logprob
from tests.engine.fake_engine import FakeExecutor, counting_model
from tests.engine.kinds_of_tokenizers import TOKENIZERS, WORDS
from tests.engine.small_tokenizer import make_tokenizer

PATH, CHATS = "/v1/completions", "/v1/chat/completions"
THE = WORDS.index("▁the")
COUNTS = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}


def counting(tokenizer):
    """A model that says the ids behind the prompt's last one, in order."""
    model = counting_model(tokenizer.vocab_size)
    return {"tokenizer": tokenizer, "executor": FakeExecutor(model, tokenizer.vocab_size)}


def joined(answer):
    """The text and the log probabilities of a stream, put together."""
    choices = [chunk["choices"][0] for chunk in answer.events[:-1]]
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    logprobs = {name: [value for part in parts for value in part[name]] for name in parts[0]}
    return "".join(choice["text"] for choice in choices), logprobs


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_offsets_point_at_the_tokens_in_the_text(ask, name, skip, echo, stream):
    tokenizer = TOKENIZERS[name]()
    prompt = [tokenizer.backend.token_to_id("<bos>") or 1, THE]
    body = {**COUNTS, "prompt": prompt, "logprobs": 2, "echo": echo, "stream": stream, "skip_special_tokens": skip}
    body["return_token_ids"] = True
    answer = ask(PATH, body, **counting(tokenizer))
    if stream:
        text, logprobs = joined(answer)
    else:
        text, logprobs = answer.json["choices"][0]["text"], answer.json["choices"][0]["logprobs"]
    tokens, offsets = logprobs["tokens"], logprobs["text_offset"]
    silent = {tokenizer.added_tokens[i] for i in tokenizer.special_ids} if skip else set()
    assert len(tokens) == 24 + 2 * echo
    assert "".join(token for token in tokens if token not in silent) == text
    for token, offset in zip(tokens, offsets):
        assert token in silent or text[offset : offset + len(token)] == token
    assert offsets == sorted(offsets)


def test_as_in_llama_2_a_word_inside_a_text_has_its_space(ask):
    """What was wrong: the text " fox hare" had the tokens "fox" and "hare", which were also those of other ids."""
    tokenizer = TOKENIZERS["Llama 2"]()
    spaced, bare = WORDS.index("▁cat"), WORDS.index("cat")
    ids = [spaced, bare]
    body = {"prompt": [THE, *ids], "echo": True, "logprobs": 1, "max_tokens": 0}
    choice = ask(PATH, body, **counting(tokenizer)).json["choices"][0]
    assert choice["text"] == "the catcat"
    assert choice["logprobs"]["tokens"] == ["the", " cat", "cat"] and choice["logprobs"]["text_offset"] == [0, 3, 7]


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("prompt", ["the cat", "the <turn> cat"])
def test_an_echoed_text_is_as_it_was_given_and_offsets_know_which_special_tokens_it_has(ask, prompt, skip):
    body = {**COUNTS, "prompt": prompt, "logprobs": 1, "echo": True, "skip_special_tokens": skip}
    choice = ask(PATH, body).json["choices"][0]
    assert choice["text"].startswith(prompt)
    tokens = list(zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]))
    assert tokens[0] == ("<bos>", 0)
    for token, offset in tokens[1:]:
        assert choice["text"][offset : offset + len(token)] == token or (skip and token.startswith("<"))
    [begin] = [offset for token, offset in tokens if token == " cat" and offset < len(prompt)]
    assert begin == prompt.index(" cat")


def test_tokens_shown_as_ids_have_the_offsets_of_their_texts(ask):
    body = {**COUNTS, "prompt": "the cat", "logprobs": 0}
    plain, as_ids = (
        ask(PATH, {**body, "return_tokens_as_token_ids": shown}).json["choices"][0]["logprobs"]
        for shown in (False, True)
    )
    assert plain["text_offset"] == as_ids["text_offset"] and as_ids["tokens"][0].startswith("token_id:")


def test_candidates_that_are_parts_of_characters_do_not_become_one():
    tokenizer = make_tokenizer()
    parts = tokenizer.encode("😀", add_special_tokens=False)[:3]
    candidates = {i: Logprob(-1.0 - place, place + 1, "") for place, i in enumerate(parts)}
    tops = top_by_text(tokenizer, candidates, as_ids=False)
    assert tops == {"": -1.0, "bytes:\\x9f": -2.0, "bytes:\\x98": -3.0}


def entries_of(answer):
    return answer.json["choices"][0]["logprobs"]["content"]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_chats_tokens_join_to_its_text_and_their_bytes_to_its_bytes(ask, name):
    tokenizer = TOKENIZERS[name]()
    body = {**COUNTS, "messages": [{"role": "user", "content": "the"}], "logprobs": True, "top_logprobs": 1}
    answer = ask(CHATS, body, **counting(tokenizer))
    silent = {tokenizer.added_tokens[i] for i in tokenizer.special_ids}
    entries = [entry for entry in entries_of(answer) if entry["token"] not in silent]
    text = answer.json["choices"][0]["message"]["content"]
    assert "".join(entry["token"] for entry in entries) == text
    assert all(entry["bytes"] == entry["top_logprobs"][0]["bytes"] for entry in entries)


def test_parts_of_a_character_have_bytes_in_chats_and_responses(serving):
    from tests.entrypoints.http.saying_model import saying

    text = "a😀é"

    async def scenario(server):
        chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 1}
        answer = await server.client.post(CHATS, chat)
        asked = {"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 1}
        response = await server.client.post("/v1/responses", asked)
        return entries_of(answer), response.json["output"][0]["content"][0]["logprobs"]

    size = len(make_tokenizer().encode(text, add_special_tokens=False))
    for entries in serving(scenario, **saying(text)):
        parts = [entry["bytes"] for entry in entries[:size]]
        assert all(parts) and bytes(byte for part in parts for byte in part) == text.encode()
        assert [entry["token"] for entry in entries[:size]] == ["a", "", "", "", "😀", "", "é"]
