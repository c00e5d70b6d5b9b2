"""Serves the embedded model for thousands of requests, does harm to the server meanwhile, and tells whether it held.

    python scripts/soak.py [--requests 10000] [--fault-seconds 30] [--seed 0] [options of jaxpaged serve]
    python scripts/soak.py --quick     # half a minute: few requests, and a model that counts; sums are not judged
    python scripts/soak.py --pictures  # `demo-vision`, 2,500 requests, nearly all with pictures (`soak_pictures.py`)

Compiles a bundle, so that a core that is replaced is soon there, unless `--bundle` names a folder that has one already.
Starts `jaxpaged serve` over HTTP and gRPC on free ports of 127.0.0.1, with few KV blocks, so that requests are
preempted, and a short queue. `--clients` clients of all kinds (`soak_clients.py`) ask it at the same time, each draws
what it does from the seed, and every `--fault-seconds` something bad happens (`soak_faults.py`). A tenth of the
requests, with every fault once, comes first, to warm up, and another tenth without a fault, since the core that
replaced the last killed one is as new as that. Memory is measured after them, and at the end.

It held, and the exit status is 0, when

    every client got one of the answers that its kind may get; errors of the server only while a fault excuses them
    after every fault clients are served again
    sums are right, but for the few that the model gets wrong
    at the end no KV block has an owner, no page of the encoder cache is held, no request is under way, nothing was
        compiled that should have been before, and of pictures it says what it said at the start
    the server and its core hold at most 3 % more memory than after the warm-up, and no more open files; with pictures,
        all its processes together at most 3 % and 20 MiB
    no process of the core ended that was not killed on purpose, and the log has no traceback
    it stops, with status 0, and no process that it started is left

The first table has what every kind of client got, with its number; the second one how long each fault was felt: from
the moment it was done until a client that comes then is answered over HTTP and over gRPC. Ctrl-C ends the run early,
with the tables so far.
"""

import argparse
import asyncio
import contextlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
from server_process import Server, descendants, memory, num_open_files, serve_command, server, still_running
from soak_clients import Client, Places, Refused, ask, outcome, sorts
from soak_faults import Faults
from soak_pictures import ENGINE as ENGINE_THAT_SEES
from soak_pictures import MODEL, Picture, PictureClients, drawn, known
from tqdm import tqdm

from jaxpaged.messages import KVBlockMap
from jaxpaged.proto.jaxpaged_pb2_grpc import InferenceStub

CHANNELS = 4
MEMORY_MARGIN, QUICK_MARGIN, FILES_MARGIN = 0.03, 0.1, 8
MOST_WRONG = 0.02
"""Share of the sums."""
WARM_UP = 0.1
SETTLE_SECONDS = 300.0
NUM_SEQS, QUICK_SEQS, NUM_QUEUED = 16, 4, 64
SERVER = [
    "--grpc-port",
    "0",
    "--max-restarts",
    "100000",
    "--step-timeout",
    "20",
    "--no-access-log",
    "--max-num-queued-reqs",
    str(NUM_QUEUED),
]
ENGINE = [
    "--max-model-len",
    "512",
    "--max-num-seqs",
    str(NUM_SEQS),
    "--num-gpu-blocks-override",
    "140",
    "--max-num-batched-tokens",
    "128",
    "--token-buckets",
    "16,128",
]
QUICK = {"requests": 150, "fault_seconds": 0.5, "clients": 8}
PICTURES = {"requests": 2500, "fault_seconds": 15.0, "clients": 16, "model": "demo-vision"}
MIB_OF_PICTURES = 20
"""Those that are kept, and what allocators keep of large ones that have gone. A processed picture of each request would
be three times as much."""
QUICK_SERVER = {"step_timeout": 5.0, "max_restarts": 1000, "max_num_queued_reqs": NUM_QUEUED, "access_log": False}
QUICK_STEP_MS = 2.0


@dataclass(frozen=True)
class State:
    """A server at rest."""

    server_memory: float  # MiB, as the next
    core_memory: float
    num_files: int
    metrics: dict[str, float]
    decoder_memory: float = 0.0  # of the processes that decode pictures

    @property
    def memory(self) -> float:
        return self.server_memory + self.core_memory + self.decoder_memory


