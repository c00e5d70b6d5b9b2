"""Requests to `/v1/responses` of a server whose model answers as a test says."""

import pytest

from tests.entrypoints.http.responses.answering import with_room


@pytest.fixture
def respond(serving):
    """`respond(body, text, ...)` posts one request; the model answers with `text`, or counts."""

    def ask_once(body, text=None, **settings):
        async def scenario(server):
            return await server.client.post("/v1/responses", {"input": "the cat", **body})

        return serving(scenario, **with_room(text), **settings)

    return ask_once
