"""The proxy between engines that fail in every way and clients that leave: whoever stays gets an answer, and nothing is
left over."""

import asyncio
import json
import random

import pytest

pytest.importorskip("httptools", reason="comes with the extra serve")
from jaxpaged.entrypoints.http.transport.listener import Listener, bind, url_of
from jaxpaged.entrypoints.proxy.app import Proxy, create_app
from jaxpaged.entrypoints.proxy.backends import Backends

TIMEOUT = 0.4
FAULTS = ("refuses", "is busy", "hangs up", "breaks off", "says nothing", "speaks no HTTP", "stops in the middle")
NUM_REQUESTS, NUM_CLIENTS = 240, 24
LENT = {"do_remote_prefill": True, "remote_host": "h"}


class FaultyEngine:
    """Answers as it should, or fails as `draw` says."""

    def __init__(self, draw):
        self._draw, self.num_connections = draw, 0

    async def start(self):
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader, writer):
        self.num_connections += 1
        try:
            while await self._answer(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self.num_connections -= 1
            writer.close()

    async def _answer(self, reader, writer):
        """Whether the connection may be used again."""
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        asks = (body.get("kv_transfer_params") or {}).get("do_remote_decode")
        pieces = [json.dumps({"id": body["user"], "kv_transfer_params": LENT if asks else None}).encode()]
        if body.get("stream") and asks:
            pieces = [b"data: %b\n\n" % pieces[0], b"data: [DONE]\n\n"]
        elif body.get("stream"):
            pieces = [b'data: {"id": "%b"}\n\n' % body["user"].encode()] * 3 + [b"data: [DONE]\n\n"]
        fault = self._draw()
        if fault == "hangs up":
            return False
        if fault == "speaks no HTTP":
            writer.write(b"\x16\x03\x01 what?\r\n\r\n")
            return False
        if fault == "says nothing":
            await reader.read()
            return False
        status = {"refuses": 503, "is busy": 429}.get(fault, 200)
        size = sum(map(len, pieces))
        writer.write(
            f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n".encode()
        )
        for number, piece in enumerate(pieces):
            if fault in ("breaks off", "stops in the middle"):
                writer.write(piece[:5])
                await writer.drain()
                if fault == "stops in the middle":
                    await reader.read()
                return False
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001 * (number < 3))
        return True


async def asked(port, body, leaves_after):
    """(status, what was said), or nothing for a client that left."""
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    try:
        async with asyncio.timeout(leaves_after or 10 * TIMEOUT):
            answer = await reader.read()
    except TimeoutError:
        assert leaves_after, "it got no answer"
        return None
    finally:
        writer.close()
    return int(answer.split()[1]), answer.partition(b"\r\n\r\n")[2]


def check(answer, body):
    """What a client that stays may be told: its own answer, or what went wrong."""
    if answer is None:
        return
    status, said = answer
    assert status in (200, 429, 502, 503), answer
    if status != 200:
        assert b'"error"' in said or not said or said.startswith((b"data", b'{"id')), said
    elif body["stream"]:
        assert b"data: [DONE]" in said and said.endswith(b"0\r\n\r\n"), said
        assert b"broke off" in said or said.count(body["user"].encode()) == 3, said
    else:
        assert json.loads(said)["id"] == body["user"]


def test_whoever_stays_is_answered_whatever_engines_do_and_nothing_stays_behind():
    random_of = random.Random(7)
    is_calm = []
    draw = lambda: None if is_calm or random_of.random() < 0.6 else random_of.choice(FAULTS)

    async def client(port, numbers):
        for number in numbers:
            prompt = "a word " * (100 if number % 3 else 1)
            body = {"prompt": f"{number % 7} {prompt}", "stream": number % 2 == 0, "user": f"u{number}u"}
            check(await asked(port, body, 0.01 * random_of.random() if number % 5 == 0 else None), body)

    async def main():
        engines = [FaultyEngine(draw) for _ in range(4)]
        for each in engines:
            await each.start()
        prefill, decode = Backends([each.url for each in engines[:2]]), Backends([each.url for each in engines[2:]])
        for each in (*prefill.all, *decode.all):
            each.breaker.retry_after_s = 0.02
        proxy, bound = Proxy(prefill, decode, least=50, timeout=TIMEOUT), bind("127.0.0.1", 0)
        listener = Listener(create_app(proxy), bound, max_header_bytes=1 << 16)
        await listener.listen()
        running = asyncio.ensure_future(listener.run_until_stopped())
        port = int(url_of(bound).rsplit(":", 1)[1])
        await asyncio.gather(*(client(port, range(each, NUM_REQUESTS, NUM_CLIENTS)) for each in range(NUM_CLIENTS)))
        is_calm.append(True)
        await asyncio.sleep(0.1)  # all breakers let somebody in again
        for number in range(4):
            body = {"prompt": "a word " * 100, "stream": False, "user": f"calm{number}"}
            status, said = await asked(port, body, None)
            assert status == 200 and json.loads(said)["id"] == body["user"]
        async with asyncio.timeout(5):
            while any(each.num_under_way for each in (*prefill.all, *decode.all)):
                await asyncio.sleep(0.01)
        assert proxy.counts["handed_over"] > 10 and proxy.counts["left"] and proxy.counts["decode_retries"] > 10
        await prefill.close()
        await decode.close()
        async with asyncio.timeout(5):
            while any(each.num_connections for each in engines):
                await asyncio.sleep(0.01)
        listener.should_exit = True
        await running
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not [task for task in left if "Answer" in repr(task) or "Proxy" in repr(task)], left

    asyncio.run(main())
