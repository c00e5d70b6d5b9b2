#!/usr/bin/env python
"""Thousands of requests to two engines that compute prompts, two that generate, and the proxy before them, under harm.

    python scripts/soak_pairs.py [--requests 3000] [--fault-seconds 10] [--clients 8] [--seed 0] [--bundle FOLDER]

Starts `jaxpaged serve` four times (two `--kv-role kv_producer`, two `kv_consumer`), with the embedded model, few KV
blocks, a tier in host memory and one on a disk that all four share, and `jaxpaged proxy` before them, all on 127.0.0.1.
Clients ask the proxy for sums, for code words in long texts (some of which many ask about), and for streams of random
lengths; some leave. Every `--fault-seconds` something bad happens (`soak_pair_faults.py`): a server is killed or
stopped, its core is killed, pages on the disk are damaged or lost. What was killed is started again where it was.

It held, and the exit status is 0, when

    every client got one of the answers that its kind may get; errors only while a decode engine is killed, by those
    whose answer broke off or that came while none was there
    sums and code words are right, but for the few that the model gets wrong
    at the end no KV block is held, no request waits, no page is lent, and none is on its way in any engine
    nothing was compiled that should have been before, and no log has a traceback
    after everything is stopped, the folder of pages holds no unfinished file, and whoever was not killed left none

Ctrl-C ends the run early, with the tables so far.
"""

import argparse
import asyncio
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from demo_model import tasks
from server_process import LOOPBACK
from soak import WARM_UP, Soak, ask_text
from soak_clients import (
    CHAT,
    Client,
    Places,
    Sort,
    ask,
    http_garbage,
    http_leaves,
    http_slow,
    http_stream,
    http_streamed_sum,
    http_sum,
    http_wrong,
    sort,
)
from soak_pair_faults import PairFaults, Pairs, Process
from tqdm import tqdm

MOST_WRONG = 0.02
"""Share of the sums and code words."""
SETTLE_SECONDS = 120.0
ENGINE = [
    "--max-model-len",
    "1024",
    "--max-num-seqs",
    "8",
    "--block-size",
    "16",
    "--num-gpu-blocks-override",
    "160",
    "--max-num-batched-tokens",
    "128",
    "--token-buckets",
    "16,128",
]
SERVE = ["--kv-lease-seconds", "10", "--max-restarts", "100000", "--no-access-log"]
PROXY = ["--min-prefill-tokens", "16"]
NUM_KNOWN, KNOWN_SHARE, TEXT_CHARACTERS = 12, 0.7, (300, 2200)
AT_REST = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_requests_kv_fetch_by_stage",
    "vllm:kv_cache_usage_perc",
    "jaxpaged:http_requests_under_way",
    "jaxpaged:kv_leases",
    "jaxpaged:kv_lease_bytes",
    "jaxpaged:kv_offload_copies_under_way",
)
"""What must be 0 in every engine that has it."""


def code_word_clients(seed: int) -> Sort:
    """Clients that ask for the code word of a text; most texts are some that others ask about too."""
    draw_known = random.Random(f"{seed} known")
    known = [tasks.draw_code_word(draw_known, draw_known.randint(*TEXT_CHARACTERS), True) for _ in range(NUM_KNOWN)]

    async def code_word(client: Client) -> str:
        question, answer = client.draw.choice(known)
        if client.draw.random() > KNOWN_SHARE:
            question, answer = tasks.draw_code_word(client.draw, client.draw.randint(*TEXT_CHARACTERS), True)
        messages = [{"role": "user", "content": question}]
        got = await ask(client.places.port, CHAT, {"messages": messages, "max_tokens": 24, "temperature": 0})
        return "right" if got["choices"][0]["message"]["content"].strip() == answer else "wrong"

    return sort(code_word, 40, "right", "wrong")


def kinds(seed: int) -> dict[str, Sort]:
    """All kinds of clients, by the words of the table."""
    return {
        "code word": code_word_clients(seed),
        "sum": sort(http_sum, 10, "right", "wrong"),
        "sum, streamed": sort(http_streamed_sum, 10, "right", "wrong"),
        "random lengths": sort(http_stream, 20, "200"),
        "slow reader": sort(http_slow, 2, "200"),
        "leaves": sort(http_leaves, 10, "left", "200"),
        "wrong body": sort(http_wrong, 4, "400", "404", "200"),
        "garbage": sort(http_garbage, 2, "400", "404", "405", "413", "closed"),
    }


