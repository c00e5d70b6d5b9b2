"""A forced call that `max_tokens` cuts off is a call with what it has of its arguments, or nothing: never a text."""

import json

import pytest

from tests.entrypoints.http.saying_model import TOKENIZER, saying

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "parameters": SCHEMA}
LIST = '[{"name": "weather", "parameters": {"city": "Rome"}}, {"name": "weather", "parameters": {"city": "Bonn"}}]'
NAMED = '{"city": "Rome"}'
CHAT = {"messages": [{"role": "user", "content": "the cat"}], "tools": [{"type": "function", "function": FUNCTION}]}
ASKED = {
    "/v1/chat/completions": (CHAT, "required", {"type": "function", "function": {"name": "weather"}}),
    "/v1/messages": (
        {"model": "fake", "messages": CHAT["messages"], "tools": [{"name": "weather", "input_schema": SCHEMA}]},
        {"type": "any"},
        {"type": "tool", "name": "weather"},
    ),
    "/v1/responses": (
        {"input": "the cat", "store": False, "tools": [{"type": "function", **FUNCTION}]},
        "required",
        {"type": "function", "name": "weather"},
    ),
}


def read(path, body):
    """(the texts of an answer, the arguments of its calls, whether it says that it was cut)."""
    if path == "/v1/chat/completions":
        [choice] = body["choices"]
        calls = [call["function"]["arguments"] for call in choice["message"].get("tool_calls", ())]
        return [choice["message"]["content"] or ""], calls, choice["finish_reason"] == "length"
    if path == "/v1/messages":
        texts = [block["text"] for block in body["content"] if block["type"] == "text"]
        calls = [json.dumps(block["input"]) for block in body["content"] if block["type"] == "tool_use"]
        return texts, calls, body["stop_reason"] == "max_tokens"
    texts = [part["text"] for item in body["output"] if item["type"] == "message" for part in item["content"]]
    calls = [item["arguments"] for item in body["output"] if item["type"] == "function_call"]
    return texts, calls, body["status"] == "incomplete"


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("named", [False, True])
def test_what_is_cut_of_a_forced_call_is_no_text(ask, path, named):
    body, required, one = ASKED[path]
    says = NAMED if named else LIST
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    length = len(TOKENIZER.encode(says, add_special_tokens=False))
    for num_tokens in (1, 2, length // 4, length // 2, length - 2):
        answer = ask(path, {**body, "tool_choice": one if named else required, limit: num_tokens}, **saying(says))
        assert answer.status == 200, answer.body
        texts, calls, is_cut = read(path, answer.json)
        assert is_cut and not any(texts), (num_tokens, answer.json)
        assert all(call == "{}" or says.find(call) >= 0 for call in calls)


def test_a_stream_that_is_cut_has_no_text_either(ask):
    body = {**CHAT, "tool_choice": "required", "stream": True}
    for num_tokens in (1, 5, len(TOKENIZER.encode(LIST, add_special_tokens=False)) // 2 + 4):
        answer = ask("/v1/chat/completions", {**body, "max_tokens": num_tokens}, **saying(LIST))
        deltas = [choice["delta"] for event in answer.events[:-1] for choice in event["choices"]]
        assert not any(delta.get("content") for delta in deltas)
