import contextlib
import os
import socket
import ssl
import threading
import time

import pytest

from jaxpaged.errors import ConfigError, RequestError
from jaxpaged.multimodal.fetching import FetchError, FetchLimits, MediaFetcher, is_public, place_of
from tests.multimodal.local_server import PUBLIC, LocalServer, Network, certificate

FIELD = "image_url"
BODY = bytes(range(256)) * 40


@pytest.fixture
def serve():
    servers = []

    def start(script, tls=None):
        servers.append(LocalServer(script, tls))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def sends(data: bytes):
    return lambda connection, _: connection.sendall(data)


def response(body=BODY, status="200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def redirects_to(location: str):
    return sends(response(b"", "302 Found", f"Location: {location}"))


def fetcher(network, *domains, **options) -> MediaFetcher:
    return MediaFetcher(domains or ("pictures.example",), resolve=network.resolve, connect=network.connect, **options)


def refusal(of: MediaFetcher, url: str, kind=FetchError) -> str:
    with pytest.raises(RequestError) as caught:
        of.fetch(url, FIELD)
    assert type(caught.value) is kind, caught.value
    assert caught.value.parameter == FIELD and str(caught.value).startswith(FIELD)
    for secret in ("127.0.0.1", "10.0.0", "169.254", "Errno", "ssl", "Traceback"):
        assert secret not in str(caught.value)
    return str(caught.value)


def test_a_picture_is_fetched_from_the_address_that_was_checked_with_the_name_as_host(serve):
    server = serve(sends(response()))
    network = Network(server)
    assert fetcher(network).fetch("http://Pictures.example:8080/a%20b/ü.png?x=1&y=ä#part", FIELD) == BODY
    assert network.resolved == [("pictures.example", 8080)] and network.connected == [(PUBLIC, 8080)]
    (request,) = server.requests
    assert request.startswith(b"GET /a%20b/%C3%BC.png?x=1&y=%C3%A4 HTTP/1.1\r\n")
    assert b"\r\nHost: pictures.example:8080\r\n" in request and request.count(b"Host:") == 1


def test_bodies_in_chunks_and_without_a_length_are_read_whole(serve):
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (BODY[:7], BODY[7:])) + b"0\r\n\r\n"
    for data in (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks,
        b"HTTP/1.0 200 OK\r\n\r\n" + BODY,
        b"HTTP/1.1 100 Continue\r\n\r\n" + response(),
    ):
        assert fetcher(Network(serve(sends(data)))).fetch("http://pictures.example/a.png", FIELD) == BODY


def test_nothing_is_fetched_until_hosts_are_named(serve):
    network = Network(serve(sends(response())))
    none = MediaFetcher(resolve=network.resolve, connect=network.connect)
    assert "--allowed-media-domains" in refusal(none, "http://pictures.example/a.png", RequestError)
    one = fetcher(network)
    for host in (
        "other.example",
        "pictures.example.evil.example",
        "sub.pictures.example",
        "127.0.0.1",
        "[::1]",
        "xn--a",
    ):
        with pytest.raises(RequestError, match="which is not among --allowed-media-domains"):
            one.fetch(f"http://{host}/", FIELD)
    assert network.resolved == []
    any_host = fetcher(network, "*")
    assert any_host.fetch("http://other.example/", FIELD) == BODY
    assert one.fetch("http://PICTURES.example./a", FIELD) == BODY


@pytest.mark.parametrize(
    "url",
    [
        "http://pictures.example\\@evil.example/",
        "http://user@pictures.example/",
        "http://user:word@pictures.example/",
        "http://pictures.example:99999/",
        "http://pictures.example:0/",
        "http://pictures.example:x/",
        "http://pictures.example/a\r\nHost: evil",
        "http://pictures.example/a b",
        "http:///a.png",
        "http:pictures.example",
        "http://[::1/",
        "http://[zz]/",
        "http://pictures.example%00.evil/",
        "http://-/",
        "http://" + "ä" * 300 + "/",
    ],
)
def test_malformed_urls_are_refused_and_nothing_is_looked_up(serve, url):
    network = Network(serve(sends(response())))
    assert "no valid URL" in refusal(fetcher(network, "*"), url, RequestError)
    assert network.resolved == []


