"""Connections that ask slowly, ask nothing, do not read, or are far too many: they go, and others are served."""

import asyncio
import contextlib
import re
import socket
import threading
import time

import pytest

from jaxpaged.entrypoints.http.transport import connections, listener
from jaxpaged.entrypoints.http.transport.connections import Connections, allowed_connections
from jaxpaged.entrypoints.http.transport.listener import Listener, bind

ASKED = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
BIG = 20 * 2**20


async def app(scope, receive, send):
    """/ and its body back; /big is more than any buffer holds; /headers are those that came."""
    body = b""
    while (message := await receive())["type"] == "http.request":
        body += message["body"]
        if not message["more_body"]:
            break
    if scope["path"] == "/headers":
        body = b",".join(name for name, _ in scope["headers"])
    elif scope["path"] == "/big":
        body = b"a" * BIG
    length = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": length})
    for start in range(0, max(len(body), 1), 2**18):
        await send({"type": "http.response.body", "body": body[start : start + 2**18], "more_body": True})
    await send({"type": "http.response.body", "body": b""})


@contextlib.contextmanager
def listening(**settings):
    """`connect` to a server of the application above; it has ended afterwards, whoever is still connected."""
    bound = bind("127.0.0.1", 0)
    bound.listen(2048)
    made = Listener(app, bound, max_header_bytes=2000, **settings)
    thread = threading.Thread(target=lambda: asyncio.run(made.run_until_stopped()))
    thread.start()
    with contextlib.ExitStack() as stack:

        def connect():
            return stack.enter_context(socket.create_connection(bound.getsockname()[:2], timeout=20))

        connect.connections = made.connections
        try:
            yield connect
        finally:
            made.should_exit = made.force_exit = True
            thread.join()


def status(client, data=ASKED):
    client.sendall(data)
    return answer_to(client).split()[1]


def answer_to(client):
    """A short one, whole."""
    answer = b""
    while True:
        piece = client.recv(65536)
        assert piece, answer
        answer += piece
        head, _, body = answer.partition(b"\r\n\r\n")
        if len(body) == int(re.search(rb"content-length: (\d+)", head)[1]):
            return answer


def is_ended(client):
    """Whether the server ended it, with or without an answer."""
    try:
        while client.recv(65536):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


@pytest.fixture
def soon(monkeypatch):
    """Timeouts that a test can wait for."""
    monkeypatch.setattr(listener, "HEADER_TIMEOUT", 0.3)
    monkeypatch.setattr(listener, "WRITE_TIMEOUT", 0.3)


# ---- too many


