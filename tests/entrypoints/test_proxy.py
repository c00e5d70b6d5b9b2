"""The proxy with engines that only say what they were asked: who gets what, and what happens when some are gone."""

import asyncio
import contextlib
import gc
import json
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

pytest.importorskip("httptools", reason="comes with the extra serve")
from msgspec import Raw

from jaxpaged.entrypoints.cli import main
from jaxpaged.entrypoints.http.transport.listener import Listener, bind, url_of
from jaxpaged.entrypoints.proxy import local_engines
from jaxpaged.entrypoints.proxy.app import Proxy, create_app
from jaxpaged.entrypoints.proxy.backends import MOST_BEHIND, Backends, beginnings_of
from jaxpaged.entrypoints.proxy.handing_over import WHOLE, for_decode, for_prefill, params_in, read
from jaxpaged.errors import UsageError
from jaxpaged.serving.errors import ServingError

LONG = "a word " * 400
LENT = {"do_remote_prefill": True, "remote_host": "h", "anything": [1, {"else": 2}]}


class Engine:
    """Answers over a socket, and keeps what it was asked."""

    def __init__(self, status=200, breaks=False, num_more=0, tls=None, never=False, early=True, goes_on=None):
        self.early, self.goes_on = early, goes_on  # whether streams say where a prompt is lent; then what they wait for
        self.never, self.num_left = never, 0  # whether it never answers, and how many did not wait for that
        self.status, self.breaks, self.asked, self.headers = status, breaks, [], []
        self.num_more, self.num_sent, self.tls = num_more, 0, tls  # more bytes, and how many of them went out

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0, ssl=self.tls)
        self.url = f"http{'s' if self.tls else ''}://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error):
        self.server.close()

    async def serve(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = [int(line.split(":")[1]) for line in head.splitlines() if line.startswith("content-length")]
        body = json.loads(await reader.readexactly(length[0]) or b"{}") if length else {}
        self.asked.append(body)
        self.headers.append(head)
        if self.never:
            await reader.read()
            self.num_left += 1
            writer.close()
            return
        lends = (body.get("kv_transfer_params") or {}).get("do_remote_decode")
        said = json.dumps({"kv_transfer_params": LENT if lends else None}).encode()
        if body.get("stream"):
            said = b"data: %b\n\n" % (said if lends and self.early else b'{"x": 1}')
        promised = len(said) + self.num_more + 10 * self.breaks
        writer.write(f"HTTP/1.1 {self.status} X\r\nContent-Length: {promised}\r\n\r\n".encode() + said)
        await writer.drain()
        if lends and self.goes_on is not None:
            await self.goes_on(reader)
            self.num_left += 1
        while self.num_sent < self.num_more:
            writer.write(b" " * (1 << 16))
            await writer.drain()
            self.num_sent += 1 << 16
        writer.close()


def ask_all(
    *bodies, prefill=(), decode=(), path="/v1/completions", raw=None, keys=(), key=None, tls=None, ask=None, **options
):
    """Start engines and the proxy, ask one after the other -> [(status, answer)], the proxy."""

    async def main():
        async with contextlib.AsyncExitStack() as stack:
            urls = [
                [each if isinstance(each, str) else (await stack.enter_async_context(each)).url for each in some]
                for some in (prefill, decode)
            ]
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            groups = [Backends(each, headers, tls) for each in urls]
            proxy = Proxy(*groups, least=100, timeout=10.0, has_key=key is not None, **options)
            bound = bind("127.0.0.1", 0)
            listener = Listener(create_app(proxy, keys), bound, max_header_bytes=1 << 16, max_connections=10)
            await listener.listen()
            running = asyncio.ensure_future(listener.run_until_stopped())
            port = int(url_of(bound).rsplit(":", 1)[1])
            answers = [await (ask or post)(port, path, raw or json.dumps(body).encode()) for body in bodies]
            metrics = await post(port, "/metrics", None)
            listener.should_exit = True
            await running
            return answers, proxy, metrics[1]

    return asyncio.run(main())


async def post(port, path, body):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    verb = "GET" if body is None else "POST"
    length = "" if body is None else f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    head = f"{verb} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k\r\nConnection: close\r\n{length}\r\n"
    writer.write(head.encode() + (body or b""))
    answer = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    return int(answer.split()[1]), answer.partition(b"\r\n\r\n")[2]


def gone():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_a_long_prompt_is_handed_over_and_a_short_one_is_not():
    prefill, decode = Engine(), Engine()
    body = {"prompt": LONG, "max_tokens": 50, "stream": True, "n": 2, "stream_options": {"include_usage": True}}
    answers, proxy, metrics = ask_all(body, {"prompt": "Hi"}, prefill=[prefill], decode=[decode])
    assert answers[0][0] == 200 and b'data: {"x": 1}\n\n' in answers[0][1]
    (first,) = prefill.asked
    assert first["max_tokens"] == 1 and first["stream"] is True and first["prompt"] == LONG
    assert first["kv_transfer_params"]["do_remote_decode"] and not {"n", "stream_options"} & set(first)
    assert decode.asked == [{**body, "kv_transfer_params": LENT}, {"prompt": "Hi"}]
    assert "authorization: bearer k" in prefill.headers[0] and "authorization: bearer k" in decode.headers[0]
    ids = [
        line for head in (prefill.headers[0], decode.headers[0]) for line in head.splitlines() if "request-id" in line
    ]
    assert len(ids) == 2 and len(set(ids)) == 1
    assert b"jaxpaged:proxy_handed_over_total 1" in metrics and proxy.counts["requests"] == 2


def test_a_decode_engine_is_asked_while_the_prompt_is_computed():
    decode = Engine()

    async def until_decode_was_asked(reader):
        async with asyncio.timeout(10):
            while not decode.asked:
                await asyncio.sleep(0.01)

    prefill = Engine(num_more=100, goes_on=until_decode_was_asked)
    answers, proxy, _ = ask_all({"prompt": LONG}, prefill=[prefill], decode=[decode])
    assert answers[0][0] == 200 and decode.asked[0]["kv_transfer_params"] == LENT and prefill.num_left == 1
    assert proxy.counts["handed_over"] == 1 and proxy.prefill.all[0].num_failures == 0


def test_a_prompt_is_not_computed_on_where_no_decode_engine_answers():
    prefill = Engine(num_more=100, goes_on=lambda reader: reader.read())
    answers, proxy, _ = ask_all({"prompt": LONG}, prefill=[prefill], decode=[Engine(503)])
    assert answers[0][0] == 503 and prefill.num_left == 1 and proxy.prefill.all[0].num_under_way == 0


def test_no_prompt_is_computed_where_no_decode_engine_is_left(caplog):
    prefill = Engine()
    answers, proxy, _ = ask_all(*[{"prompt": LONG}] * 3, prefill=[prefill], decode=[gone(), gone()])
    assert [status for status, _ in answers] == [503] * 3 and not prefill.asked
    assert proxy.counts["failures"] == 3 and proxy.counts["prefill_failures"] == 0
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and all("failed: nothing listens there. It is left alone" in each for each in told), told


def test_a_decode_engine_that_comes_back_is_asked_again(monkeypatch):
    monkeypatch.setattr("jaxpaged.entrypoints.proxy.backends.RETRY_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    prefill, decode = Engine(), Engine()

    async def ask(proxy_port, path, body):
        before = await post(proxy_port, path, body)
        server = await asyncio.start_server(decode.serve, "127.0.0.1", port)
        async with server:
            return before, await post(proxy_port, path, body)

    answers, _, _ = ask_all({"prompt": LONG}, prefill=[prefill], decode=[f"http://127.0.0.1:{port}"], ask=ask)
    (before, after) = answers[0]
    assert (before[0], after[0]) == (503, 200) and len(prefill.asked) == 1
    assert decode.asked[-1]["kv_transfer_params"] == LENT


@pytest.mark.parametrize("path", WHOLE)
@pytest.mark.parametrize("stream", [False, True])
def test_whatever_else_clients_ask_is_a_decode_engines_alone(path, stream):
    prefill, decode = Engine(), Engine()
    body = {WHOLE[path]: LONG, "stream": stream, "anything": {"else": [1.50]}}
    answers, _, _ = ask_all(body, prefill=[prefill], decode=[gone(), decode], path=path)
    assert answers[0][0] == 200 and decode.asked == [body] and not prefill.asked
    assert f"post {path} " in decode.headers[0]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/one/of/ours", "/health", "/ready", "/ping", "/version"])
def test_what_every_engine_says_alike_one_is_asked(path):
    decode = Engine()
    answers, _, _ = ask_all({}, decode=[gone(), decode], path=path, ask=lambda port, path, _: post(port, path, None))
    assert answers[0][0] == 200 and f"get {path} " in decode.headers[0]


@pytest.mark.parametrize(
    ("verb", "path"),
    [
        ("GET", "/v1/responses/resp_1?stream=true&starting_after=3"),
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
    ],
)
def test_an_answer_that_one_engine_keeps_is_asked_for_there(verb, path):
    first, second = Engine(404), Engine()

    async def ask(port, path, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{verb} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        return int(answer.split()[1]), answer

    answers, _, _ = ask_all({}, decode=[gone(), first, second], path=path, ask=ask)
    assert answers[0][0] == 200 and f"{verb} {path} ".lower() in second.headers[0] and len(first.asked) == 1
    assert (b"text/event-stream" in answers[0][1]) is ("stream" in path)
    answers, _, _ = ask_all({}, decode=[Engine(404), Engine(404)], path=path, ask=ask)
    assert answers[0][0] == 404


def test_a_response_that_goes_on_from_another_goes_to_who_keeps_that():
    first, second = Engine(404), Engine()
    body = {"input": "more", "previous_response_id": "resp_1"}
    answers, _, _ = ask_all(body, decode=[first, second], path="/v1/responses")
    assert answers[0][0] == 200 and second.asked == [body]
    assert ask_all({"input": "x"}, decode=[Engine(404), Engine()], path="/v1/responses")[0][0][0] == 404


def test_errors_have_the_form_of_the_api_that_was_asked():
    status, said = ask_all({"messages": []}, decode=[gone()], path="/v1/messages")[0][0]
    assert status == 503 and json.loads(said)["type"] == "error"


def test_a_prefill_engine_that_breaks_off_later_does_not_matter_to_the_proxy():
    answers, proxy, _ = ask_all({"prompt": LONG}, prefill=[Engine(breaks=True)], decode=[Engine()])
    assert answers[0][0] == 200 and proxy.counts["handed_over"] == 1 and proxy.counts["failures"] == 0


def test_an_engine_that_says_nothing_in_streams_is_asked_for_whole_answers():
    prefill, decode = Engine(early=False), Engine()
    _, proxy, _ = ask_all({"prompt": LONG}, {"prompt": LONG}, prefill=[prefill], decode=[decode])
    assert [each["stream"] for each in prefill.asked] == [True, False, False]
    assert [each["kv_transfer_params"] for each in decode.asked] == [LENT] * 2 and proxy.counts["handed_over"] == 2
    prefill = Engine()
    ask_all({"prompt": LONG}, prefill=[prefill], decode=[decode], waits=True)
    assert [each["stream"] for each in prefill.asked] == [False]


def test_chats_are_handed_over_too():
    prefill, decode = Engine(), Engine()
    body = {"messages": [{"role": "user", "content": LONG}], "max_completion_tokens": 9}
    ask_all(body, prefill=[prefill], decode=[decode], path="/v1/chat/completions")
    assert prefill.asked[0]["max_completion_tokens"] == prefill.asked[0]["max_tokens"] == 1
    assert decode.asked == [{**body, "kv_transfer_params": LENT}]


@pytest.mark.parametrize("trouble", ["gone", 503, 400])
def test_without_a_prefill_engine_the_decode_engine_computes(trouble):
    broken = gone() if trouble == "gone" else Engine(trouble)
    decode = Engine()
    answers, proxy, _ = ask_all({"prompt": LONG}, prefill=[broken], decode=[decode])
    assert answers[0][0] == 200 and decode.asked == [{"prompt": LONG}]
    assert proxy.counts["prefill_failures"] == 1 and proxy.counts["failures"] == 0


def test_another_engine_is_asked_where_one_does_not_answer():
    prefill, decode = Engine(), Engine()
    answers, proxy, _ = ask_all({"prompt": LONG}, prefill=[gone(), prefill], decode=[gone(), Engine(503), decode])
    assert answers[0][0] == 200 and decode.asked[0]["kv_transfer_params"] == LENT
    assert proxy.counts["decode_retries"] == 2
    assert all(each.num_under_way == 0 for each in (*proxy.prefill.all, *proxy.decode.all))


def test_what_is_wrong_is_said():
    answers, _, _ = ask_all({"prompt": "Hi"}, {"prompt": "Hi"}, decode=[gone()])
    assert [status for status, _ in answers] == [503, 503] and b"No decode engine" in answers[0][1]
    assert ask_all({"prompt": "Hi"}, decode=[Engine(404)])[0][0][0] == 404
    assert ask_all({"prompt": "Hi"}, decode=[Engine(503)])[0][0][0] == 503
    assert ask_all({}, decode=[Engine()], raw=b"[1]")[0][0][0] == 400
    status, said = ask_all({"prompt": "Hi", "kv_transfer_params": {"a": 1}}, decode=[Engine()])[0][0]
    assert status == 400 and b"the proxy makes them" in said
    assert ask_all({"prompt": "Hi"}, decode=[Engine(breaks=True)])[0][0][0] == 502
    status, said = ask_all({"prompt": "Hi", "stream": True}, decode=[Engine(breaks=True)])[0][0]
    assert status == 200 and b"broke off" in said and b"[DONE]" in said
    with pytest.raises(UsageError, match="'nowhere' is none"):
        Backends(["nowhere"])


def test_keys_of_clients_are_asked_for_and_passed_on():
    engine = Engine()
    assert ask_all({"prompt": "Hi"}, decode=[engine], keys=["other"])[0][0][0] == 401 and not engine.headers
    assert ask_all({"prompt": "Hi"}, decode=[engine], keys=["other", "k"])[0][0][0] == 200
    assert "authorization: bearer k" in engine.headers[-1]
    assert ask_all({"prompt": "Hi"}, decode=[engine], key="own")[0][0][0] == 200
    assert engine.headers[-1].count("authorization: ") == engine.headers[-1].count("authorization: bearer own") == 1
    models = lambda port, path, body: post(port, "/v1/models", None)
    for key, told in ((None, "bearer k"), ("own", "bearer own")):
        assert ask_all({}, decode=[engine], key=key, ask=models)[0][0][0] == 200
        assert f"authorization: {told}" in engine.headers[-1]
    assert ask_all({}, decode=[Engine(401)], ask=models)[0][0][0] == 401


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_slow_client_does_not_take_waits_in_the_engine(stream):
    engine, held = Engine(num_more=64 << 20), []

    async def slowly(port, path, body):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
        writer.write(
            b"POST %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
            % (path.encode(), len(body), body)
        )
        size, before = len(await reader.read(100)), -1
        while engine.num_sent != before:
            before = engine.num_sent
            await asyncio.sleep(0.2)
        held.append(before)
        while piece := await reader.read(1 << 20):
            size += len(piece)
        writer.close()
        return 200, size

    [(_, size)], proxy, _ = ask_all({"prompt": "Hi", "stream": stream}, decode=[engine], ask=slowly)
    assert 0 < held[0] < 48 << 20 and size > 64 << 20 and proxy.counts["failures"] == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_a_client_that_leaves_ends_its_request_wherever_it_is(where, stream):
    engine, others = Engine(never=True), Engine()

    async def leave(port, path, body):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(body), body))
        async with asyncio.timeout(10):
            while not engine.asked:
                await asyncio.sleep(0.01)
            writer.close()
            while not engine.num_left:
                await asyncio.sleep(0.01)
        return 0, None

    kinds = {"prefill": [others], "decode": [others], where: [engine]}
    _, proxy, _ = ask_all({"prompt": LONG, "stream": stream}, **kinds, ask=leave)
    assert proxy.counts["left"] == 1 and proxy.counts["failures"] == 0
    assert all(each.num_under_way == 0 for each in (*proxy.prefill.all, *proxy.decode.all))
    assert where == "decode" or not others.asked, "nobody goes on with it"


def test_a_long_answer_that_breaks_off_does_so_for_the_client_too(caplog):
    answers, proxy, _ = ask_all({"prompt": "Hi"}, decode=[Engine(breaks=True, num_more=8 << 20)])
    assert answers[0][0] == 200 and not answers[0][1].endswith(b"0\r\n\r\n") and proxy.counts["failures"] == 1
    assert ask_all({"prompt": LONG}, prefill=[Engine(num_more=8 << 20)], decode=[Engine()])[0][0][0] == 200


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_engines_over_tls(pem):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=pem("client")[0])
    context.load_cert_chain(*pem("server"))
    context.verify_mode = ssl.CERT_REQUIRED
    trusts = {"ca_certificate": pem("server")[0]}
    for tls, status in (({}, 503), (trusts, 503), ({**trusts, "certificate": pem("client")}, 200)):
        assert ask_all({"prompt": "Hi"}, decode=[Engine(tls=context)], tls=tls)[0][0][0] == status, tls


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_the_command_serves_over_tls_and_asks_for_keys(pem):
    certificate, key = pem("server")
    command = [sys.executable, "-m", "jaxpaged", "proxy", "--port", "0", "--decode", gone(), "--api-key", "k"]
    process = subprocess.Popen(
        [*command, "--ssl-certfile", certificate, "--ssl-keyfile", key], stderr=subprocess.PIPE, text=True
    )
    try:
        url = process.stderr.readline().split()[-1]
        assert url.startswith("https://127.0.0.1:")
        for given, status in (({}, 401), ({"Authorization": "Bearer k"}, 503)):
            with pytest.raises(urllib.error.HTTPError) as refusal:
                urllib.request.urlopen(
                    urllib.request.Request(f"{url}/v1/models", headers=given),
                    timeout=20,
                    context=ssl.create_default_context(cafile=certificate),
                )
            assert refusal.value.code == status
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--engine-keyfile", "/x"], "--engine-certfile"),
        (["--engine-ca-certs", "/x"], "none is at https"),
        (["--engine-key-file", "/no/file"], "cannot read /no/file"),
        (["--ssl-keyfile", "/x"], "without a certificate"),
        (["--api-key", ""], "api_key is empty"),
    ],
)
def test_flags_that_do_not_serve_are_refused(flags, words, capsys):
    assert main(["proxy", "--decode", "http://127.0.0.1:1", "--port", "0", *flags]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "no engine is named"),
        (["demo"], "'demo' stands there"),
        (["--start", "1p0d"], "such as 1p1d"),
        (["--start", "p1d"], "such as 1p1d"),
        (["--start", "1p1d", "--decode", "http://x"], "engines are named"),
        (["--start", "1p1d", "--", "--port=1"], "--port=1 is given for the engines"),
        (["--start", "0p1d", "--", "/no/model"], "decode engine 0 ended with status 1 before it served"),
    ],
)
def test_engines_that_cannot_be_started_are_told(flags, words, capsys):
    assert main(["proxy", "--port", "0", *flags]) == 2
    assert words in capsys.readouterr().err


