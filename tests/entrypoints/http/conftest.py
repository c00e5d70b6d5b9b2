"""A server over an engine without a model, asked without a socket."""

import asyncio
from dataclasses import dataclass

import pytest

pytest.importorskip("starlette", reason="needs the extra serve")

from jaxpaged.entrypoints.http.app import create_admin_app, create_app
from jaxpaged.entrypoints.http.options import ServerOptions
from jaxpaged.entrypoints.http.service import Service, served_model
from tests.entrypoints.http.asgi_client import Client
from tests.entrypoints.http.async_engine import FakeAsyncEngine


@dataclass
class Server:
    """What a test may look at."""

    engine: FakeAsyncEngine
    service: Service
    client: Client
    admin: Client


@pytest.fixture
def serving():
    """`serving(scenario, keys=..., model options)` runs `await scenario(server)` in an event loop of its own."""

    def serve(scenario, *, options=None, keys=(), names=("fake",), **engine_options):
        async def run():
            engine = FakeAsyncEngine(**engine_options)
            service = Service(engine, served_model(engine.config, names), ServerOptions.from_options(options or {}))
            server = Server(engine, service, Client(create_app(service, keys)), Client(create_admin_app(service, keys)))
            result = await asyncio.wait_for(scenario(server), 20)
            assert len(service.traffic) == 0, "a request is still counted as under way"
            return result

        return asyncio.run(run())

    return serve


@pytest.fixture
def ask(serving):
    """`ask(path, body, ...)` posts one request to a server of its own; `ask(path)` gets."""

    def ask_once(path, body=None, *, headers=None, **settings):
        async def scenario(server):
            if body is None:
                return await server.client.get(path, **(headers or {}))
            return await server.client.post(path, body, **(headers or {}))

        return serving(scenario, **settings)

    return ask_once
