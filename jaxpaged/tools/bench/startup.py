"""`jaxpaged bench startup`: how long an engine takes to start, with an empty compilation cache and with a filled one.

Every start is a process of its own (`startup_child.py`). This module knows flags, processes and figures.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpaged.entrypoints.argument_parser import Parser
from jaxpaged.entrypoints.option_flags import add_engine_flags
from jaxpaged.entrypoints.terminal import ProgressLine
from jaxpaged.errors import EngineError, UsageError
from jaxpaged.tools.bench.offline import (
    add_offline_flags,
    check_at_least,
    check_json_path,
    options_of,
    percentiles,
    write_json,
)

CHILD = (sys.executable, "-m", "jaxpaged.tools.bench.startup_child")
FIGURES = {
    "startup": "Startup time",
    "compilation": "Compilation time",
    "first_token": "Time to first token",
}
EPILOG = """\
startup: from reading the options until ordinary requests are served at full speed, without Python's imports.
compilation: seconds of all threads that prepared programs. first token: from the start of the process to the first
token of a short request; an engine serves before all of its programs are there.
The cache is a temporary one; the user's own is neither read nor written.

example:
  jaxpaged bench startup --num-iters-cold 1 --num-iters-warm 2
"""


def add_parser(commands: Any) -> None:
    parser: Parser = commands.add_parser(
        "startup", help="the time that an engine takes to start", usage="%(prog)s [MODEL] [options]", epilog=EPILOG
    )
    counts = (
        ("num-iters-cold", 3, "starts with an empty compilation cache"),
        ("num-iters-warmup", 1, "starts that fill the cache, unmeasured"),
        ("num-iters-warm", 3, "starts with a filled cache"),
    )
    add_offline_flags(parser, counts)
    add_engine_flags(parser)
    parser.set_defaults(run=run, command_parser=parser)


def run(args: argparse.Namespace) -> int:
    """Measure and report. Returns the exit status."""
    check_at_least(args, 0, "num_iters_cold", "num_iters_warmup", "num_iters_warm")
    if args.num_iters_cold + args.num_iters_warm < 1:
        raise UsageError("--num-iters-cold and --num-iters-warm are 0, so nothing is measured.")
    if args.num_iters_warm and not args.num_iters_warmup:
        raise UsageError("--num-iters-warmup is 0, so the first warm start would find an empty cache. Make it 1.")
    check_json_path(args.output_json)
    options = options_of(args)
    if options.get("bundle") is not None or options.get("compilation_cache_dir") is not None:
        raise UsageError("the compilation cache is what is measured. Leave out --compilation-cache-dir and --bundle.")
    result: dict[str, Any] = {}
    for phase, starts in measure(options, args.num_iters_cold, args.num_iters_warmup, args.num_iters_warm).items():
        if starts:
            result |= startup_result(phase, starts)
    print(table(result))
    write_json(args.output_json, result)
    return 0


def measure(options: Mapping[str, Any], cold: int, warmup: int, warm: int) -> dict[str, list[dict[str, float]]]:
    """What every start measured, by phase."""
    found: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    line = ProgressLine()
    total = cold + warmup + warm
    try:
        with tempfile.TemporaryDirectory() as filled:
            for number in range(total):
                line.update("starts", number, total)
                with tempfile.TemporaryDirectory() as empty:
                    phase = "cold" if number < cold else "warmup" if number < cold + warmup else "warm"
                    cache = empty if phase == "cold" else filled
                    start = answer_of_child(CHILD, {"options": {**options, "compilation_cache_dir": cache}})
                found.get(phase, []).append(start)
    finally:
        line.close()
    return found


def answer_of_child(command: Sequence[str], job: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON object that a new process prints last; it gets the job, and when it was started, on standard input.

    It keeps the bytecode of modules, as every installation does, though the caller's own process may not. Raises
    EngineError when it fails.
    """
    text = json.dumps({**job, "origin": time.time()})
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, env=environment)
    try:
        told = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise EngineError(
            f"a process that was to start an engine ended with status {done.returncode}: {last}"
        ) from None
    if "error" in told:
        raise EngineError(f"the engine does not start: {told['error']}")
    return told


def startup_result(phase: str, starts: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """vLLM's fields of a phase; the first token is ours."""
    result: dict[str, Any] = {}
    for name in FIGURES:
        values = [start[f"{name}_time"] for start in starts]
        result[f"avg_{phase}_{name}_time"] = sum(values) / len(values)
        result[f"{phase}_{name}_times"] = values
        result[f"{phase}_{name}_percentiles"] = percentiles(values)
    return result


def table(result: Mapping[str, Any]) -> str:
    """Averages and percentiles of both phases, in seconds."""
    lines = []
    for phase in ("cold", "warm"):
        if f"avg_{phase}_startup_time" not in result:
            continue
        lines.append(f"{phase.upper()} STARTUP")
        for name, title in FIGURES.items():
            lines.append(f"{f'Avg {title.lower()}:':<27} {result[f'avg_{phase}_{name}_time']:6.2f} seconds")
        for name, title in FIGURES.items():
            shown = "  ".join(f"{p}%: {value:.2f}" for p, value in result[f"{phase}_{name}_percentiles"].items())
            lines.append(f"{f'{title} percentiles:':<32} {shown}")
    return "\n".join(lines)
