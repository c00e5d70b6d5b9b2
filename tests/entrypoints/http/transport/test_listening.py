"""TLS, Unix sockets, and a server below a path."""

import asyncio
import contextlib
import http.client
import os
import shutil
import socket
import ssl
import stat
import threading

import pytest

from jaxpaged.entrypoints.http import server
from jaxpaged.entrypoints.http.app import create_app
from jaxpaged.entrypoints.http.transport.listener import Listener, bind_unix
from jaxpaged.entrypoints.http.transport.tls import tls_settings
from jaxpaged.errors import ConfigError, UsageError
from jaxpaged.serving.options import ServerOptions
from tests.entrypoints.http.live_server import make_service

openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


@contextlib.contextmanager
def listening(loop_factory=None, **given):
    """The sockets of a server that runs with these options, as `jaxpaged serve` runs it."""
    options = ServerOptions.from_options({"port": 0, **given})
    sockets = server.Sockets(options)
    sockets.public.listen()  # so that clients may connect before the thread has begun
    service = make_service(given)
    [listener] = server.make_listeners(service, sockets, (), ())
    assert isinstance(listener, Listener)

    def run():
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(listener.run_until_stopped())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield sockets
    finally:
        listener.should_exit = True
        thread.join()
        sockets.close()


def get(sockets, path="/health", context=None):
    host, port = sockets.public.getsockname()[:2]
    connection = http.client.HTTPSConnection(host, port, context=context, timeout=20)
    with contextlib.closing(connection):
        connection.request("GET", path)
        return connection.getresponse().status


@openssl
def test_https_with_a_certificate(pem):
    certificate, key = pem("server")
    with listening(ssl_certfile=certificate, ssl_keyfile=key) as sockets:
        assert sockets.urls[0].startswith("https://127.0.0.1:")
        assert get(sockets, context=ssl.create_default_context(cafile=certificate)) == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            get(sockets, context=ssl.create_default_context())


@openssl
def test_clients_may_have_to_show_a_certificate(pem):
    certificate, key = pem("server")
    given = {"ssl_certfile": certificate, "ssl_keyfile": key, "ssl_ca_certs": pem("client")[0], "ssl_cert_reqs": 2}
    with listening(**given) as sockets:
        context = ssl.create_default_context(cafile=certificate)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            get(sockets, context=context)
        context.load_cert_chain(*pem("client"))
        assert get(sockets, context=context) == 200


@openssl
def test_tls_files_that_do_not_serve_are_named_before_anything_is_loaded(pem, tmp_path):
    certificate, key = pem("server")
    (tmp_path / "empty").write_text("")
    for given, words in (
        ({"ssl_keyfile": key}, "--ssl-keyfile is given without a certificate"),
        ({"ssl_cert_reqs": 2}, "--ssl-cert-reqs is given without"),
        ({"ssl_certfile": "/no/file"}, "cannot read /no/file: .*--ssl-certfile"),
        ({"ssl_certfile": certificate, "ssl_keyfile": pem("client")[1]}, "no certificate and its key"),
        ({"ssl_certfile": certificate}, "no certificate and its key"),
        ({"ssl_certfile": certificate, "ssl_keyfile": key, "ssl_cert_reqs": 2}, "--ssl-ca-certs"),
        ({"ssl_certfile": certificate, "ssl_keyfile": key, "ssl_ca_certs": str(tmp_path / "empty")}, "no certificates"),
    ):
        with pytest.raises(UsageError, match=words):
            server.Sockets(ServerOptions.from_options({"port": 0, **given}))
    assert tls_settings(ServerOptions()) == {}


def loops():
    yield None
    with contextlib.suppress(ImportError):
        import uvloop

        yield uvloop.new_event_loop


@pytest.mark.parametrize("loop_factory", list(loops()))
def test_a_unix_socket_serves_and_goes_with_the_server(short_path, loop_factory):
    path = short_path / "s"
    with listening(loop_factory, uds=str(path)) as sockets:
        assert sockets.urls == [f"unix:{path}"]
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(20)
            client.connect(str(path))
            client.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        with pytest.raises(UsageError, match="in use.*--uds"):
            bind_unix(str(path))
    assert not path.exists()


def test_a_socket_that_nobody_listens_on_is_replaced_and_nothing_else_is(short_path):
    path = str(short_path / "s")
    with bind_unix(path):
        pass
    assert os.path.exists(path), "as a server leaves it that was killed"
    bind_unix(path).close()
    (short_path / "file").write_text("precious")
    with pytest.raises(UsageError, match="is no socket"):
        bind_unix(str(short_path / "file"))
    assert (short_path / "file").read_text() == "precious"
    with pytest.raises(UsageError, match="No such file.*--uds"):
        bind_unix(str(short_path / "no folder" / "s"))


@pytest.mark.parametrize("below", ["", "/llm"])
def test_a_server_below_a_path_answers_whether_the_proxy_takes_the_path_away_or_not(serving, below):
    async def scenario(client_of):
        client = client_of.client
        bodies = [(await client.get(f"{below}{path}")).status for path in ("/health", "/ready", "/v1/models", "/llmx")]
        document = (await client.get(f"{below}/openapi.json", authorization="Bearer k")).json
        error = (await client.post(f"{below}/v1/messages", {}, authorization="Bearer k")).json
        return bodies, document["servers"], error["type"]

    options = {"root_path": "/llm"}
    assert serving(scenario, options=options, keys=["k"]) == ([200, 200, 401, 401], [{"url": "/llm"}], "error")


@pytest.mark.parametrize("path", ["llm", "/llm/", "/"])
def test_a_root_path_that_is_none_is_refused(path):
    with pytest.raises(ConfigError, match="root_path is .*begin with a slash"):
        ServerOptions.from_options({"root_path": path})


def test_without_a_root_path_nothing_looks_for_one():
    assert create_app(make_service()).user_middleware[0].cls.__name__ == "CountRequests"
