"""What soak.py does to a server while clients ask it, and how long it takes until clients are served again.

    killed core      SIGKILL
    stopped core     SIGSTOP: it hangs, which the server must notice by itself
    full queue       more requests at once than may wait
    corrupt frames   what is no message, on the socket of the core
    killed decoders  SIGKILL of the processes that decode pictures, if there are any
    broken clients   front ends that leave or do not read, half requests, floods of HTTP/2 frames

What is done to cores, queues and decoders may be noticed by others, and only by the statuses that `excuses` names.
"""

import asyncio
import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from server_process import Server
from soak_clients import (
    COMPLETIONS,
    CORE_FAULT,
    LOST_PICTURE,
    NO_ROOM,
    Client,
    Places,
    Refused,
    ask,
    connected,
    grpc_sum,
    http_sum,
    outcome,
    request_bytes,
)

from jaxpaged.encoding.frames import FrameDecoder, FrameEncoder
from jaxpaged.engine.core_calls import CALLS
from jaxpaged.engine.process import wire
from jaxpaged.engine.process.core_process import SOCKET
from jaxpaged.engine.process.zmq_client import dealer
from jaxpaged.messages import EngineCoreRequest
from jaxpaged.sampling_params import SamplingParams

RECOVERY_SECONDS = 180.0
ANSWER_SECONDS = 30.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
FLOODS = [
    b"\0\0\x08\6\0\0\0\0\0pingping" * 3000,
    b"\0\0\6\4\0\0\0\0\0\0\3\0\0\0\x64" * 3000,
    b"\0\0\1\1\0\0\0\0\1\x82" + b"\0\0\1\x09\0\0\0\0\1\x82" * 3000,
    b"".join(
        b"\0\0\1\1\4"
        + (2 * i + 1).to_bytes(4, "big")
        + b"\x82\0\0\4\3\0"
        + (2 * i + 1).to_bytes(4, "big")
        + b"\0\0\0\x08"
        for i in range(3000)
    ),
]
"""PING, SETTINGS, CONTINUATION without end, and streams that are opened and reset."""