@pytest.mark.parametrize("url", ["ftp://pictures.example/", "gopher://x/", "javascript:1", "a.png", "", "//x/y"])
def test_other_schemes_are_refused(serve, url):
    assert "begins" in refusal(fetcher(Network(serve(sends(response()))), "*"), url, RequestError)


# ---- addresses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        *["127.0.0.1", "127.8.9.1", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254"],
        *["100.64.0.1", "100.127.255.255", "192.0.2.1", "198.18.0.1", "192.88.99.1", "224.0.0.1", "240.0.0.1"],
        *["255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fec0::1", "ff02::1"],
        *["::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "2002:7f00:1::", "2002:808:808::1"],
        *["64:ff9b::7f00:1", "64:ff9b::808:808", "64:ff9b:1::7f00:1", "2001:0:1::1", "2001:db8::1", "name", ""],
    ],
)
def test_addresses_that_are_not_public_are_refused(serve, address):
    assert not is_public(address)
    for answer in ([address], [PUBLIC, address], [address, PUBLIC]):
        network = Network(serve(sends(response())), answer)
        assert "no public address" in refusal(fetcher(network), "http://pictures.example/")
        assert network.connected == []


@pytest.mark.parametrize("address", ["8.8.8.8", "93.184.215.14", "100.63.255.255", "100.128.0.0", "2606:4700::1111"])
def test_public_addresses_are_fetched_from(serve, address):
    network = Network(serve(sends(response())), [address])
    assert fetcher(network).fetch("https://pictures.example/".replace("https", "http"), FIELD) == BODY
    assert network.connected == [(address, 80)]


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "2130706433", "0x7f000001", "0x7f.1", "127.1", "0177.0.0.1", "[::1]"]
)
def test_loopback_is_refused_in_every_spelling_by_the_systems_resolver(host):
    opened = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        real = MediaFetcher(["*"], connect=lambda *to: opened.append(to))
        assert "no public address" in refusal(real, f"http://{host}:{listener.getsockname()[1]}/")
    assert opened == []


def test_a_name_that_changes_its_address_is_looked_up_once_a_hop(serve):
    network = Network(serve(sends(response())), [PUBLIC], ["127.0.0.1"])
    assert fetcher(network).fetch("http://pictures.example/", FIELD) == BODY
    assert len(network.resolved) == 1 and network.connected == [(PUBLIC, 80)]


def test_a_name_that_changes_its_address_between_hops_is_refused_at_the_second(serve):
    network = Network(serve(redirects_to("/again")), [PUBLIC], ["169.254.169.254"])
    assert "no public address" in refusal(fetcher(network), "http://pictures.example/")
    assert network.connected == [(PUBLIC, 80)]


def test_the_next_address_is_tried_when_one_does_not_answer(serve):
    network = Network(serve(sends(response())), ["8.8.8.8", PUBLIC])

    def connect(address, port, seconds):
        if address == "8.8.8.8":
            raise ConnectionRefusedError
        return network.connect(address, port, seconds)

    of = MediaFetcher(["*"], resolve=network.resolve, connect=connect)
    assert of.fetch("http://pictures.example/", FIELD) == BODY
    network = Network(serve(sends(response())), ["8.8.8.8"])
    of = MediaFetcher(["*"], resolve=network.resolve, connect=connect)
    assert "cannot be reached" in refusal(of, "http://pictures.example/")


# ---- redirects ---------------------------------------------------------------------------------------


def test_redirects_are_followed_and_each_hop_is_checked(serve):
    hops = iter([response(b"", "301 Moved", "Location: //cdn.example:81/x/y.png"), response()])
    server = serve(lambda connection, _: connection.sendall(next(hops)))
    network = Network(server)
    assert fetcher(network, "pictures.example", "cdn.example").fetch("http://pictures.example/a", FIELD) == BODY
    assert network.resolved == [("pictures.example", 80), ("cdn.example", 81)]
    assert b"GET /x/y.png " in server.requests[1] and b"Host: cdn.example:81\r\n" in server.requests[1]