SERVES = """
import os, sys, threading
port = int(sys.argv[sys.argv.index("--port") + 1])
print(f"served at http://127.0.0.1:{port or 4711}.", file=sys.stderr, flush=True)
os.read(0, 1) or os._exit(0)
"""


def test_an_engine_of_start_that_ends_is_started_again_at_its_port_until_the_proxy_stops(monkeypatch, capfd):
    monkeypatch.setattr(local_engines, "PROGRAM", SERVES)
    monkeypatch.setattr(local_engines, "RESTART_SECONDS", 0.01)
    with local_engines.local_engines("0p1d", []) as (_, urls):
        assert urls == ["http://127.0.0.1:4711"]
        engine = next(each for each in gc.get_objects() if isinstance(each, local_engines.LocalEngine))
        for _ in range(2):
            before = engine._process
            before.kill()
            deadline = time.monotonic() + 30
            while engine._process is before or engine._process.poll() is not None:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert "4711" in engine._process.args
        last = engine._process
    said = capfd.readouterr().err
    assert last.poll() == 0 and said.count("has ended with status -9; it is started again in 0.0") == 2
    assert not engine._thread.is_alive()


def test_one_that_ends_before_it_served_at_all_is_not(monkeypatch):
    monkeypatch.setattr(local_engines, "PROGRAM", "raise SystemExit(3)")
    with pytest.raises(UsageError, match="ended with status 3 before"), local_engines.local_engines("0p1d", []):
        pass


