"""What compiling in the background costs requests: an engine's speed in its first minute, and once all is compiled.

    python scripts/bench_first_minute.py [--models demo llama-110m] [--requests 1 8] [--seconds 60] [--warm]

An engine of a process of its own starts with an empty compilation cache (`--warm`: with the one that the start before
filled) and gets as many requests at a time as `--requests` says, each of 32 to 512 random tokens and 64 to 128 more, a
new one as soon as one ends. Tokens, of prompts and answers, count from the first token of an answer on, for as long as
`--seconds` says; then all programs are waited for, and the same goes on for a quarter of that. Models besides the
embedded one are those of scripts/bench_offline.py.

On a machine with other work the second ratio is the one to look at: tokens per second of the process's CPU time, with
the minute measured so too. It counts as lost what compiling took of cores that were idle, and so is the lower one.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from offline_bench import checkpoints, workloads

MAX_MODEL_LEN = 1024
TOKEN_IDS = range(5, 300)  # every model has them


class Load:
    """Keeps `num_requests` under way, and tells how many tokens came of it."""

    def __init__(self, engine: Any, num_requests: int):
        self.engine, self.num_requests = engine, num_requests
        self.draw = random.Random(0)
        self.prompts: dict[str, int] = {}  # id -> tokens, of prompts that are not computed yet
        self.num_added = self.num_running = 0

    def add(self) -> None:
        from jaxpaged import SamplingParams
        from jaxpaged.sampling_params import RequestOutputKind

        [(num_in, num_out)] = workloads.mixed_sizes(self.draw, 1)
        params = SamplingParams(
            temperature=0.0, max_tokens=num_out, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        self.num_added, self.num_running = self.num_added + 1, self.num_running + 1
        self.prompts[name := str(self.num_added)] = num_in
        prompt = [self.draw.choice(TOKEN_IDS) for _ in range(num_in)]
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def steps(self) -> Iterator[int]:
        """Tokens that each step gave."""
        while True:
            while self.num_running < self.num_requests:
                self.add()
            num_tokens = 0
            for output in self.engine.step():
                num_tokens += len(output.outputs[0].token_ids) + self.prompts.pop(output.request_id, 0)
                self.num_running -= output.finished
            yield num_tokens

    def speed(self, seconds: float) -> tuple[float, float]:
        """Tokens per second, and per second of CPU time over the number of cores, for so long by the latter."""
        begin, cpu_begin, total = time.perf_counter(), time.process_time(), 0
        for num_tokens in self.steps():
            total += num_tokens
            cpu_seconds = (time.process_time() - cpu_begin) / os.cpu_count()
            if cpu_seconds >= seconds:
                return total / (time.perf_counter() - begin), total / cpu_seconds
        raise AssertionError("steps do not end")


def measure(origin: float, options: dict[str, Any], num_requests: int, seconds: float) -> dict[str, Any]:
    """One engine: seconds to its first token, and its speeds."""
    from jaxpaged.config import EngineConfig
    from jaxpaged.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_config(EngineConfig.from_options(**options))
    load = Load(engine, num_requests)
    next(num_tokens for num_tokens in load.steps() if num_tokens)
    told = {"first_token": time.time() - origin, "first_minute": load.speed(seconds)}
    stats = engine.executor_stats()
    told |= {"ready": stats["programs_ready"], "wanted": stats["programs"]}
    engine.wait_for_programs()
    load.speed(seconds / 20)
    return told | {"afterwards": load.speed(seconds / 4)}


def row(name: str, num_requests: int, told: dict[str, Any]) -> str:
    (first, cpu_first), (after, cpu_after) = told["first_minute"], told["afterwards"]
    cells = (
        name, f"{num_requests}", f"{told['first_token']:.1f}", f"{first:,.0f}", f"{after:,.0f}", f"{first / after:.2f}",
        f"{cpu_first / cpu_after:.2f}", f"{told['ready']} of {told['wanted']}",
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
