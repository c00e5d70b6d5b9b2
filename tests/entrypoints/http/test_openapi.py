"""The OpenAPI description, and requests that fit it or nearly do: none of them makes the server fail."""

import asyncio

import hypothesis
import msgspec
import pytest
from hypothesis import strategies as st

from jaxpaged.entrypoints.http.app import create_app
from jaxpaged.entrypoints.http.generate import GenerateTokensRequest
from jaxpaged.entrypoints.http.openai.protocol import ChatCompletionRequest, CompletionRequest
from tests.entrypoints.http.asgi_client import Client
from tests.entrypoints.http.live_server import live_server, make_service

BODIES = {
    "/v1/completions": (CompletionRequest, {"prompt": "a", "max_tokens": 2}),
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
    "/inference/v1/generate": (GenerateTokensRequest, {"token_ids": [7, 8], "sampling_params": {"max_tokens": 2}}),
}
TEXT = st.text(st.characters(codec="utf-8"), max_size=5)
NUMBERS = st.integers(-3, 70) | st.sampled_from([2**31, 2**63, 2**64, -(2**63) - 1, 10**30]) | st.floats(-3, 3)
KEYS = TEXT | st.sampled_from(["role", "content", "type", "name"])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT | st.sampled_from(["auto", "required", "text", "json_object", "user"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=4,
)


@pytest.mark.parametrize("path", BODIES)
def test_whatever_a_field_holds_is_served_or_refused_by_its_name(path):
    kind, valid = BODIES[path]
    fields = st.sampled_from([field.name for field in msgspec.structs.fields(kind)])

    @hypothesis.settings(max_examples=300)
    @hypothesis.given(st.dictionaries(fields, JSON, min_size=1, max_size=2), st.booleans())
    def one_request(client, change, stream):
        answer = loop.run(client.post(path, {**valid, "stream": stream, **change}))
        assert answer.status in (200, 400, 404), answer.body
        if answer.status != 200:
            assert answer.error["param"] is not None, answer.body
        elif answer.headers["content-type"].startswith("text/event-stream"):
            assert answer.events[-1] == "[DONE]" and "error" not in answer.events[-2]

    with asyncio.Runner() as loop:
        service = make_service()
        one_request(Client(create_app(service)))
        assert len(service.traffic) == 0


def test_the_description_has_every_endpoint_and_every_field(ask):
    document = ask("/openapi.json").json
    assert document["openapi"] == "3.1.0"
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models/{id}", "/health"} <= set(document["paths"])
    fields = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert {"messages", "tools", "top_k", "min_p", "stream_options", "response_format"} <= set(fields)
    assert "security" not in document


def test_the_description_says_when_keys_are_needed(ask):
    document = ask("/openapi.json", keys=("k",), headers={"x_api_key": "k"}).json
    assert document["security"] == [{"key": []}] and "401" in document["paths"]["/v1/models"]["get"]["responses"]


@pytest.mark.slow
def test_requests_made_from_the_description_never_make_the_server_fail():
    import schemathesis
    from schemathesis.checks import not_a_server_error

    with live_server() as (url, _):
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        for operation in schema.get_all_operations():

            @hypothesis.settings(
                max_examples=20,
                derandomize=True,
                deadline=None,
                phases=[hypothesis.Phase.generate],
                suppress_health_check=list(hypothesis.HealthCheck),
            )
            @hypothesis.given(case=operation.ok().as_strategy())
            def one_request(case):
                case.call_and_validate(checks=[not_a_server_error])

            one_request()
