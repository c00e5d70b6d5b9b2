"""What clients see when something goes wrong: statuses, the error object, and nothing of the server's insides."""

import asyncio

import pytest

from jaxpaged.entrypoints.http.errors import as_http_error, error_body, error_response
from jaxpaged.errors import EngineError, RequestError, UsageError
from jaxpaged.serving.errors import MAX_MESSAGE_LENGTH, scrubbed

LONG = "the cat sat " * 50_000
COMPLETION = {"prompt": "the cat", "max_tokens": 2}


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({"prompt": "a", "max_tokens": "five"}, "max_tokens"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": [[1, "x"]]}, "prompt[0][1]"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": "a", "temperature": 2.5}, "temperature"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "top_p": 1.5}, "top_p"),
        ({"prompt": "a", "top_k": -2}, "top_k"),
        ({"prompt": "a", "min_p": 2}, "min_p"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": 16385}, "n"),
        ({"prompt": ["a"] * 100, "n": 1000}, "n"),
        ({"prompt": "a", "n": 2, "temperature": 0}, "n"),
        ({"prompt": "a", "seed": 2**64}, "seed"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "stop": list("abcde")}, "stop"),
        ({"prompt": "a", "stop": [1]}, "stop[0]"),
        ({"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids"),
        ({"prompt": "a", "bad_words": [""]}, "bad_words"),
        ({"prompt": "a", "min_tokens": 20}, "min_tokens"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": -2}, "logprobs"),
        ({"prompt": "a", "logprobs": "many"}, "logprobs"),
        ({"prompt": "a", "prompt_logprobs": -2}, "prompt_logprobs"),
        ({"prompt": "a", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"5000": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"5": "much"}}, "logit_bias[...]"),
        ({"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids"),
        ({"prompt": "a", "presence_penalty": 3}, "presence_penalty"),
        ({"prompt": "a", "frequency_penalty": -3}, "frequency_penalty"),
        ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
        ({"prompt": "a", "repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"prompt": "a", "repetition_penalty": 1e300}, "repetition_penalty"),
        ({"prompt": "a", "priority": 1}, "priority"),
        ({"prompt": "a", "cache_salt": "a/b"}, "cache_salt"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"prompt": "a", "truncation_side": "middle"}, "truncation_side"),
        ({"prompt": "a", "request_id": "no spaces"}, "request_id"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a", "stream_interval": 0}, "stream_interval"),
        ({"prompt": "a", "suffix": "end"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "vllm_xargs": {"a": 2**70}}, "vllm_xargs"),
        ({"prompt": "a", "use_beam_search": "wide"}, "use_beam_search"),
        ({"prompt": "a", "guided_json": 5}, "guided_json"),
        ({"prompt": "a", "structured_outputs": {"regex": "(a"}}, "structured_outputs"),
        ({"prompt": "a", "structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"prompt": "a", "structured_outputs": {"yaml": "a"}}, "structured_outputs"),
        ({"prompt": "a", "structured_outputs": {"regex": 5}}, "structured_outputs"),
        ({"prompt": "a", "structured_outputs": "a"}, "structured_outputs"),
        ({"prompt": "a", "kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"prompt": "a", "kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
        ({"prompt": ["a", "b"], "kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
        ({"prompt": "a", "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"prompt": "a", "response_format": {"type": "yaml"}}, "response_format.type"),
        ({"prompt": "a", "response_format": {}}, "response_format.type"),
    ],
)
def test_every_invalid_field_gives_400_with_its_name(ask, body, parameter):
    answer = ask("/v1/completions", body)
    assert (answer.status, answer.error["param"]) == (400, parameter), answer.body
    assert answer.error["type"] == "BadRequestError" and answer.error["code"] == 400
    assert parameter.partition("[")[0].partition(".")[0] in answer.error["message"]


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(ask):
    answer = ask("/v1/completions", {"prompt": [7] * 80})
    assert answer.status == 400 and answer.error["param"] == "prompt"
    assert "80" in answer.error["message"] and "64" in answer.error["message"]


def test_a_conversation_that_is_too_long_names_the_messages(ask):
    answer = ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 80}]})
    assert answer.status == 400 and answer.error["param"] == "messages"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"prompt": LONG}, 400),
        ("/v1/completions", {"prompt": LONG, "truncate_prompt_tokens": 5, "max_tokens": 2}, 200),
        ("/v1/completions", {"prompt": LONG, "truncate_prompt_tokens": -1, "truncation_side": "right"}, 200),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}], "truncate_prompt_tokens": 9}, 200),
        ("/v1/messages", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 2}, 400),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": LONG}]}, 400),
        ("/v1/responses", {"input": LONG, "store": False}, 400),
        ("/v1/responses", {"input": LONG, "store": False, "truncation": "auto"}, 400),
        ("/tokenize", {"prompt": LONG}, 400),
    ],
)
def test_of_a_long_text_no_more_is_tokenised_than_matters(serving, path, body, status):
    """Before, with truncate_prompt_tokens all of it was, with the interpreter's lock held."""
    tokenised = []

    async def scenario(server):
        tokenizer = server.engine.input_processor.tokenizer
        encoding = tokenizer.encoding
        tokenizer.encoding = lambda text, special=True: tokenised.append(len(text)) or encoding(text, special)
        return await server.client.post(path, body)

    answer = serving(scenario)
    assert answer.status == status, answer.body
    assert sum(tokenised) < len(LONG) / 10
    assert status == 200 or "characters. Shorten it" in answer.body.decode()