@pytest.mark.parametrize(
    "location",
    ["http://127.0.0.1/", "http://secret.internal/", "file:///etc/passwd", "ftp://pictures.example/", "http://[/", " "],
)
def test_redirects_to_hosts_and_schemes_that_are_not_allowed_are_refused(serve, location):
    network = Network(serve(redirects_to(location)))
    message = refusal(fetcher(network), "http://pictures.example/")
    assert "secret" not in message and len(network.connected) == 1


def test_a_redirect_to_loopback_is_refused_where_any_host_is_allowed(serve):
    server = serve(lambda connection, _: connection.sendall(response(b"", "307 T", f"Location: {inside}")))
    inside = f"http://127.0.0.1:{server.port}/"
    network = Network(server, [PUBLIC], ["127.0.0.1"])
    assert "no public address" in refusal(fetcher(network, "*"), "http://pictures.example/")
    assert len(server.requests) == 1


def test_more_redirects_than_allowed_are_refused(serve):
    server = serve(redirects_to("/round"))
    assert "more than 2 times" in refusal(
        fetcher(Network(server), limits=FetchLimits(max_redirects=2)), "http://pictures.example/"
    )
    assert len(server.requests) == 3


# ---- TLS ---------------------------------------------------------------------------------------------


def test_tls_asks_for_the_name_and_checks_the_certificate_against_it(serve, tmp_path):
    cert, key = certificate(tmp_path, "pictures.example")
    server_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_tls.load_cert_chain(cert, key)
    hops = iter([response(), response(b"", "302 Found", "Location: http://pictures.example/")])
    server = serve(lambda connection, _: connection.sendall(next(hops)), server_tls)
    network = Network(server)
    trusting = ssl.create_default_context(cafile=str(cert))
    of = fetcher(network, "*", tls=trusting)
    assert of.fetch("https://pictures.example/a", FIELD) == BODY
    assert server.names == ["pictures.example"] and network.connected == [(PUBLIC, 443)]
    assert b"Host: pictures.example\r\n" in server.requests[0]
    assert "may be fetched" in refusal(of, "https://pictures.example/a")  # no way back to http
    assert "certificate is not valid" in refusal(of, "https://other.example/a")
    assert "certificate is not valid" in refusal(fetcher(network), "https://pictures.example/a")


# ---- slow, large and lying servers -------------------------------------------------------------------


def drips(head: bytes):
    def script(connection, _):
        connection.sendall(head)
        with contextlib.suppress(OSError):
            while True:
                connection.sendall(b"x")
                time.sleep(0.02)

    return script


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nX: ",
        b"HTTP/1.1 200 OK\r\nContent-Length: 999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffff\r\n",
    ],
)
def test_a_slow_server_is_left_at_the_time_limit_of_the_whole(serve, head):
    of = fetcher(Network(serve(drips(head))), limits=FetchLimits(seconds=0.3))
    assert "within 0.3 s" in refusal(of, "http://pictures.example/")


def test_a_server_that_says_nothing_is_left_with_and_without_tls(serve):
    silent = serve(lambda connection, _: connection.recv(1))
    of = fetcher(Network(silent), limits=FetchLimits(seconds=0.3))
    assert "within 0.3 s" in refusal(of, "http://pictures.example/")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        of = MediaFetcher(
            ["*"],
            limits=FetchLimits(seconds=0.3),
            resolve=lambda *_: [PUBLIC],
            connect=lambda _a, _p, seconds: socket.create_connection(listener.getsockname(), timeout=seconds),
        )
        assert "within 0.3 s" in refusal(of, "https://pictures.example/")