@dataclass
class Soak:
    """The run: what was seen, and what must not have been."""

    faults: Faults
    draw: random.Random
    kinds: dict
    bar: tqdm
    quick: bool  # with a model that cannot add, and too few requests to warm up
    pictures: Sequence[Picture] = ()  # what is known of them
    seen: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    longest: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    problems: Counter[str] = field(default_factory=Counter)

    async def requests(self, count: int, num_clients: int, until: asyncio.Event) -> None:
        """`count` requests at least, and more until the event is set, of `num_clients` at a time."""
        left, names, weights = count, list(self.kinds), [each.weight for each in self.kinds.values()]

        async def client() -> None:
            nonlocal left
            while left > 0 or not until.is_set():
                left -= 1
                [name] = self.draw.choices(names, weights)
                await self.request(name)
                self.bar.update()

        await asyncio.gather(*(client() for _ in range(num_clients)))

    async def request(self, name: str) -> None:
        kind, begin = self.kinds[name], time.monotonic()
        status = await outcome(kind.run, Client(self.faults.places, random.Random(self.draw.getrandbits(64))))
        end = time.monotonic()
        self.seen[name][status] += 1
        self.longest[name] = max(self.longest[name], end - begin)
        if status not in kind.good and not self.faults.excuse(status, begin, end):
            self.problems[f"{name}: a client got {status!r}"] += 1

    async def phase(self, count: int, num_clients: int, pause: float) -> None:
        """Requests, with a fault every `pause` seconds; every fault comes once at least."""
        faulted = asyncio.Event()

        async def do_harm() -> None:
            while True:
                for name in self.faults.kinds:
                    await asyncio.sleep(pause)
                    self.bar.set_postfix_str(name)
                    await self.faults.inject(name)
                    self.bar.set_postfix_str("")
                    self.bar.update(0)
                faulted.set()

        harm = asyncio.ensure_future(do_harm())
        asking = asyncio.ensure_future(self.requests(count, num_clients, faulted))
        try:
            await asyncio.wait({harm, asking}, return_when=asyncio.FIRST_COMPLETED)
            while self.faults.done[-1].end == float("inf"):  # what was begun is felt to its end
                await asyncio.sleep(0.05)
        finally:
            harm.cancel()
            asking.cancel()
            for failed in await asyncio.gather(harm, asking, return_exceptions=True):
                if isinstance(failed, Exception):
                    raise failed

    def judge(self, first: State, last: State, log: str) -> list[str]:
        """What must not be."""
        found = [f"{what} ({count} times)" for what, count in sorted(self.problems.items())] + self.faults.problems
        right, wrong = (sum(each[word] for each in self.seen.values()) for word in ("right", "wrong"))
        seeing = bool(self.pictures)
        if wrong > MOST_WRONG * (right + wrong) and not self.quick:
            found.append(f"{wrong} of {right + wrong} {'answers' if seeing else 'sums'} are wrong")
        for what, before, after in (
            ("server", first.server_memory, last.server_memory),
            ("core", first.core_memory, last.core_memory),
            *([("all processes", first.memory, last.memory)] if seeing else []),
        ):
            if after > before * (1 + (QUICK_MARGIN if self.quick else MEMORY_MARGIN)) + MIB_OF_PICTURES * seeing:
                found.append(f"{what}: {after:.0f} MiB at the end, {before:.0f} after the warm-up")
        if last.num_files > first.num_files + FILES_MARGIN:
            found.append(f"{last.num_files} files are open at the end; after the warm-up there were {first.num_files}")
        restarts, late = last.metrics["jaxpaged:engine_restarts_total"], last.metrics.get("jaxpaged:recompiles", 0)
        if restarts != self.faults.num_lost_cores:
            found.append(f"the core was replaced {restarts:g} times, for {self.faults.num_lost_cores} faults")
        if late:
            found.append(f"{late:g} programs were compiled too late")
        if "Traceback" in log:
            found.append(f"the log has tracebacks, the first one:\n{log[log.index('Traceback') :][:1500]}")
        return found

    def tables(self) -> str:
        lines = [f"{'client':<24}{'requests':>9}{'longest s':>11}  what they got"]
        for name in self.kinds:
            got = "  ".join(f"{word} {count}" for word, count in self.seen[name].most_common())
            lines.append(f"{name:<24}{sum(self.seen[name].values()):>9}{self.longest[name]:>11.1f}  {got}")
        lines += ["", f"{'fault':<24}{'times':>9}{'median s':>11}{'longest s':>11}"]
        for name in self.faults.kinds:
            seconds = [fault.seconds for fault in self.faults.done if fault.name == name] or [0.0]
            lines.append(f"{name:<24}{len(seconds):>9}{statistics.median(seconds):>11.2f}{max(seconds):>11.2f}")
        return "\n".join(lines)