@dataclass
class Fault:
    """One that was done. Times are of `time.monotonic`."""

    name: str
    excuses: frozenset[str]
    begin: float
    end: float = float("inf")  # when clients were served again

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass
class Faults:
    """Does them, one after the other, to `server`, whose temporary files are in `folder`."""

    server: Server
    folder: Path
    places: Places
    grpc_port: int
    num_places: int  # in the engine and its queue together
    draw: random.Random
    pictures: bool = False  # whether there are some
    done: list[Fault] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def kinds(self) -> dict[str, tuple[Callable[[], Awaitable[None]], set[str]]]:
        decoders = {"killed decoders": (self._killed_decoders, LOST_PICTURE)} if self.pictures else {}
        return {
            "killed core": (lambda: self._lost_core(signal.SIGKILL), CORE_FAULT),
            "full queue": (self._full_queue, NO_ROOM),
            "corrupt frames": (self._corrupt_frames, set()),
            "stopped core": (lambda: self._lost_core(signal.SIGSTOP), CORE_FAULT),
            **decoders,
            "broken clients": (self._broken_clients, set()),
        }

    @property
    def num_lost_cores(self) -> int:
        return sum("core" in fault.name for fault in self.done)

    def excuse(self, status: str, begin: float, end: float) -> bool:
        """Whether a request of that time may have got this status."""
        return any(status in each.excuses and begin <= each.end and end >= each.begin for each in self.done)

    async def inject(self, name: str) -> None:
        """Do it, and wait until somebody who asks is answered over HTTP and gRPC."""
        act, excuses = self.kinds[name]
        fault = Fault(name, frozenset(excuses), time.monotonic())
        self.done.append(fault)
        try:
            async with asyncio.timeout(RECOVERY_SECONDS):
                await act()
                for run in (http_sum, grpc_sum):
                    while await outcome(run, Client(self.places, self.draw)) not in ("right", "wrong"):
                        await asyncio.sleep(0.05)
        except TimeoutError:
            self.problems.append(f"{name}: nobody was served again within {RECOVERY_SECONDS:g} s")
        fault.end = time.monotonic()

    async def _lost_core(self, number: int) -> None:
        before = self.server.core_pid()
        os.kill(before, number)
        while self.server.core_pid() in (before, None):
            await asyncio.sleep(0.05)

    async def _killed_decoders(self) -> None:
        """At a moment when they may have a picture, or none."""
        for pid in self.server.decoder_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.5)

    async def _full_queue(self) -> None:
        """More than fit, at once: those for whom there is room are answered, and the others are told so."""
        body = {"prompt": [300], "max_tokens": 30, "ignore_eos": True}

        async def one() -> str:
            try:
                await ask(self.places.port, COMPLETIONS, body)
            except Refused as refused:
                return str(refused)
            except ConnectionError:
                return "closed"
            return "200"

        got = await asyncio.gather(*(one() for _ in range(self.num_places + 50)))
        if set(got) != {"200", "429"}:
            self.problems.append(f"full queue: {', '.join(f'{got.count(each)} x {each}' for each in sorted(set(got)))}")

    # ---- the socket of the core

    @property
    def address(self) -> str:
        [path] = self.folder.glob(f"jaxpaged-*/{SOCKET}")
        return f"ipc://{path}"

    @contextlib.asynccontextmanager
    async def front_end(self) -> AsyncIterator[zmq.Socket]:
        with zmq.Context() as context, dealer(context, self.address) as made:
            yield made

    async def _corrupt_frames(self) -> None:
        requests = [request_of("junk", 4)]
        good = FrameEncoder().encode(requests)[0]
        async with self.front_end() as made:
            for _ in range(500):
                kind = self.draw.choice([wire.HELLO, wire.ADD, wire.ABORT, wire.CALL, b"", self.draw.randbytes(30)])
                cut = good[: self.draw.randrange(len(good))]
                made.send_multipart([kind, self.draw.choice([b"", cut, cut + self.draw.randbytes(9), b"\x91" * 5000])])
            await asyncio.sleep(0.2)
        with socket.socket(socket.AF_UNIX) as plain, contextlib.suppress(OSError):  # no ZeroMQ at all
            plain.connect(self.address.removeprefix("ipc://"))
            plain.sendall(self.draw.randbytes(5000))

    async def core_says(self, name: str) -> Any:
        """The core's answer to one of `core_calls.CALLS`."""
        async with self.front_end() as made:
            made.send_multipart([wire.CALL, *FrameEncoder().encode(wire.Call(1, name))])
            end = time.monotonic() + ANSWER_SECONDS
            while time.monotonic() < end:
                if made.poll(0):
                    kind, *frames = made.recv_multipart()
                    if kind == wire.ANSWER:
                        return FrameDecoder(CALLS[name].result_type()).decode(frames[1:])
                await asyncio.sleep(0.01)
        raise TimeoutError(f"the core does not answer {name}")

    # ---- clients that behave as no client should

    async def _broken_clients(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            made = await stack.enter_async_context(self.front_end())
            requests = [request_of(f"left-{number}", 100) for number in range(3)]
            made.send_multipart([wire.ADD, *FrameEncoder().encode(requests)])
            half = request_bytes(COMPLETIONS, b'{"prompt": "a"}')
            for number in range(50):
                _, writer = await stack.enter_async_context(connected(self.places.port))
                writer.write(half[: self.draw.randrange(len(half))])
                _, writer = await stack.enter_async_context(connected(self.grpc_port))
                with contextlib.suppress(ConnectionError):
                    writer.write(PREFACE + FLOODS[number % len(FLOODS)])
            await asyncio.sleep(1.0)


def request_of(request_id: str, max_tokens: int) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=0)
    return EngineCoreRequest(request_id, [300] * 8, params, 0.0)