class PairSoak(Soak):
    """Harm is done every so many seconds, however long the last was felt."""

    async def harm(self, count: int, num_clients: int, pause: float) -> None:
        """`count` requests, with a fault every `pause` seconds, and a fault of each kind at least."""
        faulted = asyncio.Event()

        async def do_harm() -> None:
            while True:
                for name in self.faults.kinds:
                    await asyncio.sleep(pause)
                    self.bar.set_postfix_str(name)
                    await self.faults.inject(name)
                faulted.set()

        harm, asking = (
            asyncio.ensure_future(do_harm()),
            asyncio.ensure_future(self.requests(count, num_clients, faulted)),
        )
        try:
            await asyncio.wait({harm, asking}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            harm.cancel()
            asking.cancel()
            for failed in await asyncio.gather(harm, asking, return_exceptions=True):
                if isinstance(failed, Exception):
                    raise failed
        await self.faults.recovered()

    def wrong_answers(self) -> list[str]:
        found = [f"{what} ({count} times)" for what, count in sorted(self.problems.items())] + self.faults.problems
        right, wrong = (sum(each[word] for each in self.seen.values()) for word in ("right", "wrong"))
        if wrong > MOST_WRONG * (right + wrong):
            found.append(f"{wrong} of {right + wrong} sums and code words are wrong")
        return found


async def metrics(port: int) -> dict[str, float]:
    """Of a server, summed over labels."""
    values: dict[str, float] = {}
    for line in (await ask_text(port, "/metrics")).splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            values[name.partition("{")[0]] = values.get(name.partition("{")[0], 0.0) + float(value)
    return values


async def left_over(engine: Process) -> list[str]:
    """What an engine still holds after some time without requests, in words."""
    end, found = time.monotonic() + SETTLE_SECONDS, ["it does not answer"]
    while found and time.monotonic() < end:
        await asyncio.sleep(1.0)
        try:
            await ask(engine.port, "/v1/completions", {"prompt": [300], "max_tokens": 1})  # metrics follow steps
            values = await metrics(engine.port)
        except (OSError, ValueError, LookupError):
            continue
        found = [f"{name} is {values[name]:g}" for name in AT_REST if values.get(name)]
    late = values.get("jaxpaged:recompiles", 0) if not found else 0
    return [f"{engine.name}: {what}" for what in found + [f"{late:g} programs were compiled too late"] * bool(late)]


async def run(pairs: Pairs, args: argparse.Namespace) -> list[str]:
    """The whole run; returns what must not be."""
    draw = random.Random(args.seed)
    await pairs.start()
    places = Places(pairs.proxy.port, [])
    faults = PairFaults(pairs, places, random.Random(draw.getrandbits(64)))
    with tqdm(total=args.requests, unit=" requests", smoothing=0.05) as bar:
        soak = PairSoak(faults, draw, kinds(args.seed), bar, quick=False)
        early, without_faults = round(args.requests * WARM_UP), asyncio.Event()
        without_faults.set()
        try:
            await soak.requests(early, args.clients, without_faults)
            await soak.harm(args.requests - early, args.clients, args.fault_seconds)
        except asyncio.CancelledError:  # by Ctrl-C
            print(soak.tables(), *sorted(soak.problems), *faults.problems, sep="\n")
            raise
    held = await asyncio.gather(*map(left_over, pairs.engines))
    told = await asyncio.gather(*(metrics(engine.port) for engine in pairs.engines))
    print(soak.tables())
    for name in (
        "jaxpaged:kv_leases_granted_total",
        "jaxpaged:kv_leases_expired_total",
        "jaxpaged:kv_lent_pages_total",
        "vllm:num_preemptions_total",
        "jaxpaged:kv_offload_tier_corrupt_total",
    ):
        counts = ", ".join(f"{each.name} {values.get(name, 0):g}" for each, values in zip(pairs.engines, told))
        print(f"{name}, since each was started: {counts}")
    return soak.wrong_answers() + [what for each in held for what in each]


def bundle_of(args: argparse.Namespace, folder: Path) -> Path:
    """The programs of all four engines, compiled."""
    bundle = args.bundle or folder / "bundle"
    if not bundle.exists():
        command = [sys.executable, "-m", "jaxpaged", "compile", args.model, "-o", str(bundle), *ENGINE]
        subprocess.run([*command, "--kv-offload", "host=1M"], check=True)
    return bundle


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--clients", type=int, default=8, help="that ask at the same time")
    parser.add_argument("--fault-seconds", type=float, default=10.0, help="between two faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--bundle", type=Path, help="what is compiled is kept there, for the next time")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-", dir="/tmp") as name:
        folder = Path(name)
        serve = [args.model, *ENGINE, *SERVE, "--bundle", str(bundle_of(args, folder))]
        serve += ["--kv-offload", f"host=32M,disk={folder / 'pages'}:64M"]
        begin, pairs = time.monotonic(), Pairs(folder, serve, PROXY)
        try:
            found = asyncio.run(run(pairs, args))
        finally:
            pairs.stop()
        found += pairs.left_behind()
    print(f"{time.monotonic() - begin:.0f} s, seed {args.seed}, on {LOOPBACK}")
    print("\n".join(found) or "it held")
    return 1 if found else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the servers are stopped then too
    sys.exit(main())
