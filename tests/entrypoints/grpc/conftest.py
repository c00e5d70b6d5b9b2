"""A gRPC server over an engine without a model, asked through a real socket.

The libraries come with the extra `test`; in an environment without them nothing below this folder is collected.
"""

import asyncio
import importlib.util
from dataclasses import dataclass
from typing import Any

import pytest

from jaxpaged.errors import is_installed

NEEDED = ("starlette", "grpc", "grpc_health", "grpc_reflection")
collect_ignore_glob = ["test_*.py"] if any(importlib.util.find_spec(name) is None for name in NEEDED) else []
collect_ignore = [] if is_installed("opentelemetry.sdk") else ["test_traces.py"]


@dataclass
class GrpcServer:
    """What a test may look at. `stub` and `admin` ask over `channel`."""

    engine: Any
    service: Any
    listener: Any
    channel: Any
    stub: Any
    admin: Any


class Gate:
    """In place of an engine's `go_on`: lets some steps pass, and the others once it is set."""

    def __init__(self, num_steps):
        self.num_left = num_steps
        self.opened = asyncio.Event()
        self.set = self.opened.set

    async def wait(self):
        if self.num_left:
            self.num_left -= 1
        else:
            await self.opened.wait()


@pytest.fixture
def serving():
    """`serving(scenario, keys=..., model options)` runs `await scenario(server)` in an event loop of its own."""
    import grpc

    from jaxpaged.entrypoints.grpc.server import GrpcListener
    from jaxpaged.proto.jaxpaged_pb2_grpc import AdminStub, InferenceStub
    from jaxpaged.serving.options import ServerOptions
    from jaxpaged.serving.service import Service, served_model
    from tests.entrypoints.http.async_engine import FakeAsyncEngine

    def serve(
        scenario,
        *,
        options=None,
        keys=(),
        admin_keys=(),
        address="127.0.0.1:0",
        credentials=None,
        client_credentials=None,
        **engine_options,
    ):
        async def run():
            engine = FakeAsyncEngine(**engine_options)
            service = Service(engine, served_model(engine.config, ("fake",)), ServerOptions.from_options(options or {}))
            listener = GrpcListener(service, [address], keys=keys, admin_keys=admin_keys, credentials=credentials)
            await listener.listen()
            running = asyncio.ensure_future(listener.run_until_stopped())
            target = address if address.startswith("unix:") else f"localhost:{listener.ports[0]}"
            channel = (
                grpc.aio.insecure_channel(target)
                if client_credentials is None
                else grpc.aio.secure_channel(target, client_credentials)
            )
            server = GrpcServer(engine, service, listener, channel, InferenceStub(channel), AdminStub(channel))
            try:
                result = await asyncio.wait_for(scenario(server), 30)
                assert len(service.traffic) == 0, "a request is still counted as under way"
                assert not engine.engine.has_unfinished_requests()
                return result
            finally:
                await channel.close()
                listener.should_exit = True
                await running
                engine.shutdown()

        return asyncio.run(run())

    return serve
