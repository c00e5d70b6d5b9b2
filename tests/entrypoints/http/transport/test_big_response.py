"""Answers that are large."""

import msgspec

from jaxpaged.entrypoints.http.transport import sending
from jaxpaged.messages import Logprob


class Nested(msgspec.Struct):
    """What an answer may hold."""

    name: str
    items: list[int]
    best: Logprob | None = None


def test_an_answer_in_parts_is_the_one_encoded_at_once():
    candidates = [{i: Logprob(-0.5 * i, i, "a") for i in range(n)} for n in (0, 3, 200)]
    nested = [Nested("a", list(range(n)), Logprob(-1.0)) for n in (0, 300)]
    value = {
        "ids": list(range(1000)),
        "candidates": [None, *candidates] * 100,
        "nested": nested,
        "mixed": [1, nested[1]],
    }
    assert sending.encoded(value) == msgspec.json.encode(value)


def test_no_long_list_is_encoded_at_once(monkeypatch):
    longest, encode = [], msgspec.json.encode
    monkeypatch.setattr(
        msgspec.json,
        "encode",
        lambda value: longest.append(len(value) if isinstance(value, list) else 0) or encode(value),
    )
    sending.encoded({"nested": [Nested("a", list(range(1000)))], "candidates": [{7: Logprob(-1.0)}] * 1000})
    assert max(longest) == sending.ITEMS_AT_ONCE and len(longest) > 16


def test_a_large_answer_says_the_same_and_what_it_took_is_given_back_once_it_is_sent(serving, monkeypatch):
    body = {"prompt": "the cat", "max_tokens": 5, "temperature": 0, "prompt_logprobs": 2}
    events = []

    async def scenario(server):
        answer = await server.client.post("/v1/completions", body)
        events.append("answered")
        return answer.json | {"id": "", "created": 0}, len(answer.pieces)

    monkeypatch.setattr(sending, "return_freed_pages", lambda: events.append("given back"))
    small, num_pieces = serving(scenario)
    assert (num_pieces, events) == (1, ["answered"])
    monkeypatch.setattr(sending, "SMALL_RESPONSE", 0)
    monkeypatch.setattr(sending, "PIECE", 100)
    big, num_pieces = serving(scenario)
    assert big == small and num_pieces > 2
    assert events == ["answered", "given back", "answered"]
