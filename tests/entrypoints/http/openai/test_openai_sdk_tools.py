"""Tools and parsed answers through OpenAI's client library, against a server on a socket."""

import asyncio
import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

from tests.entrypoints.http.live_server import live_server
from tests.entrypoints.http.saying_model import saying

MESSAGES = [{"role": "user", "content": "the cat"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}}]
OPTIONS = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
CALL = '<think>hm</think>\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


class Weather(BaseModel):
    """Arguments of a tool."""

    city: str


class Verdict(BaseModel):
    """What an answer is parsed into."""

    verdict: Literal["good", "bad"]
    score: int


@pytest.fixture(scope="module")
def server():
    with live_server(options=OPTIONS, **saying()) as (url, service):
        yield f"{url}/v1", service.engine.executor.say


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=server[0], api_key="none", max_retries=0)


@pytest.fixture
def say(server):
    return server[1]


def test_a_call_is_parsed(client, say):
    say(CALL)
    answer = client.chat.completions.create(model="fake", messages=MESSAGES, tools=TOOLS, temperature=0)
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.reasoning == "hm"
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "weather",
        {"city": "Rome"},
    )


def test_the_streaming_helper_puts_calls_together(client, say):
    say(CALL)
    tools = [openai.pydantic_function_tool(Weather, name="weather")]
    with client.chat.completions.stream(model="fake", messages=MESSAGES, tools=tools, temperature=0) as stream:
        kinds = {event.type for event in stream}
        [choice] = stream.get_final_completion().choices
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.parsed_arguments == Weather(city="Rome")


def test_parse_gives_a_model_of_pydantic(client, say):
    say('<think>hm {</think>\n\n{"verdict": "good", "score": 7}')
    answer = client.chat.completions.parse(model="fake", messages=MESSAGES, response_format=Verdict, temperature=0)
    assert answer.choices[0].message.parsed == Verdict(verdict="good", score=7)
    with client.chat.completions.stream(
        model="fake", messages=MESSAGES, response_format=Verdict, n=2, seed=3
    ) as stream:
        final = stream.get_final_completion()
    assert [choice.message.parsed for choice in final.choices] == [Verdict(verdict="good", score=7)] * 2


def test_an_asynchronous_client_gets_required_and_named_calls(server, say):
    say('[{"name": "weather", "parameters": {"city": "Rome"}}]')

    async def ask():
        async with openai.AsyncOpenAI(base_url=server[0], api_key="none", max_retries=0) as client:
            asked = {"model": "fake", "messages": MESSAGES, "tools": TOOLS, "temperature": 0}
            required = await client.chat.completions.create(**asked, tool_choice="required")
            say('{"city": "Oslo"}')
            named = {"type": "function", "function": {"name": "weather"}}
            chunks = [c async for c in await client.chat.completions.create(**asked, tool_choice=named, stream=True)]
            return required.choices[0], [chunk.choices[0] for chunk in chunks]

    required, chunks = asyncio.run(ask())
    assert json.loads(required.message.tool_calls[0].function.arguments) == {"city": "Rome"}
    assert required.finish_reason == "tool_calls" and chunks[-1].finish_reason == "stop"
    pieces = [piece for chunk in chunks for piece in chunk.delta.tool_calls or []]
    assert pieces[0].function.name == "weather" and json.loads("".join(p.function.arguments for p in pieces)) == {
        "city": "Oslo"
    }


def test_a_tool_that_cannot_be_forced_is_an_error_of_the_client(client, say):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "nothing"}}}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="fake", messages=MESSAGES, tools=tools, tool_choice="required")
    assert caught.value.param == "tools"
