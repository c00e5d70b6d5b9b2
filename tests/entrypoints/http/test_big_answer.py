"""Answers that are large."""

from jaxpaged.entrypoints.http.transport import big_answer


def test_a_large_answer_says_the_same_and_what_it_took_is_given_back_once_it_is_sent(serving, monkeypatch):
    body = {"prompt": "the cat", "max_tokens": 5, "temperature": 0, "prompt_logprobs": 2}
    events = []

    async def scenario(server):
        answer = await server.client.post("/v1/completions", body)
        events.append("answered")
        return answer.json | {"id": "", "created": 0}, len(answer.pieces)

    monkeypatch.setattr(big_answer, "return_freed_pages", lambda: events.append("given back"))
    small, num_pieces = serving(scenario)
    assert (num_pieces, events) == (1, ["answered"])
    monkeypatch.setattr(big_answer, "SMALL_ANSWER", 0)
    monkeypatch.setattr(big_answer, "PIECE", 100)
    big, num_pieces = serving(scenario)
    assert big == small and num_pieces > 2
    assert events == ["answered", "given back", "answered"]
