"""The process: sockets, protocol limits, signals, keys."""

import asyncio
import http.client
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpaged.entrypoints.http import server
from jaxpaged.entrypoints.http.transport import listener
from jaxpaged.entrypoints.http.transport.listener import bind, url_of
from jaxpaged.errors import ConfigError, UsageError
from jaxpaged.serving.options import ServerOptions
from tests.entrypoints.http.live_server import live_server

ROOT = Path(__file__).parents[3]
BODY = json.dumps({"prompt": "the cat", "max_tokens": 20, "stream": True, "ignore_eos": True})
JSON = {"Content-Type": "application/json"}


@pytest.fixture(autouse=True)
def close_connections(monkeypatch):
    made = []

    class Recorded(http.client.HTTPConnection):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(http.client, "HTTPConnection", Recorded)
    yield
    for each in made:
        each.close()


def connect(url):
    return http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)


def get(url, path):
    connection = connect(url)
    connection.request("GET", path)
    return connection.getresponse().status


# ---- protocol


@pytest.fixture(scope="module")
def url():
    with live_server(options={"max_header_bytes": 2000, "max_body_bytes": 3000}) as (url, _):
        yield url


def exchange(url, data):
    """What the server answers to raw bytes, until it closes the connection."""
    host, _, port = url.removeprefix("http://").partition(":")
    received = b""
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(data)
        while piece := connection.recv(65536):
            received += piece
    return received


@pytest.mark.parametrize("cut", [True, False])
def test_long_headers_are_refused_whether_they_end_or_not(url, cut):
    answer = exchange(url, b"GET /health HTTP/1.1\r\nHost: a\r\nX-Long: " + b"a" * 3000 + (b"" if cut else b"\r\n\r\n"))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431") and json.loads(body)["error"]["code"] == 431


def test_many_short_headers_are_refused_too(url):
    headers = b"".join(b"X-%d: a\r\n" % i for i in range(500))
    assert exchange(url, b"GET /health HTTP/1.1\r\nHost: a\r\n" + headers + b"\r\n").startswith(b"HTTP/1.1 431")


def test_what_is_not_http_is_refused(url):
    assert exchange(url, b"hello\r\n\r\n").startswith(b"HTTP/1.1 400")


HOST = b"Host: a\r\n"


@pytest.mark.parametrize(
    ("hosts", "version", "status"),
    [
        (b"", b"1.1", 400),
        (HOST, b"1.1", 200),
        (HOST * 2, b"1.1", 400),
        (HOST + b"HOST: b\r\n", b"1.1", 400),
        (b"", b"1.0", 200),
        (HOST * 2, b"1.0", 400),
        (b"Host: a b\r\n", b"1.1", 400),
        (b"Host: a/b\r\n", b"1.1", 400),
        (b"Host:\r\n", b"1.1", 200),
        (b"Host: [::1]:80\r\n", b"1.1", 200),
        (b"Host: \xff\r\n", b"1.1", 400),
    ],
)
def test_a_request_names_one_host(url, hosts, version, status):
    """Before, no Host and two were served. A body that follows a refusal is not looked at."""
    body = b'{"prompt": "a"}'
    head = b"POST /tokenize HTTP/%b\r\n%bContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n"
    answer = exchange(url, head % (version, hosts, len(body)) + b"\r\n" + body)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert answer.count(b"HTTP/1.1") == 1 and (status == 200 or json.loads(answer.partition(b"\r\n\r\n")[2])["error"])


