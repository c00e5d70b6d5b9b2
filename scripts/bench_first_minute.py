"""What compiling in the background costs requests: an engine's speed in its first minute, and once all is compiled.

    python scripts/bench_first_minute.py [--models demo llama-110m] [--requests 1 8] [--seconds 60] [--warm]

An engine of a process of its own starts with an empty compilation cache (`--warm`: with the one that the start before
filled) and gets as many requests at a time as `--requests` says, each of 32 to 512 random tokens and 64 to 128 more, a
new one as soon as one ends. Tokens, of prompts and answers, count from the first token of an answer on, for as long as
`--seconds` says. Then all programs are waited for, and requests of the same sizes, with other tokens, run until they
have as many: so both speeds are those of the same work. Models besides the embedded one are those of
scripts/bench_offline.py.

On a machine with other work the second ratio is the one to look at: tokens per second of the process's CPU time, with
the minute measured so too. It counts as lost what compiling took of cores that were idle, and so is the lower one.
"""

import argparse
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from offline_bench import checkpoints, workloads

MAX_MODEL_LEN = 1024
TOKEN_IDS = range(5, 300)  # every model has them


class Load:
    """Keeps `num_requests` under way, and tells how many tokens came of it. Every load has the same sizes, in the same
    order; `name` decides about the tokens, which no cache has then."""

    def __init__(self, engine: Any, num_requests: int, name: str):
        self.engine, self.num_requests, self.name = engine, num_requests, name
        self.draw_sizes, self.draw_tokens = random.Random(0), random.Random(name)
        self.prompts: dict[str, int] = {}  # id -> tokens, of prompts that are not computed yet
        self.num_added = 0
        self.running: set[str] = set()

    def add(self) -> None:
        from jaxpaged import SamplingParams
        from jaxpaged.sampling_params import RequestOutputKind

        [(num_in, num_out)] = workloads.mixed_sizes(self.draw_sizes, 1)
        params = SamplingParams(
            temperature=0.0, max_tokens=num_out, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        self.num_added += 1
        self.running.add(name := f"{self.name} {self.num_added}")
        self.prompts[name] = num_in
        prompt = [self.draw_tokens.choice(TOKEN_IDS) for _ in range(num_in)]
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def steps(self) -> Iterator[int]:
        """Tokens that each step gave."""
        while True:
            while len(self.running) < self.num_requests:
                self.add()
            num_tokens = 0
            for output in self.engine.step():
                num_tokens += len(output.outputs[0].token_ids) + self.prompts.pop(output.request_id, 0)
                if output.finished:
                    self.running.discard(output.request_id)
            yield num_tokens

    def first_token(self) -> "Load":
        """Itself, at its first token."""
        next(num_tokens for num_tokens in self.steps() if num_tokens)
        return self

    def measure(self, seconds: float = math.inf, num_tokens: int | float = math.inf) -> "Speed":
        """Go on for so many seconds of the cores, or until so many tokens came."""
        begin, cpu_begin, total = time.perf_counter(), time.process_time(), 0
        for came in self.steps():
            total += came
            cpu_seconds = (time.process_time() - cpu_begin) / os.cpu_count()
            if cpu_seconds >= seconds or total >= num_tokens:
                return Speed(total, time.perf_counter() - begin, cpu_seconds)
        raise AssertionError("steps do not end")

    def stop(self) -> None:
        self.engine.abort_request(list(self.running))


class Speed(NamedTuple):
    """What came, in seconds, and in seconds of CPU time over the number of cores."""

    num_tokens: int
    seconds: float
    cpu_seconds: float


def measure(origin: float, options: dict[str, Any], num_requests: int, seconds: float) -> dict[str, Any]:
    """One engine: seconds to its first token, and its speeds."""
    from jaxpaged.config import EngineConfig
    from jaxpaged.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_config(EngineConfig.from_options(**options))
    load = Load(engine, num_requests, "first").first_token()
    told = {"first_token": time.time() - origin, "first_minute": (first := load.measure(seconds))}
    load.stop()
    stats = engine.executor_stats()
    told |= {"ready": stats["programs_ready"], "wanted": stats["programs"]}
    engine.wait_for_programs()
    again = Load(engine, num_requests, "again").first_token()
    return told | {"afterwards": again.measure(num_tokens=first.num_tokens)}


def row(name: str, num_requests: int, told: dict[str, Any]) -> str:
    first, after = Speed(*told["first_minute"]), Speed(*told["afterwards"])
    speed, speed_after = first.num_tokens / first.seconds, after.num_tokens / after.seconds
    by_cpu_time = (first.num_tokens / first.cpu_seconds) / (after.num_tokens / after.cpu_seconds)
    cells = (
        name, f"{num_requests}", f"{told['first_token']:.1f}", f"{speed:,.0f}", f"{speed_after:,.0f}",
        f"{speed / speed_after:.2f}", f"{by_cpu_time:.2f}", f"{told['ready']} of {told['wanted']}",
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    from jaxpaged.entrypoints.cli.bench.startup import answer_of_child

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["demo", "llama-110m"], choices=["demo", *checkpoints.MODELS])
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8], metavar="N", help="under way at a time")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the first minute is")
    parser.add_argument("--warm", action="store_true", help="then once more, with the cache as it was left")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(**json.load(sys.stdin))), flush=True)
        os._exit(0)  # as the command does: programs that nobody waits for are still being compiled
    titles = (
        "model",
        "requests",
        "first token, s",
        "first minute, tok/s",
        "afterwards",
        "ratio",
        "by CPU time",
        "programs",
    )
    print("| " + " | ".join(titles) + " |\n" + "|---" * len(titles) + "|")
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models:
            path = name if name == "demo" else checkpoints.make_checkpoint(checkpoints.MODELS[name], Path(folder))
            for num_requests in args.requests:
                cache = f"{folder}/cache-{name}-{num_requests}"
                options = {"model": str(path), "max_model_len": MAX_MODEL_LEN, "compilation_cache_dir": cache}
                job = {"options": options, "num_requests": num_requests, "seconds": args.seconds}
                for temperature in ("", ", warm cache")[: 1 + args.warm]:
                    told = answer_of_child([sys.executable, __file__, "--child"], job)
                    print(row(name + temperature, num_requests, told), flush=True)


if __name__ == "__main__":
    main()