def test_who_is_chosen():
    backends = Backends(["http://a", "http://b"])
    first, second = backends.all
    known = beginnings_of(b"x" * 4096)
    assert len(known) == 4 and beginnings_of(b"x" * 2048 + b"y" * 2048)[:2] == known[:2] and not beginnings_of(b"x")
    first.num_under_way = 1
    assert backends.choose(known) is second
    backends.remember(known, first)
    assert backends.choose(beginnings_of(b"x" * 1024 + b"y" * 9000)) is first
    first.num_under_way = MOST_BEHIND
    assert backends.choose(known) is second and backends.choose(known, [second]) is first
    second.breaker.failed("x")
    assert backends.choose([]) is first and backends.choose([], [first]) is None


@pytest.mark.parametrize(
    ("path", "body", "splits"),
    [
        ("/v1/completions", {"prompt": ["a", "b"]}, False),
        ("/v1/completions", {"prompt": [1, 2]}, True),
        ("/v1/completions", {"prompt": "a", "use_beam_search": True}, False),
        ("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 1}, False),
        ("/v1/completions", {"prompt": "a", "echo": True, "logprobs": None, "use_beam_search": False}, True),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": 0}, False),
        ("/v1/completions", {}, False),
        ("/v1/chat/completions", {"messages": [{}]}, True),
    ],
)
def test_what_is_handed_over(path, body, splits):
    asked = read(path, json.dumps(body).encode())
    assert asked.may_be_split is splits
    assert "echo" not in json.loads(for_prefill(asked, is_stream=False))


def test_a_prompt_is_looked_at_as_it_came():
    spaced = b'{ "model" : null, "prompt" : [ 5, 7,\n9 ] , "stream" : true, "kv_transfer_params": {} }'
    asked = read("/v1/completions", spaced)
    assert asked.num_tokens == 3 and asked.may_be_split and asked.is_stream
    assert json.loads(for_decode(asked, None)) == json.loads(spaced)
    assert params_in(b'{"a": 1, "kv_transfer_params": {"x": [1.50]}}') == Raw(b'{"x": [1.50]}')
    assert params_in(b'{"kv_transfer_params": 5}') is None and params_in(b"[") is None
    for broken in (b"[1]", b"{", b'{"prompt": ' + b"[" * 100_000, b'{"prompt": x}'):
        with pytest.raises(ServingError, match="no JSON object"):
            read("/v1/completions", broken)
