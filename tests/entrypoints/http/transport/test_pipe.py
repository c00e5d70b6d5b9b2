"""Pieces of a stream that are written where they arise: the same bytes, and the same care of who is slow or gone."""

import asyncio
import gc
import http.client
import json
import random
from urllib.parse import urlsplit

from jaxpaged.entrypoints.http.anthropic import write
from jaxpaged.entrypoints.http.transport.listener import AnswerPipe
from tests.entrypoints.http.live_server import live_server
from tests.entrypoints.http.stream_corpus import requests, without_chance

STREAM = {"prompt": "the cat", "max_tokens": 60, "ignore_eos": True, "stream": True}


def answers(serving, is_reading):
    """(What a client gets, pieces that went through the pipe) for every request of the corpus."""
    for bodies, settings in requests():

        async def scenario(server, bodies=bodies):
            server.engine.executor.longest_run = 1
            server.client.is_reading = is_reading
            for path, body in bodies:
                answer = await server.client.post(path, {**body, "stream": True}, x_request_id="r")
                yield without_chance(answer.body), server.client.pipe and server.client.pipe.num_pieces

        yield from serving(lambda server, asked=scenario: listed(asked(server)), **settings)


async def listed(items):
    return [item async for item in items]


def test_every_api_writes_the_same_bytes_into_the_pipe_and_past_it(serving):
    drawn = random.Random(0)
    usual = [body for body, _ in answers(serving, None)]
    through = list(answers(serving, lambda: drawn.random() < 0.7))
    assert [body for body, _ in through] == usual
    assert sum(number > 3 for _, number in through) > len(through) // 2


def test_what_a_client_does_not_take_waits_for_it(serving):
    """While the client reads nothing, no piece is written past the one that waits."""
    blocked = asyncio.Event()

    async def scenario(server):
        server.engine.executor.longest_run = 1
        server.client.is_reading = blocked.is_set
        return await server.client.post("/v1/completions", STREAM), server.client.pipe.num_pieces

    answer, num_pieces = serving(scenario)
    assert num_pieces == 0 and sum(len(event["choices"]) for event in answer.events[:-1]) == 60


def test_a_writer_that_fails_ends_its_own_stream_only(serving, monkeypatch):
    grow = write.MessageStream.of

    def fail_later(self, deltas):
        return grow(self, deltas) if self._index < 0 else 1 / 0

    async def scenario(server):
        server.engine.executor.longest_run = 1
        server.client.is_reading = lambda: True
        monkeypatch.setattr(write.MessageStream, "of", fail_later)
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "stream": True}
        asked = [server.client.post("/v1/messages", chat), server.client.post("/v1/completions", STREAM)]
        return await asyncio.gather(*asked)

    failed, other = serving(scenario)
    assert failed.status == 200 and b"event: error" in failed.body and b"message_stop" not in failed.body
    assert other.events[-1] == "[DONE]" and len(other.events) > 50


def test_silence_after_pieces_in_the_pipe_is_filled_with_comments(serving):
    async def scenario(server):
        server.engine.executor.longest_run = 1
        server.client.is_reading = lambda: True
        asking = asyncio.ensure_future(server.client.post("/v1/completions", STREAM))
        while len(server.engine.executor.executed) < 5:
            await asyncio.sleep(0)
        server.engine.go_on.clear()
        await asyncio.sleep(0.08)
        server.engine.go_on.set()
        return await asking, server.client.pipe.num_pieces

    answer, num_pieces = serving(scenario, options={"sse_keep_alive_interval": 0.02})
    assert num_pieces > 40 and b": keep-alive\n\n" in answer.body and answer.events[-1] == "[DONE]"
    assert sum(len(event["choices"]) for event in answer.events[:-1]) == 60


def test_an_exchange_that_is_over_leaves_nothing_for_the_garbage_collector():
    """What would stay until it looks is the request and its body, too."""
    with live_server() as (url, _):
        connection = http.client.HTTPConnection(urlsplit(url).netloc)
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                connection.request("POST", "/v1/completions", json.dumps(STREAM), {"Content-Type": "application/json"})
                assert b"[DONE]" in connection.getresponse().read()
            pipes = [each for each in gc.get_objects() if type(each) is AnswerPipe]
        finally:
            gc.enable()
            connection.close()
    assert len(pipes) == 1, "a connection keeps the exchange that was last"