def test_who_waits_longest_without_asking_makes_room():
    with listening(max_connections=3) as connect:
        asking, *idle = connect(), connect(), connect()
        assert status(asking, b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\na" + b"b") == b"200"
        asking.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\na")  # has a request under way
        time.sleep(0.2)
        later = [connect(), connect()]
        assert all(map(is_ended, idle))
        assert [status(each) for each in later] == [b"200", b"200"]
        asking.sendall(b"b")
        assert answer_to(asking).endswith(b"\r\n\r\nab")


def test_thousands_that_say_nothing_lock_out_nobody():
    with listening(max_connections=100) as connect:
        idle = [connect() for _ in range(1000)]
        assert status(connect()) == b"200"
        assert sum(map(is_ended, idle[:800])) == 800


def test_where_all_have_requests_under_way_the_new_one_goes():
    ended = []

    class One:
        def __init__(self, name):
            self.name = name

        def end(self):
            ended.append(self.name)

    held = Connections(2)
    busy = [One("a"), One("b")]
    for each in busy:
        held.opened(each)
        held.asks(each)
    held.opened(One("new"))
    assert ended == ["new"] and len(held) == 2
    held.waits(busy[0])
    held.opened(One("next"))
    assert ended == ["new", "a"]
    held.waits(busy[0])  # it is gone
    held.closed(busy[1])
    assert len(held) == 1


@pytest.mark.parametrize(
    ("wanted", "limits", "allowed", "raised"),
    [
        (100, (1024, 4096), 100, None),
        (1000, (1024, 4096), 1000, (1256, 4096)),
        (8000, (1024, 4096), 3840, (4096, 4096)),
        (1000, (1024, -1), 1000, (1256, -1)),
        (1000, (-1, -1), 1000, None),
    ],
)
def test_as_many_as_the_system_allows_files(monkeypatch, caplog, wanted, limits, allowed, raised):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    given = []
    monkeypatch.setattr(resource, "setrlimit", lambda which, values: given.append(values))
    assert allowed_connections(wanted) == allowed
    assert given == ([] if raised is None else [raised])
    assert ("ulimit" in caplog.text) == (allowed < wanted)
    assert connections.FILES_BESIDES < 1024


# ---- slow, or silent


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("before", [b"", ASKED], ids=["first", "second"])
@pytest.mark.parametrize("drop", [b"", b"\r\n", b"a"], ids=["nothing", "empty lines", "a name without end"])
def test_who_does_not_come_to_the_end_of_the_headers_is_left(before, drop):
    """Before, an empty line after a request was neither the beginning of one, nor silence: it stayed for ever."""
    with listening() as connect:
        client = connect()
        if before:
            assert status(client) == b"200"
        with contextlib.suppress(ConnectionError):
            for _ in range(20):
                client.sendall(drop)
                time.sleep(0.05)
        client.settimeout(1)
        assert is_ended(client)


@pytest.mark.usefixtures("soon")
def test_who_reads_nothing_is_left_and_the_answer_forgotten():
    with listening() as connect:
        clients = [connect() for _ in range(3)]
        for client in clients:
            client.sendall(ASKED.replace(b"/ ", b"/big "))
        while not len(connect.connections):
            time.sleep(0.01)
        while len(connect.connections):
            time.sleep(0.01)
        for client in clients:
            received = 0
            with contextlib.suppress(ConnectionError):
                while piece := client.recv(2**20):
                    received += len(piece)
            assert received < BIG


def test_who_reads_slowly_gets_all(monkeypatch):
    monkeypatch.setattr(listener, "WRITE_TIMEOUT", 2.0)
    with listening() as connect:
        client, received = connect(), 0
        client.sendall(ASKED.replace(b"/ ", b"/big ").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        while piece := client.recv(2**20):
            received += len(piece)
            time.sleep(0.15)
        assert received > BIG


# ---- what comes after a body

CHUNKED = b"POST /headers HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n"


def test_trailers_are_no_headers():
    with listening() as connect:
        client = connect()
        client.sendall(CHUNKED + b"0\r\nAuthorization: Bearer k\r\nX-Request-Id: b\r\n\r\n")
        answer = answer_to(client)
        assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"host,transfer-encoding")


@pytest.mark.parametrize("piece", [b"x: y\r\n", b"a"], ids=["many", "long"])
@pytest.mark.parametrize("start", [b"0\r\nname: ", b"1;extension="], ids=["trailers", "extension of a chunk"])
def test_trailers_without_end_are_refused(start, piece):
    """Before, the parser's library collected them as long as they came."""
    with listening() as connect:
        client = connect()
        client.sendall(CHUNKED + start)
        answer = b""
        with contextlib.suppress(ConnectionError):
            for _ in range(50):
                client.sendall(piece * 1000)
                time.sleep(0.002)
        with contextlib.suppress(ConnectionError):
            answer = client.recv(65536)
        assert answer[:12] in (b"HTTP/1.1 431", b"HTTP/1.1 400", b"")
        assert is_ended(client)


def test_a_body_in_small_chunks_is_no_such_thing():
    with listening() as connect:
        client = connect()
        client.sendall(CHUNKED.replace(b"/headers", b"/"))
        for _ in range(3000):
            client.sendall(b"1\r\nb\r\n")
        client.sendall(b"0\r\n\r\n")
        answer = b""
        while not answer.endswith(b"abbb" + b"b" * 2997):
            answer += client.recv(65536)
        assert answer.startswith(b"HTTP/1.1 200")
