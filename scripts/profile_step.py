#!/usr/bin/env python
"""Where the time of a decode step goes: every operation of its programs, from jax's own profile, no viewer needed.

    python scripts/profile_step.py [--model demo] [--rows 1,8,32] [--context 128] [--steps 20] [--ops 12]
        [--quantization int8|int4]

For each number of rows first the parts of jaxpaged from which operations come, then the dearest operations themselves,
in microseconds of a step and as shares of all: the time of the threads that profile an operation, what it calls apart,
from the median of its calls, since one that another process interrupts takes milliseconds. A fused operation counts
where its last instruction comes from. XLA spreads a product of its own ("ynn_fusion") over threads that write no
profile, so there may be more work than is shown. `--model` is whatever `jaxpaged generate` takes, or the name of one of
bench_offline's random models, such as `llama-110m`.
"""

import argparse
import collections
import dataclasses
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
from offline_bench import checkpoints

from jaxpaged import LLM, SamplingParams
from jaxpaged.layers.linear import choose_matmul_backend, takes_one_row
from jaxpaged.tools.counting.parts import XLA_ITSELF, parts_of
from jaxpaged.worker.engine_spec import doubling_buckets


@dataclasses.dataclass(frozen=True)
class Event:
    """An operation on a thread. Times are nanoseconds."""

    name: str
    module: str
    start: float
    duration: float


Costs = dict[tuple[str, str], list[float]]
"""(module, operation) -> nanoseconds of each call."""


# ---- what a profile says -------------------------------------------------------------------------


def events_of(folder: Path) -> Iterator[list[Event]]:
    """The operations of every thread in the profile below `folder`."""
    (file,) = folder.rglob("*.xplane.pb")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of jaxlib's own types
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            for line in plane.lines:
                yield [
                    Event(stats["hlo_op"], stats["hlo_module"], event.start_ns, event.duration_ns)
                    for event in line.events
                    if "hlo_op" in (stats := dict(event.stats))
                ]


def add_own_times(events: Iterable[Event], costs: Costs) -> None:
    """Add the calls of one thread. What began and ended within another one is taken from that."""
    own: list[tuple[Event, list[float]]] = []
    running: list[int] = []
    for event in sorted(events, key=lambda event: (event.start, -event.duration)):
        while running and event.start >= own[running[-1]][0].start + own[running[-1]][0].duration:
            running.pop()
        if running:
            own[running[-1]][1][0] -= event.duration
        running.append(len(own))
        own.append((event, [event.duration]))
    for event, (nanoseconds,) in own:
        costs[event.module, event.name].append(nanoseconds)


def table(costs: Costs, parts: dict[str, dict[str, str]], steps: int, ops: int) -> Iterator[str]:
    """The lines of one number of rows. `parts`: module -> what `parts_of` says of its program."""
    micros = {key: statistics.median(calls) * len(calls) / steps / 1e3 for key, calls in costs.items()}
    total = sum(micros.values()) or 1.0
    part_of = {key: parts.get(key[0], {}).get(key[1], XLA_ITSELF) for key in costs}
    by_part: dict[str, float] = collections.Counter()
    for key, micro in micros.items():
        by_part[part_of[key]] += micro
    yield f"  {'all operations':34} {total:10.1f} us"
    for part, micro in sorted(by_part.items(), key=lambda pair: -pair[1]):
        yield f"  {part:34} {micro:10.1f} us  {micro / total:6.1%}"
    yield f"  dearest of {len(costs)} operations:"
    for key, micro in sorted(micros.items(), key=lambda pair: -pair[1])[:ops]:
        name = f"{key[0].removeprefix('jit_')}: {key[1]}"
        yield f"    {name:44} {micro:10.1f} us  {micro / total:6.1%}  {part_of[key]}"


# ---- running -------------------------------------------------------------------------------------


def profile(llm: LLM, rows: int, context: int, steps: int, ops: int) -> Iterator[str]:
    """Decode `rows` requests, and say where the time of `steps` steps went."""
    engine = llm.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=2 * steps + 8, ignore_eos=True)
    for row in range(rows):
        prompt = [3 + (row * 7919 + i * 31) % 200 for i in range(context)]
        engine.add_request(f"{rows}-{row}", {"prompt_token_ids": prompt}, params)
    num_streaming, streaming = 0, set()
    while num_streaming < rows:
        streaming |= {output.request_id for output in engine.step()}
        num_streaming = len(streaming)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            start = time.perf_counter()
            for _ in range(steps):
                engine.step()
            seconds = time.perf_counter() - start
        costs: Costs = collections.defaultdict(list)
        for events in events_of(Path(folder)):
            add_own_times(events, costs)
    engine.abort_request([f"{rows}-{row}" for row in range(rows)])
    (texts,) = llm.collective_rpc(program_texts, args=(rows,))
    parts = {module: parts_of(text) for module, text in texts.items()}
    yield f"{rows} rows: {seconds / steps * 1e6:.0f} us a step"
    yield from table(costs, parts, steps, ops)


def program_texts(worker: Any, rows: int) -> dict[str, str]:
    """Module -> text of the compiled programs of a step of so many rows."""
    texts = {}
    for kind in ("forward", "sample"):
        key = min(
            (key for key in worker.programs.builders if key.kind == kind and key.size >= rows), key=lambda key: key.size
        )
        texts[f"jit_{kind}"] = worker.programs[key].as_text()
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", default="1,8,32", help="requests that decode together")
    parser.add_argument("--context", type=int, default=128, help="tokens before the first step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ops", type=int, default=12, help="operations to print")
    parser.add_argument("--quantization", choices=["int8", "int4"])
    options = parser.parse_args()
    all_rows = [int(word) for word in options.rows.split(",")]
    buckets = {*doubling_buckets(8, "cpu", takes_one_row(choose_matmul_backend("cpu", 1, False), "bfloat16")), 512}
    buckets |= {rows for rows in all_rows if rows > 1}
    with tempfile.TemporaryDirectory() as folder:
        shape = checkpoints.MODELS.get(options.model)
        llm = LLM(
            str(checkpoints.make_checkpoint(shape, Path(folder))) if shape else options.model,
            max_model_len=options.context + 2 * options.steps + 16,
            max_num_seqs=max(all_rows),
            num_scheduler_steps=1,
            enable_prefix_caching=False,
            quantization=options.quantization,
            token_buckets=tuple(sorted(buckets)),
            max_num_batched_tokens=512,
        )
        llm.wait_for_programs()
        for rows in all_rows:
            for line in profile(llm, rows, options.context, options.steps, options.ops):
                print(line, flush=True)
        llm.shutdown()


if __name__ == "__main__":
    main()
