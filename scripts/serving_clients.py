"""Clients for bench_serving.py: the load over HTTP and gRPC, asked and measured as `jaxpaged bench serve` does it."""

import argparse
import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from server_process import cpu_seconds

from jaxpaged.entrypoints.http_client import HttpClient
from jaxpaged.tools.bench.backends import Asked, HttpBackend, read_response
from jaxpaged.tools.bench.requests import BenchRequest, Outcome

ASKED = Asked(model="", ignore_eos=True, fields={"temperature": 0})
"""Of the server's own model, every request the same number of tokens."""


class Place(NamedTuple):
    """Where and how a server is asked: over "HTTP", "gRPC" or "gRPC stream"."""

    over: str
    address: str


@dataclass
class Load:
    """All requests of one measurement. CPU time is that of the server's process, and of this one."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    client_seconds: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(outcome.output_tokens for outcome in self.outcomes)


def prompt_ids(stream: int, request: int, length: int) -> list[int]:
    """Ids that no other request begins with, so that the prefix cache is of no help."""
    return [300 + stream % 997, 300 + request % 997, *(300 + (stream + i) % 997 for i in range(length - 2))]


def generate_request(prompt: list[int], num_tokens: int) -> Any:
    from jaxpaged.proto import jaxpaged_pb2 as pb

    params = pb.SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling_params=params)


async def ask_grpc(stub: Any, prompt: list[int], num_tokens: int) -> Outcome:
    """One call of `Generate`."""
    outcome = Outcome(start_time=time.perf_counter())
    async for response in stub.Generate(generate_request(prompt, num_tokens)):
        read_response(outcome, response, time.perf_counter())
    return outcome


class Multiplexed:
    """One call of `GenerateStream` that carries all requests."""

    def __init__(self, stub: Any):
        self._call = stub.GenerateStream()
        self._writing = asyncio.Lock()  # a call writes one message at a time
        self._waiting: dict[str, tuple[Outcome, asyncio.Future[None]]] = {}  # for the end of each that is under way
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        async for message in self._call:
            now = time.perf_counter()
            for event in message.events:
                outcome, ended = self._waiting[event.request_id]
                if event.HasField("response"):
                    read_response(outcome, event.response, now)
                    continue
                if event.HasField("error"):
                    outcome.fail(event.error.message)
                ended.set_result(None)

    async def ask(self, request_id: str, prompt: list[int], num_tokens: int) -> Outcome:
        from jaxpaged.proto import jaxpaged_pb2 as pb

        outcome, ended = Outcome(start_time=time.perf_counter()), asyncio.get_running_loop().create_future()
        self._waiting[request_id] = outcome, ended
        request = generate_request(prompt, num_tokens)
        request.request_id = request_id
        async with self._writing:
            await self._call.write(pb.GenerateStreamRequest(generate=request))
        await asyncio.wait({ended, self._reading}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            outcome.fail("the stream ended before the request.")
        return outcome

    async def close(self) -> None:
        await self._call.done_writing()
        await self._reading


async def load(place: Place, pid: int, args: argparse.Namespace, num_streams: int) -> Load:
    """Ask `num_streams` times at a time. Ends this program when a request fails."""
    result = Load()

    @contextlib.asynccontextmanager
    async def stub() -> AsyncIterator[Any]:
        import grpc

        from jaxpaged.proto.jaxpaged_pb2_grpc import InferenceStub

        own = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
        async with grpc.aio.insecure_channel(place.address, own) as opened:
            yield InferenceStub(opened)

    def prompts(number: int) -> list[list[int]]:
        return [prompt_ids(number, request, args.prompt_tokens) for request in range(args.requests)]

    async def connection(number: int) -> None:
        backend = HttpBackend(HttpClient(place.address, {}), "/v1/completions", chat=False)
        for request, prompt in enumerate(prompts(number)):
            wanted = BenchRequest(prompt, len(prompt), args.tokens)
            result.outcomes.append(await backend.send(wanted, ASKED, f"{number}-{request}"))
        await backend.close()

    async def calls(number: int) -> None:
        async with stub() as opened:
            for prompt in prompts(number):
                result.outcomes.append(await ask_grpc(opened, prompt, args.tokens))

    async def events(number: int, one: Multiplexed) -> None:
        for request, prompt in enumerate(prompts(number)):
            result.outcomes.append(await one.ask(f"{number}-{request}", prompt, args.tokens))

    cpu, client, begin = cpu_seconds(pid), time.process_time(), time.perf_counter()
    if place.over == "gRPC stream":
        async with stub() as opened:
            one = Multiplexed(opened)
            await asyncio.gather(*(events(number, one) for number in range(num_streams)))
            await one.close()
    else:
        ask_all = connection if place.over == "HTTP" else calls
        await asyncio.gather(*(ask_all(number) for number in range(num_streams)))
    result.seconds, result.cpu_seconds = time.perf_counter() - begin, cpu_seconds(pid) - cpu
    result.client_seconds = time.process_time() - client
    if errors := [outcome.error for outcome in result.outcomes if outcome.error]:
        raise SystemExit(f"{len(errors)} requests failed over {place.over}, the first one: {errors[0]}")
    return result
