"""Streams and answers whose client goes away, or is slow."""

import asyncio

import pytest

from tests.entrypoints.http.asgi_client import scope_of

LONG = {"prompt": "the cat", "max_tokens": 60, "ignore_eos": True}


def long_of(path):
    if path == "/v1/completions":
        return LONG
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 60, "ignore_eos": True}


async def nothing_is_left(server):
    """Whatever was aborted is gone from the engine too."""
    for _ in range(100):
        if not server.engine.engine.has_unfinished_requests() and not len(server.service.traffic):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("requests are left")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("leave_after", [1, 3])
@pytest.mark.parametrize("is_reading", [None, lambda: True])
def test_a_stream_whose_client_leaves_is_aborted(serving, path, leave_after, is_reading):
    body = {**long_of(path), "stream": True, "n": 2}

    async def scenario(server):
        server.engine.executor.longest_run = 1
        server.client.is_reading = is_reading
        answer = await server.client.post(path, body, leave_after=leave_after)
        await nothing_is_left(server)
        return answer, server.engine.aborted

    answer, aborted = serving(scenario)
    assert answer.status == 200 and b"[DONE]" not in answer.body
    assert len(aborted) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_token_is_aborted(serving, stream):
    async def scenario(server):
        server.engine.go_on.clear()
        answer = await server.client.post("/v1/completions", {**LONG, "stream": stream}, leave_after=0)
        server.engine.go_on.set()
        await nothing_is_left(server)
        return answer, server.engine.aborted

    answer, aborted = serving(scenario)
    assert answer.pieces == [] and len(aborted) == 1


def test_all_prompts_of_a_request_are_aborted_together(serving):
    async def scenario(server):
        server.engine.go_on.clear()
        await server.client.post("/v1/completions", {**LONG, "prompt": ["a", "b", "c"]}, leave_after=0)
        server.engine.go_on.set()
        await nothing_is_left(server)
        return server.engine.aborted

    aborted = serving(scenario)
    assert sorted(engine_id.split("-")[2] for engine_id in aborted) == ["0", "1", "2"]


def test_a_bad_prompt_among_good_ones_ends_them_all(serving):
    async def scenario(server):
        answer = await server.client.post("/v1/completions", {**LONG, "prompt": [[5], [6] * 80, [7]]})
        await nothing_is_left(server)
        return answer

    answer = serving(scenario)
    assert answer.status == 400 and answer.error["param"] == "prompt"


@pytest.mark.parametrize("interval", [0.0, 60.0])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("length", [1, 5])
def test_the_last_words_of_a_stream_go_out_together(serving, path, length, interval):
    async def scenario(server):
        server.engine.executor.longest_run = 1
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        return await server.client.post(path, {**long_of(path), "max_tokens": length, **usage})

    answer = serving(scenario, options={"sse_keep_alive_interval": interval})
    assert answer.pieces[-1].endswith(b"data: [DONE]\n\n") and answer.pieces[-1].count(b"data: ") >= 3
    assert b'"finish_reason":"length"' in answer.pieces[-1] and b'"usage"' in answer.pieces[-1]
    assert [event["usage"]["completion_tokens"] for event in answer.events[:-1] if "usage" in event] == [length]


def test_silence_is_filled_with_comments_where_the_operator_wants_it(serving):
    async def scenario(server):
        server.engine.executor.longest_run = 1
        asking = asyncio.ensure_future(server.client.post("/v1/completions", {**LONG, "stream": True}))
        while len(server.engine.executor.executed) < 3:
            await asyncio.sleep(0)
        server.engine.go_on.clear()
        await asyncio.sleep(0.08)
        server.engine.go_on.set()
        return await asking

    answer = serving(scenario, options={"sse_keep_alive_interval": 0.02})
    assert b": keep-alive\n\n" in answer.body and answer.events[-1] == "[DONE]"
    assert sum(len(event["choices"]) for event in answer.events[:-1]) == 60


def test_a_body_that_never_comes_is_not_waited_for_once_the_client_is_gone(serving):
    async def scenario(server):
        async def receive():
            return {"type": "http.disconnect"}

        sent = []
        scope = scope_of("POST", "/v1/completions", {"content_type": "application/json"})
        await server.client.app(scope, receive, lambda message: asyncio.sleep(0, sent.append(message)))
        return sent[0]["status"]

    assert serving(scenario) == 400


def test_many_streams_at_a_time_all_get_their_own_text(serving):
    async def scenario(server):
        def body(i):
            return {"prompt": [20 + i], "max_tokens": 8, "temperature": 0, "stream": True, "return_token_ids": True}

        answers = await asyncio.gather(*(server.client.post("/v1/completions", body(i)) for i in range(40)))
        return [[i for e in answer.events[:-1] for i in e["choices"][0]["token_ids"]] for answer in answers]

    assert serving(scenario) == [[21 + i + k for k in range(8)] for i in range(40)]


def test_the_request_id_can_be_chosen_and_is_given_back_on_request(serving):
    async def scenario(server):
        answer = await server.client.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, x_request_id="mine")
        stream = await server.client.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream": True, "request_id": "b"}
        )
        return answer, stream

    answer, stream = serving(scenario, options={"enable_request_id_headers": True})
    assert answer.json["id"] == "cmpl-mine" and answer.headers["x-request-id"] == "mine"
    assert stream.events[0]["id"] == "chatcmpl-b" and stream.headers["x-request-id"] == "b"
    answer, stream = serving(scenario)
    assert "x-request-id" not in answer.headers and "x-request-id" not in stream.headers


def test_requests_that_share_an_id_are_served_side_by_side(serving):
    async def scenario(server):
        body = {"prompt": "a", "max_tokens": 3}
        asking = [server.client.post("/v1/completions", body, x_request_id="same") for _ in range(3)]
        return await asyncio.gather(*asking)

    assert [(answer.status, answer.json["id"]) for answer in serving(scenario)] == [(200, "cmpl-same")] * 3