async def metrics(port: int) -> dict[str, float]:
    """Those without labels of their own."""
    text = await ask_text(port, "/metrics")
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name.partition("{")[0]: float(value) for name, _, value in lines}


async def ask_text(port: int, path: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    with contextlib.closing(writer):
        writer.write(f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
        return (await reader.read()).partition(b"\r\n\r\n")[2].decode()


async def at_rest(started: Server, faults: Faults) -> State:
    """Wait until nothing is under way and every program is there. Raises TimeoutError."""
    async with asyncio.timeout(SETTLE_SECONDS):
        while True:
            with contextlib.suppress(Refused, ConnectionError, KeyError):
                await ask(started.port, "/v1/completions", {"prompt": [300], "max_tokens": 1})  # metrics follow steps
                values, block_map = await metrics(started.port), await faults.core_says("block_map")
                names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "jaxpaged:http_requests_under_way")
                idle = not any(values[name] for name in names) and not num_held(block_map)
                if idle and values.get("jaxpaged:programs_ready") == values.get("jaxpaged:programs"):
                    break
            await asyncio.sleep(0.5)
    core, decoders = memory(started.core_pid()), sum(map(memory, started.decoder_pids()))
    return State(memory(started.pid), core, num_open_files(started.pid), values, decoders)


def num_held(block_map: KVBlockMap) -> int:
    """Blocks of the KV cache and pages of the encoder cache that somebody needs."""
    pages = 0 if block_map.encoder_held is None else np.count_nonzero(block_map.encoder_held)
    return int(np.count_nonzero(block_map.num_owners[1:]) + pages)


@contextlib.asynccontextmanager
async def channels(target: str) -> AsyncIterator[list[InferenceStub]]:
    """Stubs with a connection each, which is renewed quickly."""
    own = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 200)]
    async with contextlib.AsyncExitStack() as stack:
        made = [await stack.enter_async_context(grpc.aio.insecure_channel(target, own)) for _ in range(CHANNELS)]
        yield [InferenceStub(each) for each in made]


async def run(started: Server, folder: Path, args: argparse.Namespace) -> list[str]:
    """The whole run; returns what must not be."""
    draw, grpc_port = random.Random(args.seed), int(started.grpc.rpartition(":")[2])
    async with channels(started.grpc) as stubs:
        places = Places(started.port, stubs)
        num_places = (QUICK_SEQS if args.quick else NUM_SEQS) + NUM_QUEUED
        faults = Faults(
            started, folder, places, grpc_port, num_places, random.Random(draw.getrandbits(64)), args.pictures
        )
        with tqdm(total=args.requests, unit=" requests", smoothing=0.05) as bar:
            soak = Soak(faults, draw, sorts(grpc_port, with_grammars=not args.quick), bar, args.quick)
            if args.pictures:
                await look_at_pictures(soak, args.seed)
            early, without_faults = round(args.requests * WARM_UP), asyncio.Event()
            without_faults.set()
            try:
                await at_rest(started, faults)
                await soak.phase(early, args.clients, 0.5)
                await soak.requests(early, args.clients, without_faults)
                first = await at_rest(started, faults)
                await soak.phase(args.requests - 2 * early, args.clients, args.fault_seconds)
            except asyncio.CancelledError:  # by Ctrl-C
                print(soak.tables(), *sorted(soak.problems), *faults.problems, sep="\n")
                raise
        try:
            last = await at_rest(started, faults)
        except TimeoutError:
            block_map = await faults.core_says("block_map")
            print(soak.tables())
            return [f"not at rest: {num_held(block_map)} blocks and pages are held, {block_map.request_ids}"]
    print(soak.tables())
    print(
        f"\nmemory of the server {first.server_memory:.1f} -> {last.server_memory:.1f} MiB, of its core "
        f"{first.core_memory:.1f} -> {last.core_memory:.1f} MiB, of processes that decode pictures "
        f"{first.decoder_memory:.1f} -> {last.decoder_memory:.1f} MiB; "
        f"open files {first.num_files} -> {last.num_files}; "
        f"preemptions {last.metrics['vllm:num_preemptions_total']:g}; lines of log {started.logged().count(chr(10))}"
    )
    return soak.judge(first, last, started.logged()) + await forgotten(soak)


