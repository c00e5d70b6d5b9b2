"""How fast HTTP and gRPC stream: requests and tokens per second, time to first token, time between tokens.

    python scripts/bench_serving.py --free [--streams 1,8,64,256]      # the server alone: its model costs nothing
    python scripts/bench_serving.py --device-ms 5                      # steps take that long on a device elsewhere
    python scripts/bench_serving.py [--streams 1,8,64,256] [--model demo] [engine options]
    python scripts/bench_serving.py --grpc ...                         # over gRPC too, in turn with HTTP
    python scripts/bench_serving.py --watched ...                      # every time again with the server's page open

Every stream is a connection that asks `--requests` times, one after the other, for `--tokens` tokens of a prompt of its
own; "gRPC stream" asks for all of them by one call of `GenerateStream`. The client is this process, the server another
one. "tokens/CPU-s" are tokens per second of CPU time of the server's process, so other programs on the machine, and
this client, do not count in it. "client CPU" is how much of one core the client took: near 100 % it is the client that
sets the pace, and on a machine with few cores it takes from the server what it takes.

With `--free` scheduler, detokeniser, HTTP and events are the real ones, in one thread; the executor returns the same
token for ever. Without it `jaxpaged serve` is started, and for each number of streams the same prompts go through an
engine without HTTP, in one process, as well: "offline" is its throughput, and "overhead" the share of it that is lost
over HTTP. On a CPU the model, the server and this client share the cores, so overhead is what they take from the model;
with `--device-ms` everything is real but the model, which counts, while the processor is free for the others.
"""

import argparse
import contextlib
import itertools
import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from server_process import serve_command, server
from serving_clients import Load, Place, load, prompt_ids

from jaxpaged.entrypoints.cli.serve import run_loop

ME = Path(__file__).resolve()
COLUMNS = {
    "over": "s",
    "streams": "d",
    "requests/s": ".1f",
    "tokens/s": ".0f",
    "TTFT p50 ms": ".1f",
    "TTFT p99 ms": ".1f",
    "chunk gap p50 ms": ".2f",
    "chunk gap p99 ms": ".2f",
    "tokens/chunk": ".2f",
    "tokens/CPU-s": ".0f",
    "client CPU": ".0%",
    "offline tokens/s": ".0f",
    "overhead": ".1%",
}
"""What is measured, and how it is written."""

WATCHED = ", watched"
Row = dict[str, float | str | None]


def wait_for_programs(url: str) -> None:
    """Until the server compiles nothing any more, as its metrics say: they are renewed when a request ends."""
    body = json.dumps({"prompt": [300], "max_tokens": 1}).encode()
    question = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    while True:
        with urllib.request.urlopen(question) as answer:
            answer.read()
        with urllib.request.urlopen(f"{url}/metrics") as answer:
            lines = [
                line.split() for line in answer.read().decode().splitlines() if line.startswith("jaxpaged:program")
            ]
        values = {name.partition("{")[0]: float(value) for name, value in lines}
        if values.get("jaxpaged:programs") == values.get("jaxpaged:programs_ready"):
            return
        time.sleep(1)


def measured(place: Place, num_streams: int, result: Load, offline: float | None) -> Row:
    """The columns of one measurement; None for what was not measured."""
    rate, num_chunks = result.num_tokens / result.seconds, sum(outcome.num_chunks for outcome in result.outcomes)
    values = (
        place.over,
        num_streams,
        len(result.outcomes) / result.seconds,
        rate,
        *np.percentile([1e3 * outcome.ttft for outcome in result.outcomes], [50, 99]).tolist(),
        *np.percentile([1e3 * gap for outcome in result.outcomes for gap in outcome.itl], [50, 99]).tolist(),
        result.num_tokens / num_chunks,
        result.num_tokens / max(result.cpu_seconds, 0.01),
        result.client_seconds / result.seconds,
        offline,
        None if offline is None else 1 - rate / offline,
    )
    return dict(zip(COLUMNS, values, strict=True))


def cells(row: Row) -> list[str]:
    return ["-" if value is None else f"{value:{COLUMNS[name]}}" for name, value in row.items()]


