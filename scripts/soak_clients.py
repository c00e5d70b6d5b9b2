"""Clients for soak.py, of every kind: patient, hasty, slow, wrong, and none at all. What they get is one word.

Every client has a connection of its own over HTTP, and a call of its own over gRPC. Words of HTTP are statuses, and of
gRPC status codes; an error within a stream counts as its status. The others are

    right, wrong     a sum was asked for, and this is what the answer was
    left             the client had enough before the end
    closed           the server closed the connection without an answer
    late             no answer in `SECONDS`
    torn             the answer is not whole: less than was asked for, or it has no end
"""

import asyncio
import contextlib
import json
import random
import re
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from server_process import LOOPBACK

from jaxpaged.client.messages import generate_request
from jaxpaged.proto import jaxpaged_pb2 as pb
from jaxpaged.proto.jaxpaged_pb2_grpc import InferenceStub

SECONDS = 120.0
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PREFIXES = {COMPLETIONS: "cmpl", CHAT: "chatcmpl"}
"""What ids of results begin with."""
LONGEST_PROMPT, LONGEST_ANSWER = 400, 48
SLOW_SECONDS = 0.05
"""Between two reads of a slow reader."""
DEADLINE_SECONDS = 0.03
CODES = {each.value[0]: each.name for each in grpc.StatusCode}
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: closing is a reset, as when a client's machine is switched off."""


@dataclass
class Places:
    """Where the server is."""

    port: int
    stubs: Sequence[InferenceStub]  # each over a connection of its own


@dataclass
class Client:
    """A client of one kind, once: `draw` makes its random choices."""

    places: Places
    draw: random.Random

    def stub(self) -> InferenceStub:
        return self.draw.choice(self.places.stubs)

    def prompt_ids(self) -> list[int]:
        return [self.draw.randrange(300, 1300) for _ in range(self.draw.randint(1, LONGEST_PROMPT))]

    def sum(self) -> tuple[str, str]:
        """A question, and what the answer must hold."""
        a, b = self.draw.randint(10, 99), self.draw.randint(10, 99)
        return f"What is {a} + {b}?", str(a + b)


class Refused(Exception):
    """The server answered with a status that is no success."""


# ---- HTTP


def request_bytes(path: str, body: bytes, headers: str = "", method: str = "POST") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nConnection: close\r\n{headers}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@contextlib.asynccontextmanager
async def connected(port: int, small_buffer: bool = False) -> AsyncIterator[tuple[Any, Any]]:
    """(reader, writer) of a new connection."""
    made = socket.socket()
    if small_buffer:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.setblocking(False)
    await asyncio.get_running_loop().sock_connect(made, (LOOPBACK, port))
    reader, writer = await asyncio.open_connection(sock=made, limit=2048 if small_buffer else 2**20)
    try:
        yield reader, writer
    finally:
        writer.close()


async def head_of(reader: asyncio.StreamReader) -> None:
    """Read the status and the headers. Raises Refused for no success, ConnectionError for nothing."""
    line = await reader.readline()
    if not line:
        raise ConnectionError
    status = line.split()[1].decode()
    while (await reader.readline()).strip():
        pass
    if status != "200":
        raise Refused(status)


async def ask(port: int, path: str, body: dict[str, Any] | bytes, headers: str = "") -> Any:
    """The whole answer, from JSON. Raises Refused and ConnectionError."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with connected(port) as (reader, writer):
        writer.write(request_bytes(path, data, headers, "POST" if data else "GET"))
        await head_of(reader)
        return json.loads(await reader.read() or b"null")


async def events(reader: asyncio.StreamReader, pause: float = 0.0) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream. Raises Refused for an error among them, and ValueError when there is no end."""
    await head_of(reader)
    async for line in reader:
        if pause:
            await asyncio.sleep(pause)
        if line.startswith(b"data: [DONE]"):
            return
        if line.startswith(b"data: "):
            event = json.loads(line[6:])
            if "error" in event:
                raise Refused(str(event["error"]["code"]))
            yield event
    raise ValueError("the stream has no end")


async def http_sum(client: Client) -> str:
    question, answer = client.sum()
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 20, "temperature": 0}
    got = await ask(client.places.port, CHAT, body)
    return "right" if answer in got["choices"][0]["message"]["content"] else "wrong"


async def http_streamed_sum(client: Client) -> str:
    question, answer = client.sum()
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 20, "temperature": 0, "stream": True}
    text = ""
    async with connected(client.places.port) as (reader, writer):
        writer.write(request_bytes(CHAT, json.dumps(body).encode()))
        async for event in events(reader):
            text += event["choices"][0]["delta"].get("content") or ""
    return "right" if answer in text else "wrong"


