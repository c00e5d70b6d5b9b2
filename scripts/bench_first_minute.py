"""What compiling costs requests: the speed of an engine in its first minute, beside one that has all programs.

    python scripts/bench_first_minute.py [--models demo llama-110m] [--requests 1 8] [--seconds 60] [--warm]
    python scripts/bench_first_minute.py --models llama-110m --engine="--quantization int8"

An engine of a process of its own starts with an empty compilation cache (`--warm`: then again with one that is filled)
and gets as many requests at a time as `--requests` says, each of 32 to 512 random tokens and 64 to 128 more, a new one
as soon as one ends. Tokens, of prompts and answers, count from the first token of an answer on, for as long as
`--seconds` says. Another engine, which has waited for all programs, has the same work, and the cores in turns of half a
second: so both meet the same moments of a machine, and neither clock runs while the other one does. Models besides the
embedded one are those of scripts/bench_offline.py.
"""

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from offline_bench import checkpoints, workloads
from offline_bench.engines import own_time
from offline_bench.turns import Clock, Runner, Turns

MAX_MODEL_LEN = 1024
TOKEN_IDS = range(5, 300)  # every model has them
SAY_SECONDS = 0.5
"""How often the engine that has all programs says how far it is."""


class Load:
    """Keeps `num_requests` under way, and tells how many tokens came of it. Every load is the same."""

    def __init__(self, engine: Any, num_requests: int):
        self.engine, self.num_requests = engine, num_requests
        self.draw_sizes, self.draw_tokens = random.Random(0), random.Random(1)
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
        self.running.add(name := str(self.num_added))
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

    def speeds(self) -> Iterator["Speed"]:
        """From now on, after each step."""
        begin, total = time.perf_counter(), 0
        for came in self.steps():
            total += came
            yield Speed(total, time.perf_counter() - begin)


class Speed(NamedTuple):
    num_tokens: int
    seconds: float

    @property
    def per_second(self) -> float:
        return self.num_tokens / self.seconds


# ---- the process of an engine ------------------------------------------------------------------------


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def run_child(job: dict[str, Any]) -> None:
    """One engine: with `seconds` its first ones; without, how fast it is with all programs, until it is killed."""
    own_time.use(job["clock"])
    from jaxpaged.config import EngineConfig
    from jaxpaged.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_config(EngineConfig.from_options(**job["options"]))
    if job["seconds"] is None:
        engine.wait_for_programs()
    load = Load(engine, job["num_requests"]).first_token()
    say(first_token=time.perf_counter() - job["started"])
    said_at = 0.0
    for speed in load.speeds():
        if job["seconds"] is None and speed.seconds >= said_at + SAY_SECONDS:
            said_at = speed.seconds
            say(speed=speed)
        elif job["seconds"] is not None and speed.seconds >= job["seconds"]:
            stats = engine.executor_stats()
            say(speed=speed, ready=stats["programs_ready"], wanted=stats["programs"])
            os._exit(0)  # as the command does: programs that nobody waits for are still being compiled


class Child:
    """Such a process. Raises RuntimeError when it ends before it has answered."""

    def __init__(self, folder: Path, **job: Any):
        clock = Clock(folder)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
            text=True,
        )
        self.runner = Runner(self._process.pid, clock)
        self._process.stdin.write(json.dumps({**job, "clock": str(clock.path), "started": time.perf_counter()}))
        self._process.stdin.close()

    def answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
            raise RuntimeError(f"an engine ended: {' '.join(last) or 'it said nothing'}")
        return json.loads(line)

    def end(self) -> str:
        """Kill it, and return what nobody has read of what it said, without a line that it had not ended."""
        self.runner.end()
        rest = self._process.stdout.read().rpartition("\n")[0]
        self._process.wait()
        self._errors.close()
        return rest


def compare(folder: Path, options: dict[str, Any], num_requests: int, seconds: float, cache: str) -> dict[str, Any]:
    """An engine whose compilation cache is in `cache`, beside one that has all programs."""
    turns, children = Turns(), []
    try:
        job = {"num_requests": num_requests}
        filled = {**options, "compilation_cache_dir": str(folder / "filled")}
        children.append(ready := Child(folder, options=filled, seconds=None, **job))
        ready.answer()
        ready.runner.stop()
        children.append(
            new := Child(folder, options={**options, "compilation_cache_dir": cache}, seconds=seconds, **job)
        )
        told = new.answer()
        with turns.taken_by(new.runner, ready.runner):
            told |= new.answer()
        *_, last = ready.end().splitlines()
        return told | {"afterwards": json.loads(last)["speed"]}
    finally:
        for child in children:
            child.end()


def row(name: str, num_requests: int, told: dict[str, Any]) -> str:
    first, after = Speed(*told["speed"]).per_second, Speed(*told["afterwards"]).per_second
    cells = (
        name,
        f"{num_requests}",
        f"{told['first_token']:.1f}",
        f"{first:,.0f}",
        f"{after:,.0f}",
        f"{first / after:.2f}",
        f"{told['ready']} of {told['wanted']}",
    )
    return "| " + " | ".join(cells) + " |"


TITLES = ("model", "requests", "first token, s", "first minute, tok/s", "with all programs", "ratio", "programs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["demo", "llama-110m"], choices=["demo", *checkpoints.MODELS])
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8], metavar="N", help="under way at a time")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the first minute is")
    parser.add_argument("--engine", default="", metavar="FLAGS", help="engine options, as the command has them")
    parser.add_argument("--warm", action="store_true", help="then once more, with a cache that is filled")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return run_child(json.load(sys.stdin))
    given = options_of(args.engine)
    print("| " + " | ".join(TITLES) + " |\n" + "|---" * len(TITLES) + "|")
    for name in args.models:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            path = name if name == "demo" else checkpoints.make_checkpoint(checkpoints.MODELS[name], folder)
            options = {"model": str(path), "max_model_len": MAX_MODEL_LEN} | given
            for num_requests in args.requests:
                for temperature in ("", ", warm cache")[: 1 + args.warm]:
                    cache = str(folder / "filled" if temperature else folder / f"empty-{num_requests}")
                    told = compare(folder, options, num_requests, args.seconds, cache)
                    print(row(name + temperature, num_requests, told), flush=True)


def options_of(flags: str) -> dict[str, Any]:
    from jaxpaged.entrypoints.cli.flags import engine_options
    from jaxpaged.entrypoints.option_flags import add_engine_flags

    parser = argparse.ArgumentParser(prog="--engine")
    add_engine_flags(parser)
    return engine_options(parser.parse_args(shlex.split(flags)))


if __name__ == "__main__":
    main()
