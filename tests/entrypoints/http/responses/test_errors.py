"""Every field of `/v1/responses` that cannot be is refused by its name."""

import asyncio

import hypothesis
import msgspec
import pytest
from hypothesis import strategies as st

from jaxpaged.entrypoints.http.app import create_app
from jaxpaged.entrypoints.http.responses.protocol import ResponsesRequest
from tests.entrypoints.http.asgi_client import Client
from tests.entrypoints.http.live_server import make_service
from tests.entrypoints.http.responses.answering import PARSERS, WEATHER
from tests.entrypoints.http.test_openapi import JSON

CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
SCHEMA = {"type": "json_schema", "name": "x", "schema": {}}
DEEP = {"a": 1}
for _ in range(70):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a"]}, "input[0]"),
        ({"input": [DEEP]}, "input"),
        ({"input": "x" * 200}, "input"),
        ({"input": [{"role": "king", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": ["x"]}]}, "input[0].type"),
        ({"input": [{**CALL, "arguments": {}}]}, "input[0].arguments"),
        ({"input": [{**CALL, "name": None}]}, "input[0].name"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id"),
        ({"input": [CALL, {"type": "function_call_output", "call_id": "c"}]}, "input[1].output"),
        ({"input": [CALL, {"type": "function_call_output", "call_id": "c", "output": 5}]}, "input[1].output"),
        (
            {"input": [CALL, {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file"}]}]},
            "input[1].output[0].type",
        ),
        ({"input": [{"type": "reasoning", "content": "x"}]}, "input[0].content"),
        ({"instructions": 5}, "instructions"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True, "store": False}, "background"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"include": ["everything"]}, "include"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": "many"}, "max_output_tokens"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"format": {}}}, "text.format.type"),
        ({"text": {"format": {**SCHEMA, "name": None}}}, "text.format.name"),
        ({"text": {"format": {**SCHEMA, "schema": None}}}, "text.format.schema"),
        ({"text": {"format": {**SCHEMA, "schema": {"type": "what"}}}}, "text.format"),
        ({"text": {"format": {**SCHEMA, "schema": DEEP}}}, "text"),
        ({"text": {"format": SCHEMA}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
        ({"structured_outputs": {"yaml": "a"}}, "structured_outputs"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [{**WEATHER, "parameters": []}]}, "tools[0].parameters"),
        ({"tools": [{**WEATHER, "parameters": DEEP}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}, "tools": [WEATHER]}, "tool_choice.name"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "x", "tools": []}}, "tool_choice.mode"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{}]}}, "tool_choice.tools[0].name"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"metadata": {"a": 5}}, "metadata[...]"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"metadata": {"a" * 65: ""}}, "metadata"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"truncation": "some"}, "truncation"),
        ({"service_tier": "first"}, "service_tier"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"n": 2}, "n"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"stop": list("abcde")}, "stop"),
        ({"seed": 2**64}, "seed"),
        ({"priority": 1}, "priority"),
        ({"cache_salt": "a/b"}, "cache_salt"),
        ({"vllm_xargs": {"a": 2**70}}, "vllm_xargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
def test_every_invalid_field_gives_400_with_its_name(ask, body, parameter):
    answer = ask("/v1/responses", {"input": "a", "max_output_tokens": 2, **body}, options=PARSERS)
    status = 404 if parameter == "previous_response_id" else 400
    assert (answer.status, answer.error["param"]) == (status, parameter), answer.body


def test_the_input_must_be_there(ask):
    answer = ask("/v1/responses", {"model": "fake"})
    assert (answer.status, answer.error["param"]) == (400, "input")


def test_tools_need_a_parser_when_the_model_may_choose(ask):
    answer = ask("/v1/responses", {"input": "a", "tools": [WEATHER]})
    assert (answer.status, answer.error["param"]) == (400, "tool_choice")


@pytest.mark.parametrize("query", ["stream=maybe", "starting_after=1", "stream=true&starting_after=-1", "stream=true"])
def test_wrong_queries_give_400_with_their_name(serving, query):
    async def scenario(server):
        made = await server.client.post("/v1/responses", {"input": "a", "max_output_tokens": 1})
        return await server.client.get(f"/v1/responses/{made.json['id']}?{query}")

    answer = serving(scenario)
    assert answer.status == 400 and answer.error["param"] in ("stream", "starting_after")


def test_only_responses_in_the_background_are_cancelled(serving):
    async def scenario(server):
        made = await server.client.post("/v1/responses", {"input": "a", "max_output_tokens": 1})
        return await server.client.post(f"/v1/responses/{made.json['id']}/cancel", b"")

    assert serving(scenario).status == 400


def test_whatever_a_field_holds_is_served_or_refused_by_its_name():
    fields = st.sampled_from([field.name for field in msgspec.structs.fields(ResponsesRequest)])

    @hypothesis.settings(max_examples=200, deadline=None)
    @hypothesis.given(st.dictionaries(fields, JSON, min_size=1, max_size=2), st.booleans())
    def one_request(client, change, stream):
        body = {"input": "a", "max_output_tokens": 2, "stream": stream, **change}
        answer = loop.run(client.post("/v1/responses", body))
        assert answer.status in (200, 400, 404), answer.body
        if answer.status != 200:
            assert answer.error["param"] is not None, answer.body

    with asyncio.Runner() as loop:
        one_request(Client(create_app(make_service())))