def test_ids_that_can_never_fit_are_refused_before_they_are_looked_at(serving):
    async def scenario(server):
        server.engine.input_processor.parse = None
        return await server.client.post("/v1/completions", {"prompt": [7] * 100_000})

    answer = serving(scenario)
    assert answer.status == 400 and "100000" in answer.error["message"] and answer.error["param"] == "prompt"


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"prompt": "a",}', b"\xff\xfe", b'{"prompt": "\\ud800"}', b'{"prompt": NaN}', b"[1]", b"3"]
)
def test_malformed_json_gives_400(ask, body):
    answer = ask("/v1/completions", body)
    assert answer.status == 400 and answer.error["code"] == 400


@pytest.mark.parametrize("depth", [100, 20_000])  # of 100,000 it says that it is too much to decode: 413
def test_json_that_is_nested_deeply_gives_400(ask, depth):
    tool = b'{"type":"function","function":{"name":"f","parameters":' + b'{"a":' * depth + b"1" + b"}" * depth + b"}}"
    body = b'{"messages":[{"role":"user","content":"a"}],"tools":[' + tool + b"]}"
    answer = ask("/v1/chat/completions", body)
    assert answer.status == 400 and "nested" in answer.error["message"]


@pytest.mark.parametrize("media_type", ["text/plain", "", "application/x-www-form-urlencoded"])
def test_another_media_type_gives_400(ask, media_type):
    assert ask("/v1/completions", COMPLETION, headers={"content_type": media_type}).status == 400


def test_parameters_of_the_media_type_are_fine(ask):
    answer = ask("/v1/completions", COMPLETION, headers={"content_type": "Application/JSON; charset=utf-8"})
    assert answer.status == 200


@pytest.mark.parametrize("headers", [{}, {"content_length": "5000"}])
def test_a_body_over_the_limit_gives_413(ask, headers):
    body = {"prompt": "x" * 5000}
    answer = ask("/v1/completions", body, options={"max_body_bytes": 1000}, headers=headers)
    assert answer.status == 413 and "1000" in answer.error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_an_unknown_model_gives_404_with_the_known_names(ask, path):
    prompt = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
        "/detokenize": {"tokens": [5]},
    }.get(path, {"prompt": "a"})
    answer = ask(path, {"model": "gpt", **prompt}, names=("fake", "other"))
    assert answer.status == 404 and answer.error["param"] == "model" and answer.error["type"] == "NotFoundError"
    assert "'fake'" in answer.error["message"] and "'other'" in answer.error["message"]


def test_an_unknown_path_and_a_wrong_method_have_the_error_object_too(ask):
    assert (ask("/v2/nothing").status, ask("/v2/nothing").error["type"]) == (404, "NotFoundError")
    answer = ask("/v1/completions")
    assert (answer.status, answer.error["type"]) == (405, "MethodNotAllowedError")


