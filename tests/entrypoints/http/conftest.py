"""A server over an engine without a model, asked without a socket.

The libraries of the server and its clients come with the extra `test`. In an environment without them nothing below
this folder is collected.
"""

import asyncio
import importlib.util
from dataclasses import dataclass
from typing import Any

import pytest

from jaxpaged.errors import is_installed

NEEDED = ("starlette", "uvicorn", "httptools", "openai", "anthropic", "prometheus_client")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
FOLDERS = ("", "openai/", "anthropic/", "responses/", "pooling/", "transport/", "page/")
collect_ignore_glob = [f"{folder}test_*.py" for folder in FOLDERS] if MISSING else []
collect_ignore = [] if is_installed("opentelemetry.sdk") else ["test_traces.py"]


@dataclass
class Server:
    """What a test may look at. The clients ask without a socket."""

    engine: Any
    service: Any
    client: Any
    admin: Any


@pytest.fixture
def serving():
    """`serving(scenario, keys=..., model options)` runs `await scenario(server)` in an event loop of its own."""
    from jaxpaged.entrypoints.http.app import counts_of, create_admin_app, create_app
    from jaxpaged.serving.options import ServerOptions
    from jaxpaged.serving.service import Service, served_model
    from tests.entrypoints.http.asgi_client import Client
    from tests.entrypoints.http.async_engine import FakeAsyncEngine

    def serve(scenario, *, options=None, keys=(), names=("fake",), **engine_options):
        async def run():
            engine = FakeAsyncEngine(**engine_options)
            service = Service(engine, served_model(engine.config, names), ServerOptions.from_options(options or {}))
            counts = counts_of(service)
            apps = create_app(service, keys, counts), create_admin_app(service, keys, counts)
            server = Server(engine, service, *map(Client, apps))
            try:
                result = await asyncio.wait_for(scenario(server), 20)
                assert len(service.traffic) == 0, "a request is still counted as under way"
                return result
            finally:
                engine.shutdown()

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