def test_no_thread_is_left_behind(serve):
    before = {each for each in threading.enumerate() if isinstance(each, threading.Timer)}
    server = serve(sends(response()))
    for _ in range(5):
        fetcher(Network(server)).fetch("http://pictures.example/", FIELD)
    assert {each for each in threading.enumerate() if isinstance(each, threading.Timer)} <= before


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (response(status="404 Not Found"), "answers 404"),
        (response(status="500 Oops"), "answers 500"),
        (response(status="206 Partial"), "answers 206"),
        (response(b"", "302 Found"), "answers 302"),
        (response(BODY[:-1]).replace(b"10239", b"10240"), "broke off"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\nxx", "more than 10240 bytes"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + bytes(10241), "more than 10240 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n" + bytes(10241), "more than 10240 bytes"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nxx", "broke off"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\nxx", "compressed"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n", "broke off"),
        (b"SSH-2.0-x\r\n", "broke off"),
        (b"", "broke off"),
    ],
)
def test_answers_that_are_no_picture_give_one_clear_error(serve, data, words):
    of = fetcher(Network(serve(sends(data))), limits=FetchLimits(max_bytes=10240))
    assert words in refusal(of, "http://pictures.example/")


def test_a_length_that_is_too_short_ends_the_body_there(serve):
    data = response().replace(b"Content-Length: 10240", b"Content-Length: 100")
    assert fetcher(Network(serve(sends(data)))).fetch("http://pictures.example/", FIELD) == BODY[:100]


# ---- files -------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    inside = tmp_path / "media"
    (inside / "deep").mkdir(parents=True)
    (inside / "deep" / "a b.png").write_bytes(BODY)
    (tmp_path / "media-secret").write_bytes(b"secret")
    (tmp_path / "secret").write_bytes(b"secret")
    return inside


def test_files_below_the_allowed_folder_are_read(folder):
    of = MediaFetcher(allowed_local_media_path=str(folder))
    for url in (f"file://{folder}/deep/a%20b.png", f"FILE://localhost{folder}/deep/../deep/a b.png"):
        assert of.fetch(url, FIELD) == BODY
    os.symlink("deep", folder / "link")
    assert of.fetch(f"file://{folder}/link/a%20b.png", FIELD) == BODY


def test_files_elsewhere_are_refused(folder):
    of = MediaFetcher(allowed_local_media_path=str(folder))
    os.symlink(folder.parent / "secret", folder / "out")
    os.symlink("..", folder / "up")
    os.symlink("loop", folder / "loop")
    os.mkfifo(folder / "pipe")
    names = ("out", "up/secret", "loop", "pipe", "deep", "", "../secret", "%2e%2e/secret", "../media-secret")
    for name in (*names, "missing", "deep/a%20b.png/x", "deep%00", "%ff", "out?x", "out#x"):
        message = refusal(of, f"file://{folder}/{name}", RequestError)
        assert str(folder) not in message and "below --allowed-local-media-path" in message
    for url in ("file:///etc/passwd", "file://elsewhere/x", "file:relative", "file://[", "file:"):
        refusal(of, url, RequestError)


def test_a_link_put_in_the_path_after_it_was_checked_leads_nowhere(folder, monkeypatch):
    os.symlink(folder.parent, folder / "up")
    monkeypatch.setattr(os.path, "realpath", lambda path: path)
    of = MediaFetcher(allowed_local_media_path=str(folder))
    refusal(of, f"file://{folder}/up/secret", RequestError)
    os.symlink(folder.parent / "secret", folder / "out")
    refusal(of, f"file://{folder}/out", RequestError)


def test_files_are_refused_without_a_folder_and_when_they_are_too_large(folder):
    assert "--allowed-local-media-path" in refusal(MediaFetcher(["*"]), f"file://{folder}/deep/a%20b.png", RequestError)
    small = MediaFetcher(allowed_local_media_path=str(folder), limits=FetchLimits(max_bytes=len(BODY) - 1))
    assert "more than" in refusal(small, f"file://{folder}/deep/a%20b.png", RequestError)


def test_an_allowed_folder_that_is_none_is_refused(folder):
    with pytest.raises(ConfigError, match="no folder"):
        MediaFetcher(allowed_local_media_path=str(folder / "deep" / "a b.png"))


def test_ipv6_literals_keep_their_brackets_in_the_host_header():
    place = place_of("http://[2606:4700::1111]:8080/x")
    assert place.host == "2606:4700::1111" and place.host_header == "[2606:4700::1111]:8080"
