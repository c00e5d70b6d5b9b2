"""OpenAI's own client library, against a server on a socket."""

import asyncio
import time

import openai
import pydantic
import pytest

from tests.entrypoints.http.live_server import live_server
from tests.entrypoints.http.responses.answering import HERMES, PARSERS, WEATHER, answering, record_shapes, with_room

ASK = {"model": "fake", "input": "the cat", "temperature": 0}
TEXT = f"<think>let me see</think>the sun {HERMES}"


class Place(pydantic.BaseModel):
    """What answers are parsed into."""

    city: str


class Live:
    """A server, and clients of it. `say` decides what its model answers."""

    def __init__(self, url, service):
        self.engine = service.engine
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)
        self.open_async_client = lambda: openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)

    def say(self, text):
        self.engine.engine.reset_prefix_cache()
        self.engine.executor.model = answering(text)


@pytest.fixture(scope="module")
def live():
    with live_server(options=PARSERS, **with_room("")) as (url, service):
        live = Live(url, service)
        record_shapes(live)
        yield live


def test_a_response_is_parsed(live):
    live.say(TEXT)
    response = live.client.responses.create(**ASK, tools=[WEATHER], metadata={"a": "b"})
    thinking, message, call = response.output
    assert (thinking.type, message.type, call.type) == ("reasoning", "message", "function_call")
    assert thinking.content[0].text == "let me see" and call.arguments == '{"city": "Rome"}'
    assert response.output_text == "the sun" and response.status == "completed"
    assert response.usage.output_tokens_details.reasoning_tokens > 0 and response.metadata == {"a": "b"}


def test_the_streaming_helper_puts_the_events_together(live):
    live.say(TEXT)
    with live.client.responses.stream(**ASK, tools=[WEATHER]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    texts = [event for event in events if event.type == "response.output_text.delta"]
    calls = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert texts[-1].snapshot == final.output_text == "the sun" and calls[-1].snapshot == '{"city": "Rome"}'
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_parse_makes_an_object_of_the_text(live):
    live.say('<think>well</think>{"city": "Rome"}')
    response = live.client.responses.parse(**ASK, text_format=Place)
    assert response.output_parsed == Place(city="Rome")


def test_a_conversation_goes_on_with_the_result_of_a_call(live):
    live.say(HERMES)
    first = live.client.responses.create(**ASK, tools=[WEATHER])
    live.say("the sun")
    result = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "sunny"}
    second = live.client.responses.create(model="fake", input=[result], previous_response_id=first.id)
    assert second.output_text == "the sun" and second.previous_response_id == first.id
    # The same without the store: all items are sent back.
    items = [{"role": "user", "content": "the cat"}, *(item.model_dump() for item in first.output), result]
    assert live.client.responses.create(model="fake", input=items, store=False).output_text == "the sun"


def test_a_response_in_the_background_is_retrieved_and_followed(live):
    live.say("the sun")
    with live.client.responses.create(**ASK, background=True, stream=True) as stream:
        first = next(iter(stream))
    response_id = first.response.id
    events = list(live.client.responses.retrieve(response_id, stream=True, starting_after=0))
    assert events[-1].type == "response.completed" and events[0].sequence_number == 1
    assert live.client.responses.retrieve(response_id) == events[-1].response
    live.client.responses.delete(response_id)
    with pytest.raises(openai.NotFoundError):
        live.client.responses.retrieve(response_id)


def test_a_response_in_the_background_is_cancelled(live):
    live.engine.go_on.clear()
    queued = live.client.responses.create(**ASK, background=True)
    cancelled = live.client.responses.cancel(queued.id)
    live.engine.go_on.set()
    assert (queued.status, cancelled.status) == ("queued", "cancelled")


def test_asynchronous_clients_create_stream_and_retrieve(live):
    live.say("the sun")

    async def one(client):
        made = await client.responses.create(**ASK)
        async with client.responses.stream(**ASK) as stream:
            streamed = await stream.get_final_response()
        parsed = await client.responses.parse(**ASK)
        kept = await client.responses.retrieve(made.id)
        return {made.output_text, streamed.output_text, parsed.output_text, kept.output_text}

    async def scenario():
        async with live.open_async_client() as client:
            return await asyncio.gather(*(one(client) for _ in range(4)))

    assert asyncio.run(scenario()) == [{"the sun"}] * 4


def test_errors_become_the_librarys_exceptions(live):
    with pytest.raises(openai.BadRequestError) as bad:
        live.client.responses.create(**{**ASK, "temperature": 9})
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        live.client.responses.create(**{**ASK, "model": "gpt"})


def test_a_response_ends_while_its_client_polls(live):
    live.say("the sun")
    response = live.client.responses.create(**ASK, background=True)
    while response.status in ("queued", "in_progress"):
        time.sleep(0.01)
        response = live.client.responses.retrieve(response.id)
    assert response.status == "completed" and response.output_text == "the sun"
