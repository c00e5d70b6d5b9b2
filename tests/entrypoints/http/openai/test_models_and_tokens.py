"""`/v1/models`, `/tokenize` and `/detokenize`."""

import pytest

from tests.engine.small_tokenizer import make_tokenizer

TOKENIZER = make_tokenizer()


def test_every_served_name_has_a_card(ask):
    cards = ask("/v1/models", names=("mine", "org/alias")).json
    assert cards["object"] == "list" and [card["id"] for card in cards["data"]] == ["mine", "org/alias"]
    for card in cards["data"]:
        assert card["object"] == "model" and card["root"] == "mine" and card["parent"] is None
        assert card["max_model_len"] == 64 and card["permission"][0]["allow_sampling"] is True


def test_a_card_can_be_asked_for_by_name_even_with_a_slash(ask):
    assert ask("/v1/models/org/alias", names=("mine", "org/alias")).json["id"] == "org/alias"
    assert ask("/v1/models/other", names=("mine",)).status == 404


def test_a_served_name_is_the_one_in_the_answer(ask):
    body = {"prompt": "a", "model": "second", "max_tokens": 1}
    assert ask("/v1/completions", body, names=("first", "second")).json["model"] == "second"
    assert ask("/v1/completions", body | {"model": None}, names=("first", "second")).json["model"] == "first"


def test_a_model_in_a_folder_is_called_like_the_folder_but_its_path_is_understood(ask):
    settings = {"names": None, "model": "/srv/models/llama-tiny"}
    assert [card["id"] for card in ask("/v1/models", **settings).json["data"]] == ["llama-tiny"]
    answer = ask("/v1/completions", {"prompt": "a", "model": "/srv/models/llama-tiny", "max_tokens": 1}, **settings)
    assert answer.json["model"] == "llama-tiny"


@pytest.mark.parametrize("special", [None, True, False])
def test_texts_are_tokenised_with_special_tokens_unless_told_otherwise(ask, special):
    body = {"prompt": "the cat", "add_special_tokens": special, "return_token_strs": True}
    answer = ask("/tokenize", body).json
    expected = TOKENIZER.encode("the cat", add_special_tokens=special is not False)
    assert answer["tokens"] == expected and answer["count"] == len(expected) and answer["max_model_len"] == 64
    assert answer["token_strs"] == [TOKENIZER.backend.id_to_token(i) for i in expected]


def test_conversations_are_tokenised_through_the_template_without_more_special_tokens(ask):
    text = "<bos><turn>user\nhi<end>\n<turn>assistant\n"
    messages = [{"role": "user", "content": "hi"}]
    plain = ask("/tokenize", {"messages": messages}).json
    assert plain["tokens"] == TOKENIZER.encode(text, add_special_tokens=False) and plain["token_strs"] is None
    special = ask("/tokenize", {"messages": messages, "add_special_tokens": True}).json
    assert special["tokens"] == TOKENIZER.encode(text, add_special_tokens=True)


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}])
def test_either_a_text_or_a_conversation_is_needed(ask, body):
    assert ask("/tokenize", body).status == 400


def test_tokens_become_text_again(ask):
    ids = TOKENIZER.encode("the cat sat")
    assert ask("/detokenize", {"tokens": ids}).json == {"prompt": "<bos>the cat sat"}
    assert ask("/detokenize", {"tokens": []}).json == {"prompt": ""}


@pytest.mark.parametrize("token_id", [-1, 10**6, 2**70])
def test_ids_outside_the_vocabulary_have_no_text(ask, token_id):
    answer = ask("/detokenize", {"tokens": [5, token_id]})
    assert answer.status == 400 and answer.error["param"] == "tokens" and str(token_id) in answer.error["message"]