def test_what_comes_after_a_refused_request_on_its_connection_is_not_served(url):
    good = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    for bad in (b"GET /health HTTP/1.1\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 3000 + b"\r\n\r\n"):
        assert exchange(url, bad + good).count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("announced", [True, False])
def test_a_long_body_gives_413_announced_or_not(url, announced):
    connection = connect(url)
    body = b" " * 5000
    connection.request("POST", "/tokenize", body if announced else iter([body]), JSON)
    answer = connection.getresponse()
    assert answer.status == 413 and json.loads(answer.read())["error"]["type"] == "RequestTooLargeError"


LONG = 24 * 2**20
"""More bytes than sockets hold: a client that sends so much first waits for the server to read it."""


@pytest.mark.parametrize("close", [b"", b"Connection: close\r\n"])
@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize(("path", "status"), [(b"/tokenize", 413), (b"/v1/nothing", 404), (b"/health", 405)])
def test_a_client_that_sends_its_whole_body_first_reads_its_answer(url, path, status, announced, close):
    """Before, the socket was closed over what was not read, which takes back the answer: a reset connection."""
    body = b"Content-Length: %d\r\n\r\n" % LONG if announced else b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % LONG
    end = b"" if announced else b"\r\n0\r\n\r\n"
    head = b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n%b" % (path, close)
    answer = start_of_answer(url, head + body + b" " * LONG + end)
    assert answer.startswith(b"HTTP/1.1 %d " % status) and json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


@pytest.mark.parametrize("headers", [b"", b"Host: a\r\nX-Long: " + b"a" * 3000 + b"\r\n"])
def test_so_does_one_whose_headers_are_refused(url, headers):
    """And one on a connection that served a request before, for which the server is not just waiting."""
    bad = b"POST /tokenize HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n" % (headers, LONG)
    assert b'"error"' in start_of_answer(url, bad + b" " * LONG)
    good = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
    assert b'"error"' in start_of_answer(url, bad + b" " * LONG, before=good)


def start_of_answer(url, data, before=b""):
    """What comes first after all of `data` was sent, on a connection on which `before` was answered."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        if before:
            connection.sendall(before)
            assert connection.recv(65536)
        connection.sendall(data)
        received = connection.recv(65536)
        while b"}" not in received:
            received += connection.recv(65536)
    return received


def test_who_goes_on_sending_is_left_after_a_while(url, monkeypatch):
    monkeypatch.setattr(listener, "HEADER_TIMEOUT", 0.3)
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        head = b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b"Content-Length: 99999999999\r\n\r\n")
        with pytest.raises(OSError):
            send_for_ever(connection)


def send_for_ever(connection):
    while True:
        connection.sendall(b" " * 65536)


def test_a_connection_serves_several_requests(url):
    connection = connect(url)
    for _ in range(3):
        connection.request("POST", "/tokenize", '{"prompt": "the cat"}', JSON)
        assert json.loads(connection.getresponse().read())["count"] > 0


def test_a_client_that_closes_its_socket_aborts_its_request():
    with live_server() as (url, service):
        service.engine.executor.longest_run = 1
        connection = connect(url)
        connection.request("POST", "/v1/completions", BODY.replace("20", "50"), JSON)
        connection.getresponse().readline()
        connection.close()
        assert wait_for(lambda: len(service.traffic) == 0)


def wait_for(condition, seconds=10):
    import time

    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


# ---- options and sockets


def test_a_taken_address_is_named_before_anything_is_loaded():
    taken = bind("127.0.0.1", 0)
    taken.listen()
    port = taken.getsockname()[1]
    with pytest.raises(UsageError, match=f"127.0.0.1:{port}.*--port"):
        server.Sockets(ServerOptions(port=port))
    with pytest.raises(UsageError, match="--admin-port"):
        server.Sockets(ServerOptions(port=0, admin_port=port))
    with pytest.raises(UsageError, match="--host"):
        bind("no.such.host.invalid", 0)
    with pytest.raises(UsageError, match="Choose another --host"):
        bind("192.0.2.1", 0)  # an address of nobody's
    taken.close()


def test_no_socket_stays_open_when_the_second_cannot_be_had(monkeypatch):
    taken, opened = bind("127.0.0.1", 0), []
    taken.listen()

    def recorded(*address):
        opened.append(bind(*address))
        return opened[-1]

    monkeypatch.setattr(server, "bind", recorded)
    with taken, pytest.raises(UsageError, match="--admin-port"):
        server.Sockets(ServerOptions(port=0, admin_port=taken.getsockname()[1]))
    assert [each.fileno() for each in opened] == [-1]


def test_the_server_listens_on_the_loopback_address_unless_told_otherwise():
    sockets = server.Sockets(ServerOptions(port=0))
    assert sockets.urls == [url_of(sockets.public)] and sockets.urls[0].startswith("http://127.0.0.1:")
    sockets.public.close()


def test_keys_come_from_flags_and_from_a_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text("one\n\n  two \n")
    options = ServerOptions.from_options({"api_key": ("zero",), "api_key_file": str(file)})
    assert server.api_keys(options) == ["zero", "one", "two"]
    file.write_text("\n")
    with pytest.raises(UsageError, match="holds no key"):
        server.api_keys(ServerOptions(api_key_file=str(file)))
    with pytest.raises(UsageError, match="cannot read"):
        server.api_keys(ServerOptions(api_key_file=str(tmp_path / "none")))
    with pytest.raises(UsageError, match="empty"):
        server.api_keys(ServerOptions(api_key=("",)))


@pytest.mark.parametrize(
    "options", [{"port": 70000}, {"shutdown_timeout": -1.0}, {"max_body_bytes": 0}, {"host": ""}, {"api_key": ()}]
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        ServerOptions.from_options(options)


# ---- coming to rest


class Program:
    """The server as a process, with one stream under way."""

    def __init__(self, gate, timeout):
        command = [sys.executable, "-m", "tests.entrypoints.http.live_server", str(gate), str(timeout)]
        self.gate = gate
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self.url, self.admin = self.process.stdout.readline().split()
        self.connection = connect(self.url)
        self.connection.request("POST", "/v1/completions", BODY, JSON)
        self.answer = self.connection.getresponse()
        self.answer.readline()

    def stop(self):
        self.process.send_signal(signal.SIGTERM)

    def end(self):
        """(exit status, how many requests were aborted, the rest of the stream)"""
        rest = self.answer.read().decode()
        out, _ = self.process.communicate(timeout=20)
        return self.process.returncode, int(out.split()[-1]), rest


@pytest.fixture
def program(tmp_path):
    started = []

    def start(timeout):
        started.append(Program(tmp_path / "gate", timeout))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.communicate()


def test_after_sigterm_requests_finish_while_the_probes_send_new_ones_elsewhere(program):
    running = program(timeout=20)
    assert (get(running.url, "/ready"), get(running.admin, "/ready")) == (200, 200)
    running.stop()
    assert wait_for(lambda: get(running.url, "/ready") == 503)
    assert get(running.url, "/health") == 200
    refused = connect(running.url)
    refused.request("POST", "/v1/completions", BODY, JSON)
    assert refused.getresponse().status == 503
    running.gate.touch()
    status, num_aborted, rest = running.end()
    assert (status, num_aborted) == (0, 0)
    assert '"finish_reason":"length"' in rest and rest.endswith("data: [DONE]\n\n")


def test_what_does_not_finish_in_time_is_aborted_and_told_so(program):
    running = program(timeout=0.2)
    running.stop()
    assert wait_for(lambda: get(running.url, "/ready") == 503)
    status, num_aborted, rest = running.end()
    assert (status, num_aborted) == (0, 1)
    assert '"finish_reason":"abort"' in rest and rest.endswith("data: [DONE]\n\n")


def test_a_second_signal_aborts_at_once(program):
    running = program(timeout=1000)
    running.stop()
    assert wait_for(lambda: get(running.url, "/ready") == 503)
    running.stop()
    status, num_aborted, rest = running.end()
    assert (status, num_aborted) == (0, 1) and '"finish_reason":"abort"' in rest


def test_an_idle_server_stops_at_once():
    async def scenario():
        from tests.entrypoints.http.live_server import make_service

        service, stop = make_service(), server.StopRequests()
        stop.on_signal()
        await asyncio.wait_for(server.come_to_rest(service, stop), 5)
        return service.traffic.draining

    assert asyncio.run(scenario())


def test_a_server_must_have_something_to_serve():
    with pytest.raises(UsageError, match="--no-http leaves nothing"):
        server.Sockets(ServerOptions(http=False))


def test_without_http_only_grpc_has_an_address(short_path):
    file = str(short_path / "x.sock")
    sockets = server.Sockets(ServerOptions(http=False, grpc_port=0, grpc_uds=file))
    assert sockets.public is None and sockets.urls == []
    [port, path] = sockets.grpc_addresses
    assert port.startswith("127.0.0.1:") and path == f"unix:{file}"
    with pytest.raises(UsageError, match="Choose another --grpc-uds"):
        server.Sockets(ServerOptions(port=0, grpc_uds=__file__))
    sockets.release_grpc()
    assert sockets.grpc_addresses == [port, path] and not (short_path / "x.sock").exists()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(port.partition(":")[2])))  # nobody holds it any more
        with pytest.raises(UsageError, match="Choose another --grpc-port"):
            server.Sockets(ServerOptions(port=0, grpc_port=taken.getsockname()[1]))
