"""`/inference/v1/generate`: the tokens that completions have, in vLLM's shapes, and errors that name a parameter."""

import pytest

from tests.engine.small_tokenizer import make_tokenizer

TOKENIZER = make_tokenizer()
IDS = TOKENIZER.encode("the cat sat")
PATH = "/inference/v1/generate"
PARAMS = {"max_tokens": 4, "temperature": 0, "logprobs": 2}
BODY = {"token_ids": IDS, "sampling_params": PARAMS}


def ask_completion(ask, **changes):
    body = {"prompt": IDS, **PARAMS, "return_token_ids": True, "return_tokens_as_token_ids": True, **changes}
    return ask("/v1/completions", body).json


def test_tokens_are_those_of_a_completion_and_nothing_is_text(ask):
    answer, expected = ask(PATH, BODY).json, ask_completion(ask)
    [choice], [other] = answer["choices"], expected["choices"]
    assert choice["token_ids"] == other["token_ids"] and choice["finish_reason"] == "length"
    content = choice["logprobs"]["content"]
    assert [each["token"] for each in content] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert [each["logprob"] for each in content] == other["logprobs"]["token_logprobs"]
    assert all(len(each["top_logprobs"]) == 2 for each in content)
    assert answer["id"] == answer["request_id"] and answer["id"].startswith("generate-tokens-")
    assert answer["usage"] == expected["usage"] and answer["model"] == "fake"
    assert not any("text" in each for each in answer["choices"])


def test_a_stream_has_the_same_tokens_and_its_usage(ask):
    whole = ask(PATH, BODY).json["choices"][0]
    answer = ask(PATH, {**BODY, "stream": True, "stream_options": {"include_usage": True}, "request_id": "mine"})
    *chunks, usage, done = answer.events
    pieces = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [i for piece in pieces for i in piece["token_ids"]] == whole["token_ids"]
    assert [e for piece in pieces for e in piece["logprobs"]["content"]] == whole["logprobs"]["content"]
    assert pieces[-1]["finish_reason"] == "length" and done == "[DONE]"
    assert usage["usage"]["completion_tokens"] == 4 and usage["choices"] == []
    assert {chunk["request_id"] for chunk in chunks} == {"generate-tokens-mine"}


def test_what_trl_sends_gives_all_sequences(ask):
    """TRL asks for the last output only (`output_kind` 2), and for the drawn token alone (`logprobs` 0)."""
    params = {"n": 2, "max_tokens": 3, "temperature": 1.0, "top_k": 0, "logprobs": 0, "output_kind": 2, "seed": 3}
    body = {"request_id": "trl-1", "model": "fake", "token_ids": IDS, "features": None, "sampling_params": params}
    choices = ask(PATH, body).json["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert all(len(entry["top_logprobs"]) == 1 for choice in choices for entry in choice["logprobs"]["content"])


def test_without_a_limit_it_goes_on_to_the_end_of_the_context_and_defaults_do_not_apply(ask):
    answer = ask(PATH, {"token_ids": IDS, "sampling_params": {"temperature": 0, "ignore_eos": True}}).json
    assert answer["usage"]["total_tokens"] == 64 and answer["choices"][0]["logprobs"] is None


def test_stop_strings_end_it_though_nothing_is_shown_as_text(ask):
    ids = ask(PATH, BODY).json["choices"][0]["token_ids"]
    stop = TOKENIZER.decode(ids[1:2]).strip()
    choice = ask(PATH, {**BODY, "sampling_params": {**PARAMS, "stop": [stop]}}).json["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["token_ids"] == ids[:2]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [10**9]}, "token_ids"),
        ({"token_ids": "text"}, "token_ids"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"temperature": "hot"}}, "sampling_params.temperature"),
        ({"sampling_params": {"tempreature": 1}}, "tempreature"),
        ({"sampling_params": {"max_tokens": True}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"stop": [7]}}, "sampling_params.stop"),
        ({"sampling_params": {"n": 10**9}}, "sampling_params.n"),
        ({"sampling_params": {"detokenize": 3}}, "sampling_params.detokenize"),
        ({"sampling_params": {"bad_words_token_ids": [[1]]}}, "sampling_params.bad_words_token_ids"),
        ({"sampling_params": {"structured_outputs": {"regex": "("}}}, "sampling_params.structured_outputs"),
        ({"sampling_params": {"structured_outputs": 3}}, "sampling_params.structured_outputs"),
        ({"sampling_params": {"logprobs": 99}}, "sampling_params.logprobs"),
        ({"sampling_params": None}, "sampling_params"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "sampling_params": {"prompt_logprobs": 0}}, "sampling_params.prompt_logprobs"),
        ({"model": "another"}, "model"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(ask, change, field):
    answer = ask(PATH, {**BODY, **change})
    assert answer.status in (400, 404), answer.body
    assert answer.error["param"] == field, answer.error