def line(row: Row | None = None) -> str:
    """A row, or the heads of the columns, below which `over` needs more room than its name."""
    widths = [max(len(name), 13 if name == "over" else 0) for name in COLUMNS]
    return "  ".join(map(str.rjust, COLUMNS if row is None else cells(row), widths))


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a table."""
    lines = [list(COLUMNS), ["--:"] * len(COLUMNS), *map(cells, rows)]
    return "".join(f"| {' | '.join(each)} |\n" for each in lines)


@contextlib.contextmanager
def open_page(url: str) -> Iterator[None]:
    """Ask the server what its page asks, as often as the page does."""
    closed = threading.Event()

    def watch() -> None:
        wait = 0.0
        while not closed.wait(wait):
            with urllib.request.urlopen(f"{url}/engine/state") as answer:
                wait = json.load(answer)["wait"]

    viewer = threading.Thread(target=watch)
    viewer.start()
    try:
        yield
    finally:
        closed.set()
        viewer.join()


def cost_of_page(rows: Sequence[Row]) -> str:
    """What of the rate is left with the page open, on the average of all measurements."""
    shares = []
    for name in ("tokens/s", "tokens/CPU-s"):
        watched, alone = (
            [row[name] for row in rows if row["over"].endswith(WATCHED) is with_page] for with_page in (True, False)
        )
        shares.append(f"{np.mean(watched) / np.mean(alone):.3f} of {name}")
    return f"with the page open: {', '.join(shares)}"


# ---- the same work without HTTP


def run_offline(args: argparse.Namespace, counts: Sequence[int], of_server: Sequence[str]) -> None:
    """Print the throughput of the same engine, in tokens a second, for every number of streams."""
    from jaxpaged import SamplingParams

    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True, temperature=0)
    with offline_engine(args, of_server) as engine:
        for repeat in (True, False):  # the first time warms up
            for count in counts:
                prompts = [
                    {"prompt_token_ids": prompt_ids(i, request, args.prompt_tokens)}
                    for request in range(args.requests)
                    for i in range(count)
                ]
                engine.reset_prefix_cache()
                seconds = seconds_of(engine, prompts, params, count)
                if not repeat:
                    print(len(prompts) * args.tokens / seconds, flush=True)


def seconds_of(engine: Any, prompts: list[dict], params: Any, num_streams: int) -> float:
    """How long all take, `num_streams` at a time: the next one comes when one ends."""
    begin, coming = time.perf_counter(), iter(enumerate(prompts))
    for number, prompt in itertools.islice(coming, num_streams):
        engine.add_request(str(number), prompt, params)
    while engine.has_unfinished_requests():
        num_ended = sum(output.finished for output in engine.step())
        for number, prompt in itertools.islice(coming, num_ended):
            engine.add_request(str(number), prompt, params)
    return time.perf_counter() - begin


@contextlib.contextmanager
def offline_engine(args: argparse.Namespace, of_server: Sequence[str]) -> Iterator[Any]:
    """An `LLMEngine` in this process, as the server has one in another."""
    from jaxpaged import LLM
    from jaxpaged.entrypoints.argument_parser import Parser
    from jaxpaged.entrypoints.cli.flags import engine_options
    from jaxpaged.entrypoints.option_flags import add_engine_flags

    if args.device_ms is not None:
        from bench_process import counting_config, counting_engine

        yield counting_engine(counting_config(max(args.streams), args.device_ms))
        return
    parser = Parser()
    add_engine_flags(parser)
    with LLM(**{**engine_options(parser.parse_args(of_server)), "model": args.model}) as llm:
        llm.wait_for_programs()
        yield llm.llm_engine


def offline_rates(args: argparse.Namespace) -> list[float | None]:
    if args.free or args.no_offline:
        return [None] * len(args.streams)
    done = subprocess.run(
        [sys.executable, str(ME), "--offline", *sys.argv[1:]], stdout=subprocess.PIPE, text=True, check=True
    )
    return [float(line) for line in done.stdout.split()]


def main() -> None:
    args, of_server = arguments()
    if args.serve_own:
        from fake_servers import serve_counting, serve_free

        port = 0 if args.grpc else None
        if args.free:
            return serve_free(max(args.streams), port)
        return serve_counting(max(args.streams), args.device_ms, port)
    if args.offline:
        return run_offline(args, args.streams, of_server)
    rates = offline_rates(args)
    own = [sys.executable, str(ME), "--serve-own", *sys.argv[1:]]
    real = serve_command(args.model, *of_server, *(["--grpc-port", "0"] if args.grpc else []))
    with server(own if args.free or args.device_ms is not None else real) as started:
        places = [Place("HTTP", started.url)]
        places += [Place(over, started.grpc) for over in ("gRPC", "gRPC stream") if started.grpc]
        print(line())
        for place in places:
            run_loop(load(place, started.pid, args, max(args.streams)))  # warms up
        wait_for_programs(started.url)
        rows = []
        for count, rate in zip(args.streams, rates, strict=True):
            turns = itertools.product(range(args.repeat), places, (False, True) if args.watched else (False,))
            for _, place, watched in turns:
                with open_page(started.url) if watched else contextlib.nullcontext():
                    rows.append(measured(place, count, run_loop(load(place, started.pid, args, count)), rate))
                rows[-1]["over"] += WATCHED * watched
                print(line(rows[-1]), flush=True)
    if args.watched:
        print(cost_of_page(rows))
    if args.json:
        args.json.write_text(json.dumps({"command": sys.argv[1:], "rows": rows}, indent=1), encoding="utf-8")
    if args.markdown:
        args.markdown.write_text(markdown(rows), encoding="utf-8")


def arguments() -> tuple[argparse.Namespace, list[str]]:
    """Our own arguments, and the engine's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 64, 256])
    parser.add_argument("--tokens", type=int, default=64, help="tokens per answer")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--requests", type=int, default=2, help="requests per stream")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--grpc", action="store_true", help="ask over gRPC too (extra grpc)")
    parser.add_argument("--watched", action="store_true", help="measure everything again with the page open")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="measure everything N times, in turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurements")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--free", action="store_true", help="a server whose model costs nothing")
    instead.add_argument("--device-ms", type=float, metavar="MS", help="a model that counts, and takes so long a step")
    parser.add_argument("--no-offline", action="store_true", help="do not run the same work without HTTP")
    parser.add_argument("--serve-own", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--offline", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_known_args()


if __name__ == "__main__":
    main()
