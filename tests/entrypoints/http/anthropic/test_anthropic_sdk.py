"""Anthropic's own client library, against a server on a socket."""

import asyncio
import json

import anthropic
import pytest
from pydantic import BaseModel

from tests.entrypoints.http.live_server import live_server
from tests.entrypoints.http.saying_model import saying

KEY = "sesame"
USER = {"role": "user", "content": "How is Lisbon?"}
ASK = {"model": "fake", "max_tokens": 200, "messages": [USER]}
TOOL = {
    "name": "weather",
    "description": "How it is",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
INPUT = {"city": "Lisbon"}
TALK = (
    f"<think>it is day</think>Let me see.<tool_call>{json.dumps({'name': 'weather', 'arguments': INPUT})}</tool_call>"
)


@pytest.fixture(scope="module")
def url():
    options = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    with live_server(keys=(KEY,), options=options, **saying(TALK)) as (url, _):
        yield url


@pytest.fixture(scope="module")
def client(url):
    return anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)


def described(content):
    """Blocks without their ids."""
    return [block.model_dump(include={"type", "text", "thinking", "name", "input"}) for block in content]


EXPECTED = [
    {"type": "thinking", "thinking": "it is day"},
    {"type": "text", "text": "Let me see."},
    {"type": "tool_use", "name": "weather", "input": INPUT},
]


def test_a_message_is_parsed(client):
    message = client.messages.create(**ASK, tools=[TOOL])
    assert described(message.content) == EXPECTED
    assert message.stop_reason == "tool_use" and message.role == "assistant" and message._request_id.startswith("req_")
    assert message.usage.input_tokens > 0 < message.usage.output_tokens


def test_raw_events_stream(client):
    kinds = [event.type for event in client.messages.create(**ASK, tools=[TOOL], stream=True)]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3


def test_the_streaming_helper_puts_the_pieces_together(client):
    with client.messages.stream(**ASK, tools=[TOOL]) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert {"text", "thinking", "signature", "input_json"} <= kinds
    assert described(final.content) == EXPECTED and final.stop_reason == "tool_use"
    with client.messages.stream(**ASK, tools=[TOOL]) as stream:
        assert "".join(stream.text_stream) == "Let me see."


def test_an_answer_and_the_result_of_its_call_go_back(client):
    first = client.messages.create(**ASK, tools=[TOOL])
    result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "sunny"}
    turns = [USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(**{**ASK, "messages": turns}, tools=[TOOL])
    assert second.usage.input_tokens > first.usage.input_tokens


def test_tokens_are_counted(client):
    count = client.messages.count_tokens(model="fake", messages=[USER], tools=[TOOL], system="be kind")
    used = client.messages.create(**ASK, tools=[TOOL], system="be kind").usage.input_tokens
    assert count.input_tokens == used


def test_errors_become_the_librarys_exceptions(client, url):
    with pytest.raises(anthropic.BadRequestError, match="max_tokens") as bad:
        client.messages.create(**{**ASK, "max_tokens": 0})
    assert bad.value.body["error"]["type"] == "invalid_request_error" and bad.value.request_id
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**ASK, "model": "claude"})
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0).messages.create(**ASK)


def test_many_asynchronous_clients_are_served_at_a_time(url):
    async def one(client):
        async with client.messages.stream(**ASK, tools=[TOOL]) as stream:
            return described((await stream.get_final_message()).content)

    async def scenario():
        async with anthropic.AsyncAnthropic(base_url=url, auth_token=KEY, max_retries=0) as client:
            return await asyncio.gather(*(one(client) for _ in range(10)))

    assert asyncio.run(scenario()) == [EXPECTED] * 10


def test_the_tool_runner_calls_the_tool(client):
    asked = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """How it is.

        Args:
            city: where
        """
        asked.append(city)
        return "sunny"

    runner = client.beta.messages.tool_runner(**ASK, tools=[weather], max_iterations=2)
    for _ in runner:
        pass
    assert asked and set(asked) == {"Lisbon"}


@pytest.mark.parametrize(
    ("choice", "answer"),
    [
        ({"type": "any"}, [{"name": "weather", "parameters": INPUT}]),
        ({"type": "tool", "name": "weather"}, INPUT),
    ],
)
def test_a_call_may_be_forced(choice, answer):
    with live_server(**saying(json.dumps(answer, separators=(",", ":")))) as (url, _):
        client = anthropic.Anthropic(base_url=url, api_key="any", max_retries=0)
        message = client.messages.create(**ASK, tools=[TOOL], tool_choice=choice)
        with client.messages.stream(**ASK, tools=[TOOL], tool_choice=choice) as stream:
            streamed = stream.get_final_message()
    for each in (message, streamed):
        assert described(each.content) == EXPECTED[2:] and each.stop_reason == "tool_use"


def test_parse_gives_what_was_asked_for():
    class City(BaseModel):
        city: str

    with live_server(**saying(json.dumps(INPUT))) as (url, _):
        client = anthropic.Anthropic(base_url=url, api_key="any", max_retries=0)
        message = client.messages.parse(**ASK, output_format=City)
    assert message.parsed_output == City(city="Lisbon")