def test_a_dead_engine_gives_500_that_says_nothing_of_it(serving):
    async def scenario(server):
        server.engine.is_dead = True
        for body in (COMPLETION, {**COMPLETION, "stream": True}):
            answer = await server.client.post("/v1/completions", body)
            assert answer.status == 500 and answer.error["type"] == "InternalServerError"
            assert "0x" not in answer.body.decode() and "/srv" not in answer.body.decode()

    serving(scenario)


def test_a_failed_step_fails_its_request_and_the_next_one_is_served(serving):
    async def scenario(server):
        server.engine.executor.fail_at[0] = "result"
        failed = await server.client.post("/v1/completions", COMPLETION)
        return failed, await server.client.post("/v1/completions", COMPLETION)

    failed, served = serving(scenario)
    assert failed.status == 500 and failed.error["code"] == 500
    assert served.status == 200


def test_a_request_whose_logits_are_unusable_fails_alone(serving):
    async def scenario(server):
        server.engine.go_on.clear()
        asking = asyncio.ensure_future(server.client.post("/v1/completions", {**COMPLETION, "request_id": "bad"}))
        await asyncio.sleep(0.02)
        [engine_id] = server.service.traffic.engine_ids(["cmpl-bad"])
        server.engine.executor.bad_requests[engine_id] = "logits at 0x7fff12345678 are not numbers"
        server.engine.go_on.set()
        return await asking

    answer = serving(scenario)
    assert answer.status == 500 and "not numbers" in answer.error["message"] and "0x7" not in answer.error["message"]


def test_a_failure_after_the_first_chunk_ends_the_stream_with_the_error(serving):
    async def scenario(server):
        server.engine.executor.longest_run = 1
        server.engine.executor.fail_at[3] = "result"
        return await server.client.post("/v1/completions", {"prompt": "the cat", "max_tokens": 20, "stream": True})

    answer = serving(scenario)
    *chunks, error, done = answer.events
    assert answer.status == 200 and chunks and done == "[DONE]"
    assert error["error"]["code"] == 500 and all("choices" in chunk for chunk in chunks)


def test_long_messages_are_cut(ask):
    answer = ask("/v1/completions", {"prompt": "a", "model": "m" * 50_000})
    assert answer.status == 404 and len(answer.error["message"]) == MAX_MESSAGE_LENGTH
    assert len(error_body(as_http_error(RequestError("x" * 10_000)))) < 2 * MAX_MESSAGE_LENGTH


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("cannot open /srv/models/llama/config.json.", "cannot open <path>"),
        ("<function f at 0x7f0012345678> failed", "<function f at <address>> failed"),
        ("use 1/2 of meta/llama at https://x.org/a/b", "use 1/2 of meta/llama at https://x.org/a/b"),
    ],
    ids=["a path", "an address", "neither"],
)
def test_messages_lose_paths_and_addresses_and_nothing_else(message, shown):
    assert scrubbed(message) == shown


def answered(error):
    return error_response(as_http_error(error))


def test_an_unexpected_exception_says_nothing_of_itself(caplog):
    answer = answered(KeyError("/secret/place"))
    assert answer.status_code == 500 and b"secret" not in answer.body
    assert "secret" in caplog.text


def test_engine_errors_that_may_pass_are_503_and_what_the_engine_cannot_do_is_501():
    assert answered(EngineError("step 5 failed")).status_code == 503
    assert answered(EngineError("step 5 failed")).headers["Retry-After"] == "1"
    assert answered(UsageError("it cannot sleep")).status_code == 501


def test_a_body_that_does_not_come_in_time_gives_408(serving, monkeypatch):
    from jaxpaged.entrypoints.http import body
    from tests.entrypoints.http.asgi_client import scope_of

    async def scenario(server):
        begun, sent = iter([{"type": "http.request", "body": b'{"prompt', "more_body": True}]), []

        async def receive():
            return next(begun, None) or await asyncio.sleep(60)

        async def send(message):
            sent.append(message)

        await server.client.app(
            scope_of("POST", "/v1/completions", {"content_type": "application/json"}), receive, send
        )
        return sent[0]["status"]

    monkeypatch.setattr(body, "BODY_TIMEOUT", 0.02)
    assert serving(scenario) == 408
