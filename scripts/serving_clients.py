"""Clients for bench_serving.py: requests over HTTP and gRPC, and when what of them came."""

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from server_process import cpu_seconds


class Place(NamedTuple):
    """Where and how a server is asked: over "HTTP", "gRPC" or "gRPC stream"."""

    over: str
    address: str


@dataclass
class Stream:
    """When what came of one request. Times are seconds."""

    first: float  # from the request to its first token
    gaps: list[float]  # between chunks
    num_tokens: int

    @property
    def num_chunks(self) -> int:
        """At most the number of tokens: to a client that is slower than the engine several come in one."""
        return 1 + len(self.gaps)


@dataclass
class Load:
    """All requests of one measurement."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    streams: list[Stream] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(stream.num_tokens for stream in self.streams)


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def prompt_ids(stream: int, request: int, length: int) -> list[int]:
    """Ids that no other request begins with, so that the prefix cache is of no help."""
    return [300 + stream % 997, 300 + request % 997, *(300 + (stream + i) % 997 for i in range(length - 2))]


async def ask(connection: Connection, host: str, prompt: list[int], num_tokens: int) -> Stream:
    """One request over a connection that is kept."""
    reader, writer = connection
    body = json.dumps(
        {
            "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()  # fmt: skip
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    begin = time.perf_counter()
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    times, usage = [], b""
    async for line in reader:
        if line.startswith(b"data: {"):
            if b'"usage"' in line:
                usage = line
            else:
                times.append(time.perf_counter())
        elif line == b"0\r\n":  # the last piece of the answer
            await reader.readline()
            break
    if not usage:
        raise SystemExit("the server did not answer as expected. Run it by hand to see why.")
    counted = json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"]
    return Stream(times[0] - begin, np.diff(times).tolist(), counted)


def generate_request(prompt: list[int], num_tokens: int) -> Any:
    from jaxpaged.proto import jaxpaged_pb2 as pb

    params = pb.SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling_params=params)


async def ask_grpc(stub: Any, prompt: list[int], num_tokens: int) -> Stream:
    """One call of `Generate`."""
    begin, times = time.perf_counter(), []
    counted = 0
    async for response in stub.Generate(generate_request(prompt, num_tokens)):
        times.append(time.perf_counter())
        counted += sum(len(each.token_ids) for each in response.sequences)
    return Stream(times[0] - begin, np.diff(times).tolist(), counted)


class Multiplexed:
    """One call of `GenerateStream` that carries all requests."""

    def __init__(self, stub: Any):
        self._call = stub.GenerateStream()
        self._writing = asyncio.Lock()  # a call writes one message at a time
        self._events: dict[str, asyncio.Queue] = {}  # of each request that is under way
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        async for message in self._call:
            now = time.perf_counter()
            for event in message.events:
                self._events[event.request_id].put_nowait((now, event))

    async def ask(self, request_id: str, prompt: list[int], num_tokens: int) -> Stream:
        from jaxpaged.proto import jaxpaged_pb2 as pb

        events = self._events[request_id] = asyncio.Queue()
        begin, times, counted = time.perf_counter(), [], 0
        request = generate_request(prompt, num_tokens)
        request.request_id = request_id
        async with self._writing:
            await self._call.write(pb.GenerateStreamRequest(generate=request))
        while True:
            now, event = await events.get()
            if event.HasField("done"):
                return Stream(times[0] - begin, np.diff(times).tolist(), counted)
            if event.HasField("error"):
                raise SystemExit(f"the server answered with an error: {event.error}")
            times.append(now)
            counted += sum(len(each.token_ids) for each in event.response.sequences)

    async def close(self) -> None:
        await self._call.done_writing()
        await self._reading


async def load(place: Place, pid: int, args: argparse.Namespace, num_streams: int) -> Load:
    """Ask `num_streams` times at a time."""
    result = Load()

    def prompt_of(number: int, request: int) -> list[int]:
        return prompt_ids(number, request, args.prompt_tokens)

    @contextlib.asynccontextmanager
    async def stub() -> AsyncIterator[Any]:
        import grpc

        from jaxpaged.proto.jaxpaged_pb2_grpc import InferenceStub

        own = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
        async with grpc.aio.insecure_channel(place.address, own) as opened:
            yield InferenceStub(opened)

    async def connection(number: int) -> None:
        host, _, port = place.address.removeprefix("http://").partition(":")
        opened = await asyncio.open_connection(host, int(port), limit=2**20)
        for request in range(args.requests):
            result.streams.append(await ask(opened, host, prompt_of(number, request), args.tokens))
        opened[1].close()

    async def calls(number: int) -> None:
        async with stub() as opened:
            for request in range(args.requests):
                result.streams.append(await ask_grpc(opened, prompt_of(number, request), args.tokens))

    async def events(number: int, one: Multiplexed) -> None:
        for request in range(args.requests):
            prompt = prompt_of(number, request)
            result.streams.append(await one.ask(f"{number}-{request}", prompt, args.tokens))

    cpu, begin = cpu_seconds(pid), time.perf_counter()
    if place.over == "gRPC stream":
        async with stub() as opened:
            one = Multiplexed(opened)
            await asyncio.gather(*(events(number, one) for number in range(num_streams)))
            await one.close()
    else:
        ask_all = connection if place.over == "HTTP" else calls
        await asyncio.gather(*(ask_all(number) for number in range(num_streams)))
    result.seconds, result.cpu_seconds = time.perf_counter() - begin, cpu_seconds(pid) - cpu
    return result
