"""Servers for benchmarks: one that says what a test wants, and ours over an engine without a model, in threads."""

import asyncio
import contextlib
import importlib.util
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from jaxpaged.entrypoints.cli import main

NEEDED = ("httptools", "starlette", "uvicorn", "grpc", "grpc_health", "grpc_reflection")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
collect_ignore_glob = ["test_http_client.py", "test_serve_command.py", "test_sweep*.py"] if MISSING else []


def answer(*texts, prompt_tokens=4):
    """The parts of a streamed completion."""
    events = [{"choices": [{"index": 0, "text": text}]} for text in texts]
    usage = {"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": len(texts)}}
    return [f"data: {json.dumps(event)}\n\n".encode() for event in [*events, usage]] + [b"data: [DONE]\n\n"]


class ScriptedHandler(BaseHTTPRequestHandler):
    """Asks `server.script(path, body, headers)` for (status, parts); a part None closes the connection."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self._reply(*self.server.script(self.path, None, self.headers))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append(body)
        self._reply(*self.server.script(self.path, body, self.headers))

    def _reply(self, status, parts):
        self.server.ports.append(self.client_address[1])
        self.send_response(status)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for part in parts:
            if part is None:
                self.close_connection = True
                return
            self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *args):
        """Nothing is logged."""


@pytest.fixture
def scripted():
    """`scripted(script)`: a server; `.url`, the bodies that it has `.seen`, and its clients' `.ports`."""
    servers = []

    def start(script):
        server = ThreadingHTTPServer(("127.0.0.1", 0), ScriptedHandler)
        server.daemon_threads = True
        server.script, server.seen, server.ports = script, [], []
        server.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def live_grpc(keys=(), **settings):
    """The place of our gRPC server, which runs in a thread."""
    from jaxpaged.entrypoints.grpc.server import GrpcListener
    from tests.entrypoints.http.live_server import make_service

    started, place = threading.Event(), []

    async def serve():
        listener = GrpcListener(make_service(**settings), ["127.0.0.1:0"], keys=keys, admin_keys=(), credentials=None)
        await listener.listen()
        loop = asyncio.get_running_loop()  # another thread must wake it
        stop = lambda: loop.call_soon_threadsafe(setattr, listener, "should_exit", True)
        place.extend([stop, f"127.0.0.1:{listener.ports[0]}"])
        started.set()
        await listener.run_until_stopped()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    started.wait(30)
    try:
        yield place[1]
    finally:
        place[0]()
        thread.join()


@pytest.fixture
def bench(capsys, monkeypatch):
    """`bench("serve", ...)`: (status, what was printed, what was said on standard error)."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def run(*arguments):
        try:
            status = main(["bench", *arguments])
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return run
