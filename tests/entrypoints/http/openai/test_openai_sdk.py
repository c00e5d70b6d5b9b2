"""The client library that most people use, against a server on a socket."""

import asyncio

import openai
import pytest

from tests.engine.small_tokenizer import make_tokenizer
from tests.entrypoints.http.live_server import live_server

TOKENIZER = make_tokenizer()
KEY = "sesame"
MESSAGES = [{"role": "user", "content": "the cat"}]


@pytest.fixture(scope="module")
def url():
    with live_server(keys=(KEY,)) as (url, _):
        yield f"{url}/v1"


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=url, api_key=KEY, max_retries=0)


def token_ids(client):
    """The ids of the answer to MESSAGES."""
    answer = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=6, temperature=0, extra_body={"return_token_ids": True}
    )
    return answer.choices[0].token_ids


def test_a_chat_answer_is_parsed(client):
    answer = client.chat.completions.create(
        model="fake",
        messages=MESSAGES,
        max_tokens=5,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        extra_body={"return_token_ids": True, "top_k": 5},
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "length" and choice.message.role == "assistant"
    assert choice.message.content == TOKENIZER.decode(choice.token_ids)
    assert len(choice.logprobs.content) == 5 and answer.usage.completion_tokens == 5
    assert answer.id.startswith("chatcmpl-")


def test_a_chat_streams(client):
    whole = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=6, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model="fake",
            messages=MESSAGES,
            max_tokens=6,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 6


def test_the_streaming_helper_puts_the_pieces_together(client):
    stop = {"stop_token_ids": [token_ids(client)[3]]}
    with client.chat.completions.stream(model="fake", messages=MESSAGES, temperature=0, extra_body=stop) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "content.delta" in kinds and final.choices[0].finish_reason == "stop"


def test_parse_takes_a_plain_answer(client):
    stop = {"stop_token_ids": [token_ids(client)[3]]}
    answer = client.chat.completions.parse(model="fake", messages=MESSAGES, temperature=0, extra_body=stop)
    assert answer.choices[0].message.parsed is None and answer.choices[0].message.content is not None


def test_completions_are_parsed_and_stream(client):
    whole = client.completions.create(model="fake", prompt=["the cat", "a dog"], n=2, max_tokens=4, seed=7, logprobs=1)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert all(len(choice.logprobs.tokens) == 4 for choice in whole.choices)
    texts = [""] * 4
    stream = client.completions.create(
        model="fake", prompt=["the cat", "a dog"], n=2, max_tokens=4, seed=7, stream=True
    )
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


def test_models_are_listed_and_found(client):
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"


def test_errors_become_the_librarys_exceptions(client, url):
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="fake", messages=MESSAGES, temperature=9)
    assert bad.value.param == "temperature" and bad.value.type == "BadRequestError"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt", messages=MESSAGES)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=url, api_key="wrong", max_retries=0).models.list()


def test_many_asynchronous_clients_are_served_at_a_time(url):
    async def one(client, i):
        stream = await client.completions.create(
            model="fake",
            prompt=[20 + i],
            max_tokens=6,
            temperature=0,
            stream=True,
            extra_body={"return_token_ids": True},
        )
        return [token_id async for chunk in stream for token_id in chunk.choices[0].token_ids]

    async def scenario():
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
            return await asyncio.gather(*(one(client, i) for i in range(20)))

    assert asyncio.run(scenario()) == [[21 + i + k for k in range(6)] for i in range(20)]