async def look_at_pictures(soak: Soak, seed: int) -> None:
    """From now on the clients have pictures, and few have none."""
    places = soak.faults.places
    soak.pictures = await known(places.port, drawn(seed))
    texts = {name: soak.kinds[name] for name in ("HTTP sum", "gRPC sum", "HTTP leaves")}
    soak.kinds = {**PictureClients(soak.pictures).sorts(), **texts}


async def forgotten(soak: Soak) -> list[str]:
    """Pictures of which the server says something else than at the start."""
    again = await known(soak.faults.places.port, soak.pictures)
    changed = sum(each != before for each, before in zip(again, soak.pictures, strict=True))
    return [f"of {changed} of {len(again)} pictures it says something else than at the start"] if changed else []


def left_behind(started: Server, pids: Sequence[int]) -> list[str]:
    """What there should not be of a server that was stopped, and that had started these processes."""
    found = [f"process {pid}, which the server had started, runs on" for pid in still_running(pids)]
    status = started.process.returncode
    return [*found, f"the server ended with status {status}"] if status else found


def serving(args: argparse.Namespace, of_server: list[str], folder: str) -> list[str]:
    """The command that serves the model, compiled."""
    bundle, engine = args.bundle or Path(folder) / "bundle", ENGINE
    if args.pictures:
        engine, of_server = [*ENGINE, *ENGINE_THAT_SEES], ["--served-model-name", MODEL, *of_server]
    if not bundle.exists():
        command = [sys.executable, "-m", "jaxpaged", "compile", args.model, "-o", bundle, *engine]
        subprocess.run(command, check=True)
    return serve_command(args.model, *engine, "--bundle", str(bundle), *SERVER, *of_server)


def main() -> int | None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=32, help="that ask at the same time")
    parser.add_argument("--fault-seconds", type=float, default=30.0, help="between two faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--bundle", type=Path, help="what is compiled is kept there, for the next time")
    parser.add_argument("--quick", action="store_true", help="a few requests, a fault right after the other")
    parser.add_argument("--pictures", action="store_true", help="that nearly all clients send")
    parser.add_argument("--serve-counting", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(**QUICK if "--quick" in sys.argv else PICTURES if "--pictures" in sys.argv else {})
    args, of_server = parser.parse_known_args()
    if args.serve_counting:
        from fake_servers import serve_counting

        return serve_counting(QUICK_SEQS, QUICK_STEP_MS, 0, **QUICK_SERVER)
    with tempfile.TemporaryDirectory(prefix="soak-", dir="/tmp") as folder:
        command = [sys.executable, __file__, "--serve-counting"] if args.quick else serving(args, of_server, folder)
        with server(command, {"TMPDIR": folder}) as started:
            begin = time.monotonic()
            found = asyncio.run(run(started, Path(folder), args))
            pids = descendants(started.pid)
        found += left_behind(started, pids)
    print(f"{time.monotonic() - begin:.0f} s, seed {args.seed}")
    print("\n".join(found) or "it held")
    return 1 if found else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the server is stopped then too
    sys.exit(main())
