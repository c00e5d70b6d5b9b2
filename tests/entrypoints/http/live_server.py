"""The server on a socket, over an engine without a model: in a thread for clients, and as a program for signals."""

import asyncio
import contextlib
import sys
import threading

from jaxpaged.entrypoints.http import server
from jaxpaged.entrypoints.http.app import create_app
from jaxpaged.entrypoints.http.transport.listener import Listener, bind, url_of
from jaxpaged.serving.options import ServerOptions
from jaxpaged.serving.service import Service, served_model
from tests.entrypoints.http.async_engine import FakeAsyncEngine


def make_service(options=None, names=("fake",), **engine_options):
    engine = FakeAsyncEngine(**engine_options)
    return Service(engine, served_model(engine.config, names), ServerOptions.from_options(options or {}))


@contextlib.contextmanager
def live_server(keys=(), app=create_app, **settings):
    """Yields (URL, service) of a server that runs in a thread, with the endpoints of `app`."""
    bound = bind("127.0.0.1", 0)
    bound.listen()  # so that clients may connect before the thread has begun
    service = make_service(**settings)
    listener = Listener(app(service, keys), bound, max_header_bytes=service.options.max_header_bytes)
    thread = threading.Thread(target=lambda: asyncio.run(listener.run_until_stopped()))
    thread.start()
    try:
        yield url_of(bound), service
    finally:
        listener.should_exit = True
        thread.join()
        service.engine.shutdown()


def main():
    """A server that prints its addresses, and whose requests never end until the file of the first argument exists."""
    import pathlib

    options = ServerOptions.from_options({"port": 0, "admin_port": 0, "shutdown_timeout": float(sys.argv[2])})
    sockets = server.Sockets(options)
    gate = pathlib.Path(sys.argv[1])

    async def run():
        service = make_service({"shutdown_timeout": options.shutdown_timeout}, max_model_len=64)
        service.engine.executor.longest_run = 1
        service.engine.go_on = FileGate(gate)
        await server.serve(service, sockets, on_listening=lambda: print(*sockets.urls, flush=True))
        print("aborted", len(service.engine.aborted), flush=True)

    asyncio.run(run())


class FileGate:
    """Opens when a file exists; two steps pass before."""

    def __init__(self, path):
        self.path = path
        self.num_passed = 0

    async def wait(self):
        self.num_passed += 1
        while self.num_passed > 2 and not self.path.exists():
            await asyncio.sleep(0.01)


if __name__ == "__main__":
    main()
