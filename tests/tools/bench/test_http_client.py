"""Our HTTP client against servers that say what they want."""

import asyncio
import itertools

import pytest

from jaxpaged.entrypoints.http_client import IDLE_SECONDS, Flow, HttpClient
from jaxpaged.errors import UsageError


def asking(url, scenario, **settings):
    """What `scenario(client)` returns."""

    async def run():
        client = HttpClient(url, settings.pop("headers", {}), **settings)
        try:
            return await scenario(client)
        finally:
            await client.close()

    return asyncio.run(run())


async def posted(client, path="/x"):
    parts = []
    status, refusal = await client.post(path, b"{}", lambda data, now: parts.append((data, now)), {"X-Y": "z"}, 10.0)
    return status, refusal, parts


def test_an_answer_comes_in_pieces_each_with_its_time(scripted):
    server = scripted(lambda path, body, headers: (200, [b"one", b"two"]))
    ticks = itertools.count(10.0)
    status, refusal, parts = asking(server.url, posted, clock=lambda: next(ticks))
    assert (status, refusal) == (200, b"") and b"".join(data for data, _ in parts) == b"onetwo"
    times = [now for _, now in parts]
    assert times == sorted(times) and times[0] >= 10.0


def test_connections_are_kept_but_not_for_long(scripted):
    server = scripted(lambda path, body, headers: (200, [b"x"]))
    now = [0.0]

    async def scenario(client):
        await posted(client)
        await posted(client)
        now[0] += IDLE_SECONDS + 1
        await posted(client)

    asking(server.url, scenario, clock=lambda: now[0])
    first, second, third = server.ports
    assert first == second != third


def test_as_many_connections_are_made_as_there_are_requests_at_a_time(scripted):
    import threading

    both = threading.Barrier(2)

    def script(path, body, headers):
        both.wait(10)
        return 200, [b"x"]

    server = scripted(script)

    async def scenario(client):
        await asyncio.gather(posted(client), posted(client))

    asking(server.url, scenario)
    assert len(set(server.ports)) == 2


def test_a_refusal_is_not_taken_for_an_answer_and_is_cut(scripted):
    server = scripted(lambda path, body, headers: (400, [b"no" * 5000]))
    status, refusal, parts = asking(server.url, posted)
    assert status == 400 and parts == [] and refusal == b"no" * 2048


def test_a_connection_that_ends_too_soon_is_an_error(scripted):
    server = scripted(lambda path, body, headers: (200, [b"one", None]))
    with pytest.raises(ConnectionError, match="closed the connection"):
        asking(server.url, posted)


def test_what_is_no_http_is_an_error():
    async def run():
        async def nonsense(reader, writer):
            writer.write(b"SSH-2.0-OpenSSH\r\n")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(nonsense, "127.0.0.1", 0)
        client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", {})
        async with server:
            await posted(client)

    with pytest.raises(ConnectionError, match="not HTTP"):
        asyncio.run(run())


def test_headers_and_the_path_of_the_base_url_are_sent(scripted):
    seen = []
    server = scripted(lambda path, body, headers: (seen.append((path, dict(headers))), (200, [b"x"]))[1])
    asking(f"{server.url}/llm/", posted, headers={"Authorization": "Bearer k"})
    [(path, headers)] = seen
    assert path == "/llm/x" and headers["X-Y"] == "z" and headers["Authorization"] == "Bearer k"
    assert headers["Host"] == server.url.removeprefix("http://")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x:port", "http://x?y=1"])
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(UsageError, match="must look like"):
        HttpClient(url, {})


@pytest.mark.parametrize("headers", [{"a b": "c"}, {"a": "b\r\nc: d"}, {"": "x"}, {"a": "ä"}])
def test_a_header_cannot_end_the_line(headers):
    with pytest.raises(UsageError, match="header"):
        HttpClient("http://127.0.0.1", headers)


def test_an_answer_waits_in_the_server_while_its_taker_has_enough(scripted):
    piece, sent = b"x" * (1 << 20), []

    def script(path, body, headers):
        return 200, (sent.append(1) or piece for _ in range(32))

    async def scenario(client):
        flow, size = Flow(), 0

        def take(data, now):
            nonlocal size
            size += len(data)
            if size == len(data):
                flow.hold()

        asking = asyncio.ensure_future(client.post("/x", b"{}", take, {}, 20.0, flow))
        while not size:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        held, num_sent = size, len(sent)
        flow.go_on()
        await asking
        return held, num_sent, size, await posted(client)  # on the same connection

    held, num_sent, size, (status, _, _) = asking(scripted(script).url, scenario)
    assert held < 1 << 20 and num_sent < 32 and size == 32 << 20 and status == 200


def test_certificates_that_cannot_be_read_are_named():
    with pytest.raises(UsageError, match="/nowhere"):
        HttpClient("https://127.0.0.1", {}, ca_certificate="/nowhere")
    with pytest.raises(UsageError, match="/nowhere"):
        HttpClient("https://127.0.0.1", {}, certificate=("/nowhere", None))
