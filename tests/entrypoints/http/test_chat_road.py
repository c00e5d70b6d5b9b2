"""The budget of a chat over HTTP: how many files of the package it passes, which may only shrink.

Counted through the real ASGI application, over an engine whose device costs nothing, with default options.
"""

import asyncio

import pytest

from jaxpaged.entrypoints.http.app import create_app
from tests.entrypoints.http.asgi_client import Client
from tests.entrypoints.http.live_server import make_service
from tests.road_counter import counted

SERVER_FILES, FILES = 17, 45
"""Of entrypoints and serving, and of the whole package."""


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat(stream):
    body = {"messages": [{"role": "user", "content": "one"}], "max_tokens": 5, "temperature": 0, "stream": stream}

    async def ask_twice():
        client = Client(create_app(make_service()))
        await client.post("/v1/chat/completions", body)  # what happens only once is no part of it
        with counted() as road:
            answer = await client.post("/v1/chat/completions", body)
        assert answer.status == 200, answer.body
        return road

    road = asyncio.run(ask_twice())
    of_server = [path for path in road.files if path.startswith(("entrypoints/", "serving/"))]
    assert "serving/generate.py" in of_server and "core/scheduler.py" in road.files
    assert not [path for path in of_server if "anthropic" in path or "pooling" in path], "another API's"
    assert len(of_server) <= SERVER_FILES, "\n".join(of_server)
    assert len(road.files) <= FILES, str(road)
