"""Errors on this API's paths have its form, whoever made them, and every answer a `request-id`."""

import asyncio

import pytest

BODY = {"model": "fake", "max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}


def checked(answer, status, kind):
    """The message of an error, whose form is checked."""
    assert answer.status == status, answer.body
    assert set(answer.json) == {"type", "error", "request_id"} and answer.json["type"] == "error"
    assert answer.json["request_id"] == answer.headers["request-id"]
    assert int(answer.headers["content-length"]) == len(answer.body)
    assert answer.error["type"] == kind and set(answer.error) == {"type", "message"}
    return answer.error["message"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches"])
def test_a_wrong_key_is_an_authentication_error(ask, path):
    answer = ask(path, BODY, keys=("k",), headers={"x_api_key": "wrong"})
    assert "x-api-key" in checked(answer, 401, "authentication_error")
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("headers", [{"x_api_key": "k"}, {"authorization": "Bearer k"}])
def test_either_kind_of_key_is_accepted_and_so_is_any_version(ask, headers):
    headers = {**headers, "anthropic_version": "2023-06-01", "anthropic_beta": "tools-2024-04-04"}
    assert ask("/v1/messages", BODY, keys=("k",), headers=headers).status == 200


def test_unknown_models_paths_and_methods_have_the_form(ask):
    assert "'fake'" in checked(ask("/v1/messages", {**BODY, "model": "claude"}), 404, "not_found_error")
    checked(ask("/v1/messages/count_tokens", {**BODY, "model": "claude"}), 404, "not_found_error")
    checked(ask("/v1/messages/batches", BODY), 404, "not_found_error")
    checked(ask("/v1/messages"), 405, "invalid_request_error")


def test_a_body_over_the_limit_is_too_large(ask):
    answer = ask("/v1/messages", {**BODY, "system": "x" * 2000}, options={"max_body_bytes": 1000})
    assert "1000" in checked(answer, 413, "request_too_large")


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_a_rate_limit(serving, stream):
    async def scenario(server):
        server.engine.go_on.clear()
        waiting = asyncio.ensure_future(server.client.post("/v1/messages", BODY))
        await asyncio.sleep(0.02)
        refused = await server.client.post("/v1/messages", {**BODY, "stream": stream})
        server.engine.go_on.set()
        await waiting
        return refused

    refused = serving(scenario, options={"max_num_queued_reqs": 0}, max_num_seqs=1)
    checked(refused, 429, "rate_limit_error")
    assert refused.headers["retry-after"] == "1"


def test_a_draining_server_is_overloaded(serving):
    async def scenario(server):
        server.service.traffic.draining = True
        return await server.client.post("/v1/messages", BODY)

    checked(serving(scenario), 503, "overloaded_error")


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"model": NaN}'])
def test_malformed_json_is_an_invalid_request(ask, body):
    checked(ask("/v1/messages", body), 400, "invalid_request_error")


def test_a_dead_engine_says_nothing_of_itself(serving):
    async def scenario(server):
        server.engine.is_dead = True
        return await server.client.post("/v1/messages", BODY), await server.client.post(
            "/v1/messages", {**BODY, "stream": True}
        )

    for answer in serving(scenario):
        message = checked(answer, 500, "api_error")
        assert "0x" not in message and "/srv" not in message


def test_a_thread_is_refused_in_the_way_that_makes_clients_go_on_without(ask):
    answer = ask("/v1/messages", {**BODY, "thread": {"type": "create"}})
    assert answer.status == 400 and answer.error["details"] == {"error_code": "thread_unsupported_request"}


def test_good_answers_have_a_request_id_and_other_paths_keep_their_errors(ask):
    for stream in (False, True):
        answer = ask("/v1/messages", {**BODY, "stream": stream})
        assert answer.status == 200 and answer.headers["request-id"].startswith("req_")
    for path in ("/v1/messages_of_others", "/v1/completions"):
        answer = ask(path, {"prompt": 5})
        assert answer.error["code"] == answer.status and "request-id" not in answer.headers
