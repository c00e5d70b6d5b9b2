"""A server that sees and computes nothing, and clients with texts and with large pictures, for bench_multimodal.py.

    python scripts/picture_load.py --serve FOLDER STEP_MS GIB     # the server, as a process of its own

HTTP, intake, decoding processes, scheduler and detokeniser are the real ones; a step takes as long as it would on a
device elsewhere, so that on a machine of few cores the model takes nothing from the others.
"""

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from fake_servers import serve_counting
from seeing_folder import write_seeing_folder
from server_process import Server, descendants, memory, server
from soak_clients import CHAT, COMPLETIONS, ask, connected, events, request_bytes

NUM_SEQS = 64
TEXT_TOKENS, PROMPT_TOKENS = 32, 40
PICTURE_TOKENS = 4
SETTLE_SECONDS = 15.0


@contextmanager
def seeing_server(step_ms: float, gib: float) -> Iterator[Server]:
    """`gib`: the budget of bytes of pictures."""
    with TemporaryDirectory(prefix="pictures-") as folder:
        write_seeing_folder(Path(folder))
        with server([sys.executable, __file__, "--serve", folder, str(step_ms), str(gib)]) as started:
            yield started


@dataclass
class Texts:
    """What requests of text took, in seconds: to the first token, between tokens, and to the end."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)


async def one_text(port: int, draw: random.Random, into: Texts) -> None:
    prompt = [draw.randrange(300, 1300) for _ in range(PROMPT_TOKENS)]
    body = {"prompt": prompt, "max_tokens": TEXT_TOKENS, "ignore_eos": True, "stream": True, "temperature": 0}
    data = request_bytes(COMPLETIONS, json.dumps(body).encode())
    async with connected(port) as (reader, writer):
        began = before = time.perf_counter()
        writer.write(data)
        is_first = True
        async for _ in events(reader):
            now = time.perf_counter()
            (into.first if is_first else into.gaps).append(now - before)
            is_first, before = False, now
        into.whole.append(before - began)


def bodies_of(pictures: Sequence[str]) -> Callable[[int], bytes]:
    """`body(n)` asks about a picture that no other number has: what follows the end of a JPEG is no part of it.
    `pictures` are in base64, of files whose lengths are multiples of three."""
    before, after = (
        each.encode()
        for each in json.dumps(
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,PICTURE"}},
                            {"type": "text", "text": "What is in the picture?"},
                        ],
                    }
                ],
                "max_tokens": PICTURE_TOKENS,
                "ignore_eos": True,
            }
        ).split("PICTURE")
    )
    encoded = [each.encode() for each in pictures]
    return lambda number: b"%b%b%012d%b" % (before, encoded[number % len(encoded)], number, after)


@dataclass
class Senders:
    """Send pictures, `at_once` at a time and at most `rate` a second, while they are let to."""

    port: int
    body: Callable[[int], bytes]
    at_once: int
    rate: float = float("inf")
    number: int = 0
    seconds: list[float] = field(default_factory=list)

    async def send(self, until: Callable[[], bool]) -> None:
        begin, sent = time.perf_counter(), 0

        async def sender() -> None:
            nonlocal sent
            while not until():
                sent += 1
                await asyncio.sleep(max(0.0, begin + sent / self.rate - time.perf_counter()))
                if until():
                    return
                self.number += 1
                began = time.perf_counter()
                await ask(self.port, CHAT, self.body(self.number))
                self.seconds.append(time.perf_counter() - began)

        await asyncio.gather(*(sender() for _ in range(self.at_once)))


async def text_phase(port: int, seconds: float, streams: int, draw: random.Random, senders: Senders | None) -> Texts:
    """So many streams of text requests for so long, and pictures meanwhile."""
    found, end = Texts(), time.perf_counter() + seconds
    is_over = lambda: time.perf_counter() >= end

    async def stream() -> None:
        while not is_over():
            await one_text(port, draw, found)

    sending = [senders.send(is_over)] if senders else []
    await asyncio.gather(*(stream() for _ in range(streams)), *sending)
    return found


QUANTILES: dict[str, tuple[Callable[[Texts], list[float]], float]] = {
    "first token p50": (lambda texts: texts.first, 0.5),
    "first token p99": (lambda texts: texts.first, 0.99),
    "between tokens p50": (lambda texts: texts.gaps, 0.5),
    "between tokens p99": (lambda texts: texts.gaps, 0.99),
    "whole request p50": (lambda texts: texts.whole, 0.5),
    "whole request p99": (lambda texts: texts.whole, 0.99),
}


def bench_others(
    pictures: Sequence[str], rounds: int, rates: Sequence[float], streams: int = 8, seconds: float = 10.0
) -> None:
    """Phases without and with pictures take turns; a ratio is the median of those of neighbouring phases."""
    body, draw = bodies_of(pictures), random.Random(0)
    with seeing_server(step_ms=5.0, gib=1.0) as started, asyncio.Runner() as runner:

        def phase(length: float, senders: Senders | None = None) -> Texts:
            return runner.run(text_phase(started.port, length, streams, draw, senders))

        phase(5.0, Senders(started.port, body, 2))  # everything starts
        for rate in rates:
            senders = Senders(started.port, body, 4, rate, number=draw.randrange(10**9))
            turns = [(phase(seconds), phase(seconds, senders)) for _ in range(rounds)]
            a_second = len(senders.seconds) / rounds / seconds
            print(f"{a_second:.1f} large pictures a second, {streams} streams of text: ms alone, beside, ratio")
            for name, (times_of, share) in QUANTILES.items():
                found = [[float(np.quantile(times_of(each), share)) for each in turn] for turn in turns]
                alone, beside = (1e3 * statistics.median(each) for each in zip(*found, strict=True))
                ratio = statistics.median(after / before for before, after in found)
                print(f"  {name:20s} {alone:8.1f} {beside:8.1f} {ratio:6.2f}", flush=True)


def whole_memory(pid: int) -> float:
    """MiB of a server and all processes that it has started."""
    return sum(memory(each) for each in (pid, *descendants(pid)))


def bench_memory(pictures: Sequence[str], count: int, at_once: int, gib: float) -> None:
    body = bodies_of(pictures)

    async def most(port: int, pid: int) -> float:
        senders, seen = Senders(port, body, at_once), 0.0
        sending = asyncio.ensure_future(senders.send(lambda: senders.number >= count))
        while not sending.done():
            seen = max(seen, whole_memory(pid))
            await asyncio.sleep(0.05)
        await sending
        return seen

    with seeing_server(step_ms=5.0, gib=gib) as started, asyncio.Runner() as runner:
        for number in range(2):  # everything starts
            runner.run(ask(started.port, CHAT, body(10**9 + number)))
        before = whole_memory(started.pid)
        seen = runner.run(most(started.port, started.pid))
        time.sleep(SETTLE_SECONDS)
        after = whole_memory(started.pid)
    print(f"MiB of all processes, {count} large pictures, {at_once} at a time, a budget of {1024 * gib:.0f} MiB")
    print(
        f"  before {before:.0f}, most {seen:.0f} ({seen - before:+.0f}), afterwards {after:.0f} ({after - before:+.0f})"
    )


if __name__ == "__main__":
    _, _, folder, step_ms, gib = sys.argv
    serve_counting(
        NUM_SEQS, float(step_ms), None, seeing={"model": folder, "mm_bytes_in_flight_gb": float(gib)}, access_log=False
    )