async def http_stream(client: Client, pause: float = 0.0, n: int = 1) -> str:
    """A prompt and an answer of random lengths, counted at the end."""
    length = client.draw.randint(1, LONGEST_ANSWER)
    body = {
        "prompt": client.prompt_ids(),
        "max_tokens": length,
        "ignore_eos": True,
        "stream": True,
        "n": n,
        "temperature": client.draw.choice([0, 1]) if n == 1 else 1,
        "stream_options": {"include_usage": True},
    }
    async with connected(client.places.port, small_buffer=bool(pause)) as (reader, writer):
        writer.write(request_bytes(COMPLETIONS, json.dumps(body).encode()))
        usage = None
        async for event in events(reader, pause):
            usage = event.get("usage") or usage
    return "200" if usage and usage["completion_tokens"] == length * n else "torn"


async def http_slow(client: Client) -> str:
    return await http_stream(client, SLOW_SECONDS, 2)


async def http_leaves(client: Client) -> str:
    """Goes away after some events, or before the first: politely, or with a reset."""
    body = {"prompt": client.prompt_ids(), "max_tokens": 100, "ignore_eos": True, "stream": client.draw.random() < 0.8}
    async with connected(client.places.port) as (reader, writer):
        writer.write(request_bytes(COMPLETIONS, json.dumps(body).encode()))
        if client.draw.random() < 0.5:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        left = client.draw.randint(0, 5)
        if not body["stream"] or not left:
            await asyncio.sleep(client.draw.random() / 5)
            return "left"
        async for _ in events(reader):
            left -= 1
            if not left:
                return "left"
    return "200"


async def http_abort(client: Client) -> str:
    body = {"prompt": client.prompt_ids(), "max_tokens": 100, "ignore_eos": True, "stream": True}
    return await aborted(client, COMPLETIONS, body)


async def aborted(client: Client, path: str, body: dict[str, Any]) -> str:
    """Ends its own request by its id, before or after it began."""
    name, reason = f"soak-{client.draw.getrandbits(60):x}", None
    async with connected(client.places.port) as (reader, writer):
        writer.write(request_bytes(path, json.dumps(body).encode(), f"X-Request-Id: {name}\r\n"))
        async for event in events(reader):
            if name:
                await ask(client.places.port, "/abort_requests", {"request_ids": [f"{PREFIXES[path]}-{name}"]})
                name = ""
            for choice in event["choices"]:
                reason = choice["finish_reason"] or reason
    return "aborted" if reason == "abort" else "200" if reason else "torn"


async def http_shape(client: Client) -> str:
    """An answer that must be one of two words."""
    shape = {"choice": ["yes", "no"]}
    body = {"prompt": "Is it? ", "max_tokens": 8, "structured_outputs": shape, "cache_salt": str(client.draw.random())}
    got = await ask(client.places.port, COMPLETIONS, body)
    return "right" if got["choices"][0]["text"] in shape["choice"] else "wrong"


async def http_wrong(client: Client) -> str:
    """A good body with some bytes changed, which may still be good."""
    question, _ = client.sum()
    body = bytearray(json.dumps({"prompt": question, "max_tokens": 3, "logit_bias": {"7": 1}, "stop": ["x"]}).encode())
    for _ in range(client.draw.randint(1, 8)):
        body[client.draw.randrange(len(body))] = client.draw.randrange(256)
    await ask(client.places.port, COMPLETIONS, bytes(body))
    return "200"


async def http_garbage(client: Client) -> str:
    """Bytes that are no request."""
    pieces = [
        client.draw.randbytes(400),
        b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9999999999\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
    ]
    async with connected(client.places.port) as (reader, writer):
        writer.write(client.draw.choice(pieces) + b"\r\n\r\n")
        writer.write_eof()
        await head_of(reader)
    return "200"


# ---- gRPC


async def grpc_sum(client: Client) -> str:
    question, answer = client.sum()
    text, request = "", generate_request([{"role": "user", "content": question}], {"max_tokens": 20, "temperature": 0})
    async for response in client.stub().Generate(request):
        text += "".join(each.text for each in response.sequences)
    return "right" if answer in text else "wrong"


def stream_request(client: Client, length: int, **values: Any) -> pb.GenerateRequest:
    return generate_request(client.prompt_ids(), {"max_tokens": length, "ignore_eos": True, **values})


async def grpc_stream(client: Client, pause: float = 0.0) -> str:
    length, count = client.draw.randint(1, LONGEST_ANSWER), 0
    async for response in client.stub().Generate(stream_request(client, length)):
        count += sum(len(each.token_ids) for each in response.sequences)
        await asyncio.sleep(pause)
    return "OK" if count == length else "torn"


async def grpc_slow(client: Client) -> str:
    return await grpc_stream(client, SLOW_SECONDS)


