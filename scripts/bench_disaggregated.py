"""How long those who generate wait for their next token while long prompts are computed: by one engine, and by two.

    python scripts/bench_disaggregated.py [--streams 4] [--seconds 20] [--prompt-tokens 1500] [--every 1.0]

The embedded model is served in several ways on the same two processors: by one engine that has both, and by an engine
that computes prompts and one that generates, a processor each, behind `jaxpaged proxy`: one that has the second engine
fetch a prompt while it is computed, and one that waits for all of it. In all ways `--streams` clients read
streams of tokens behind short prompts, one answer after the other, while every `--every` seconds somebody sends a long
prompt and wants one token. Printed are the milliseconds between two chunks of the streams, the time to the long
prompts' token, and the tokens a second of the streams. Each is measured `--rounds` times, in turns.

Clients, proxy and front ends need processors too, so on a machine with two this says little of what two machines would
do.
"""

import argparse
import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from server_process import LOOPBACK, Server, serve_command, server
from serving_clients import ASKED, prompt_ids

from jaxpaged.entrypoints.http_client import HttpClient
from jaxpaged.tools.bench.backends import HttpBackend
from jaxpaged.tools.bench.requests import BenchRequest, Outcome

OPTIONS = [
    "--max-model-len",
    "4096",
    "--max-num-seqs",
    "16",
    "--block-size",
    "16",
    "--no-access-log",
    "--wait-for-programs",
]
SHORT_PROMPT, ANSWER = 16, 100
MIN_PREFILL = 256
"""Tokens from which on the proxy lets a prompt be computed elsewhere."""
WARM_UP_SECONDS = 3.0


@dataclass
class Seen:
    """What clients saw in one measurement."""

    streams: list[Outcome] = field(default_factory=list)
    prompts: list[Outcome] = field(default_factory=list)

    def line(self, name: str, seconds: float) -> str:
        gaps = 1e3 * np.array([gap for outcome in self.streams for gap in outcome.itl])
        firsts = 1e3 * np.array([outcome.ttft for outcome in self.prompts])
        rate = sum(outcome.output_tokens for outcome in self.streams) / seconds
        numbers = [*(f"{np.percentile(gaps, q):.1f}" for q in (50, 99, 100)), f"{np.median(firsts):.0f}", f"{rate:.0f}"]
        return " | ".join([f"| {name}", *numbers]) + " |"


@contextlib.contextmanager
def one_engine(processors: list[int]) -> Iterator[str]:
    with pinned(processors, OPTIONS) as started:
        yield started.url


@contextlib.contextmanager
def two_engines(processors: list[int]) -> Iterator[tuple[str, str]]:
    """An engine on each of two processors, and two proxies, which may use both: one that does not wait for prompts to
    be computed, and one that does."""
    first, second = processors
    proxy = [sys.executable, "-m", "jaxpaged", "proxy", "--host", LOOPBACK, "--port", "0"]
    proxy += ["--min-prefill-tokens", str(MIN_PREFILL)]
    with (
        pinned([first], [*OPTIONS, "--kv-role", "kv_producer"]) as prefill,
        pinned([second], [*OPTIONS, "--kv-role", "kv_consumer"]) as decode,
        server([*proxy, "--prefill", prefill.url, "--decode", decode.url]) as early,
        server([*proxy, "--prefill", prefill.url, "--decode", decode.url, "--wait-for-prefill"]) as late,
    ):
        yield early.url, late.url


@contextlib.contextmanager
def pinned(processors: list[int], options: list[str]) -> Iterator[Server]:
    """A server, and its core, that run on these processors."""
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)  # what is started inherits it
    try:
        with server(serve_command(*options)) as started:
            os.sched_setaffinity(0, everywhere)
            yield started
    finally:
        os.sched_setaffinity(0, everywhere)


async def measure(url: str, args: argparse.Namespace, number: int, seconds: float) -> Seen:
    """Ask for so long. Ends this program when a request fails."""
    seen, end = Seen(), time.perf_counter() + seconds

    async def ask(backend: HttpBackend, into: list[Outcome], prompt: list[int], num_tokens: int) -> None:
        into.append(await backend.send(BenchRequest(prompt, len(prompt), num_tokens), ASKED, f"{id(prompt)}"))

    async def stream(which: int) -> None:
        backend, request = HttpBackend(HttpClient(url, {}), "/v1/completions", chat=False), 0
        while time.perf_counter() < end:
            await ask(backend, seen.streams, prompt_ids(which, number + request, SHORT_PROMPT), ANSWER)
            request += 1
        await backend.close()

    async def prompts() -> None:
        backend, request, asked = HttpBackend(HttpClient(url, {}), "/v1/completions", chat=False), 0, []
        while time.perf_counter() < end:
            prompt = prompt_ids(number + request, args.streams + 1, args.prompt_tokens)
            asked.append(asyncio.ensure_future(ask(backend, seen.prompts, prompt, 1)))
            request += 1
            await asyncio.sleep(args.every)
        await asyncio.gather(*asked)
        await backend.close()

    await asyncio.gather(prompts(), *(stream(which) for which in range(args.streams)))
    if errors := [outcome.error for outcome in (*seen.streams, *seen.prompts) if outcome.error]:
        raise SystemExit(f"{len(errors)} requests failed, the first one: {errors[0]}")
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=4, help="clients that generate at the same time")
    parser.add_argument("--seconds", type=float, default=20.0, help="of one measurement")
    parser.add_argument("--prompt-tokens", type=int, default=1500, help="of a long prompt")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two long prompts")
    parser.add_argument("--rounds", type=int, default=2, help="measurements of each way")
    args = parser.parse_args()
    if len(processors := sorted(os.sched_getaffinity(0))[:2]) < 2:
        parser.error("this takes two processors, and there is one.")
    print("| | gap, ms: median | p99 | longest | first token of a long prompt, ms | tokens/s of the streams |")
    print("|---|---|---|---|---|---|")
    with one_engine(processors) as one, two_engines(processors) as (early, late):
        ways = ("one engine", one), ("two, fetched while computed", early), ("two, fetched once computed", late)
        for number in range(args.rounds):
            for place, (name, url) in enumerate(ways):
                prompts = 300 * number + 100 * place
                asyncio.run(measure(url, args, 7000 + prompts, min(WARM_UP_SECONDS, args.seconds)))
                seen = asyncio.run(measure(url, args, prompts, args.seconds))
                print(seen.line(name, args.seconds), flush=True)


if __name__ == "__main__":
    main()