async def grpc_many(client: Client) -> str:
    """Five requests on one stream, one of which is aborted."""
    requests = {str(number): stream_request(client, 20, request_id=str(number)) for number in range(5)}
    given = [pb.GenerateStreamRequest(generate=each) for each in requests.values()]
    aborted, ended = str(client.draw.randrange(5)), set()
    call = client.stub().GenerateStream(iter([*given, pb.GenerateStreamRequest(abort=aborted)]))
    async for message in call:
        for event in message.events:
            if event.HasField("error"):
                raise Refused(CODES.get(event.error.code, f"code {event.error.code}"))
            if event.HasField("done"):
                ended.add(event.request_id)
    return "OK" if ended == set(requests) else "torn"


async def grpc_cancels(client: Client) -> str:
    call, left = client.stub().Generate(stream_request(client, 100)), client.draw.randint(0, 4)
    if not left:
        await asyncio.sleep(client.draw.random() / 10)
    for _ in range(left):
        if await call.read() is grpc.aio.EOF:
            return "OK"
    call.cancel()
    return "left"


async def grpc_deadline(client: Client) -> str:
    async for _ in client.stub().Generate(stream_request(client, 100), timeout=DEADLINE_SECONDS):
        pass
    return "OK"


async def grpc_wrong(client: Client) -> str:
    """A value that is none, or bytes that are no message."""
    wrong = [{"temperature": -1.0}, {"max_tokens": 0}, {"n": 10**6}, {"request_id": "two words"}, {"top_p": 7.0}]
    request = generate_request([300], client.draw.choice(wrong))
    async for _ in client.stub().Generate(request):
        pass
    return "OK"


async def grpc_garbage(client: Client, port: int) -> str:
    """Bytes that are no HTTP/2."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    pieces = [
        client.draw.randbytes(400),
        preface,
        preface + client.draw.randbytes(300),
        b"GET / HTTP/1.1\r\n\r\n",
        preface + b"\xff\xff\xff\x01\x04\0\0\0\x01",
    ]
    async with connected(port) as (reader, writer):
        writer.write(client.draw.choice(pieces))
        writer.write_eof()
        await asyncio.wait_for(reader.read(), 30)
    return "closed"


Kind = Callable[[Client], Awaitable[str]]
CORE_FAULT = {"503", "UNAVAILABLE"}
"""What a request may get while the core is being replaced."""
LOST_PICTURE = {"400", "INVALID_ARGUMENT"}
"""What it may get whose picture was being decoded."""
NO_ROOM = {"429", "RESOURCE_EXHAUSTED"}
"""What it may get while the queue is full."""


@dataclass(frozen=True)
class Sort:
    """A kind of client: what it does, how often of all, and what it may get when nothing is the matter."""

    run: Kind
    weight: int
    good: frozenset[str]


def sort(run: Kind, weight: int, *good: str) -> Sort:
    return Sort(run, weight, frozenset(good))


def sorts(grpc_port: int, with_grammars: bool) -> dict[str, Sort]:
    """All kinds of clients, by the words of the table."""
    garbage = lambda client: grpc_garbage(client, grpc_port)
    shape = {"HTTP shape": sort(http_shape, 2, "right")} if with_grammars else {}
    return {
        "HTTP sum": sort(http_sum, 16, "right", "wrong"),
        "HTTP sum, streamed": sort(http_streamed_sum, 16, "right", "wrong"),
        "HTTP random lengths": sort(http_stream, 10, "200"),
        **shape,
        "HTTP slow reader": sort(http_slow, 2, "200"),
        "HTTP leaves": sort(http_leaves, 10, "left", "200"),
        "HTTP aborts": sort(http_abort, 4, "aborted", "200"),
        "HTTP wrong body": sort(http_wrong, 6, "400", "404", "200"),
        "HTTP garbage": sort(http_garbage, 2, "400", "404", "405", "413", "closed"),
        "gRPC sum": sort(grpc_sum, 16, "right", "wrong"),
        "gRPC random lengths": sort(grpc_stream, 10, "OK"),
        "gRPC five on a stream": sort(grpc_many, 2, "OK"),
        "gRPC slow reader": sort(grpc_slow, 2, "OK"),
        "gRPC cancels": sort(grpc_cancels, 8, "left", "OK"),
        "gRPC deadline": sort(grpc_deadline, 4, "DEADLINE_EXCEEDED", "OK"),
        "gRPC wrong field": sort(grpc_wrong, 4, "INVALID_ARGUMENT"),
        "gRPC garbage": sort(garbage, 2, "closed"),
    }


async def outcome(run: Kind, client: Client) -> str:
    """What one client got, in a word."""
    try:
        async with asyncio.timeout(SECONDS):
            return await run(client)
    except TimeoutError:
        return "late"
    except grpc.aio.AioRpcError as error:
        return error.code().name
    except Refused as refused:
        return str(refused)
    except (ConnectionError, asyncio.IncompleteReadError):
        return "closed"
    except (ValueError, LookupError) as error:
        return f"torn ({re.sub(r'[^a-z ]', '', str(error).lower())[:30].strip()})"
