"""A server at several loads: which loads, the runs, and what is written of them.

One run is the business of `serve_run.py`, the picture that of `pictures/load_plot.py`.
"""

import argparse
import csv
import math
import statistics as mean_and_median
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpaged.entrypoints.terminal import complain
from jaxpaged.errors import UsageError
from jaxpaged.tools.bench import report
from jaxpaged.tools.bench.datasets import check_dataset, sample_requests
from jaxpaged.tools.bench.load import Traffic
from jaxpaged.tools.bench.metrics import DEFAULT_METRICS
from jaxpaged.tools.bench.offline import check_at_least
from jaxpaged.tools.bench.requests import BenchRequest
from jaxpaged.tools.bench.serve_run import (
    FAILURE,
    INTERRUPTED,
    Load,
    Statistics,
    measure,
    remark_on,
    result_of,
    warm_up,
)
from jaxpaged.tools.bench.server import COMMAND, Server, open_server
from jaxpaged.tools.pictures import canvas

Result = dict[str, Any]
LATENCIES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class Level:
    """A load: the variable that is varied, and its value."""

    variable: str
    value: float

    @property
    def name(self) -> str:
        return f"{self.variable}={self.value:g}"

    def load(self, burstiness: float) -> Load:
        if self.variable == "request_rate":
            return Load(Traffic(self.value, burstiness))
        return Load(Traffic(math.inf, burstiness), int(self.value))


@dataclass
class Sweep:
    """The runs so far, and where they are written. `status` is the exit status that they call for."""

    args: argparse.Namespace
    server: Server
    requests: Sequence[BenchRequest]
    statistics: Statistics
    metadata: Mapping[str, str]
    folder: Path
    results: list[Result]
    status: int = 0

    async def measure(self, level: Level) -> list[Result]:
        """The runs at a load; fewer than asked for once the user interrupts."""
        done = []
        for number in range(self.args.num_runs if self.status != INTERRUPTED else 0):
            salt = {} if self.args.no_cache_salt else {"cache_salt": uuid.uuid4().hex}
            server, load = self.server.asking(f"{len(self.results)}", salt), level.load(self.args.burstiness)
            print(f"{level.name}, run {number + 1} of {self.args.num_runs} ...", file=sys.stderr, flush=True)
            run = await measure(server, self.requests, load, self.args)
            remark_on(run, load)
            if run.interrupted:
                self.status = INTERRUPTED
                break
            result = result_of(self.args, server, self.requests, load, run, self.statistics, self.metadata)
            result = {"run_number": number, **report.without_details(result)}
            report.write_result(self.folder / f"{level.name}-run={number}.json", result)
            self.results.append(result)
            done.append(result)
            self.status = self.status or (FAILURE if result["failed"] else 0)
        return done


async def bench_sweep(args: argparse.Namespace) -> int:
    """Everything that `bench sweep` does. Returns the exit status."""
    chosen, metadata = statistics_of(args), report.pairs_of(args.metadata, "--metadata")
    levels = levels_given(args)
    check_at_least(args, 1, "num_runs")
    check_at_least(args, 2, "workload_iters")
    check_dataset(args)
    folder = Path(args.output_dir, args.experiment_name or report.now())
    report.check_result_folder(folder)
    if any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty. Choose another --experiment-name.")
    async with open_server(args) as server:
        requests = sample_requests(args, server.text)
        await warm_up(server, requests, args)
        sweep = Sweep(args, server, requests, chosen, metadata, folder, [])
        if levels:
            for level in levels:
                await sweep.measure(level)
        else:
            await explore(sweep)
    finish(sweep)
    return sweep.status


def statistics_of(args: argparse.Namespace) -> Statistics:
    """What is asked for, and what the table and the picture need. Raises UsageError."""
    asked = Statistics.of_flags(args)
    metrics = list(dict.fromkeys([*DEFAULT_METRICS, "e2el", *asked.metrics]))
    return Statistics(metrics, asked.percentiles or [99.0], asked.goodput)


def levels_given(args: argparse.Namespace) -> list[Level]:
    """The loads of the flags; none: they are to be found. Raises UsageError."""
    if args.request_rates is not None:
        levels = [Level("request_rate", value) for value in args.request_rates]
    else:
        levels = [Level("max_concurrency", value) for value in args.max_concurrencies or ()]
    for level in levels:
        level.load(args.burstiness)
    if len({level.value for level in levels}) < len(levels):
        raise UsageError("a load is given twice. Use --num-runs to repeat all of them.")
    return levels


# ---- loads that are found --------------------------------------------------------------------------


async def explore(sweep: Sweep) -> None:
    """One at a time and all at once show what the server can do; the other loads lie evenly between."""
    variable = sweep.args.workload_var
    slow = await sweep.measure(Level("max_concurrency", 1))
    everything = len(sweep.requests) if variable == "max_concurrency" else math.inf
    fast = await sweep.measure(Level(variable, everything))
    if not slow or not fast:
        return
    ends = [mean_and_median.mean(reached(result, variable) for result in results) for results in (slow, fast)]
    for value in values_between(*ends, sweep.args.workload_iters - 2, variable == "max_concurrency"):
        if not (variable == "max_concurrency" and value in (1, len(sweep.requests))):
            await sweep.measure(Level(variable, value))


def reached(result: Mapping[str, Any], variable: str) -> float:
    """The load of a run: requests a second, or, by Little's law, how many were under way on average."""
    rate = result["request_throughput"]
    return rate if variable == "request_rate" else rate * result["mean_e2el_ms"] / 1e3


def values_between(low: float, high: float, count: int, whole: bool) -> list[float]:
    """`count` loads with equal distances, as far as they are whole and differ, or three digits of them do."""
    found = []
    for place in range(1, count + 1):
        value = low + (high - low) * place / (count + 1)
        if value > 0:
            found.append(max(round(value), 1) if whole else float(f"{value:.3g}"))
    return sorted(set(found))


# ---- what is written -------------------------------------------------------------------------------


def finish(sweep: Sweep) -> None:
    """Print the table, and write it and the picture."""
    if not sweep.results:
        return
    rows = sorted(sweep.results, key=lambda result: (load_of(result), result["run_number"]))
    print(table(rows, sweep.statistics.percentiles))
    write_summary(sweep.folder / "summary.csv", rows)
    written = "summary.csv"
    shown = [result for result in rows if result["completed"]]
    if not canvas.has_matplotlib():
        complain(COMMAND, f"there is no picture: matplotlib is not installed. {canvas.INSTALL}")
    elif shown:
        from jaxpaged.tools.pictures.load_plot import draw_load

        figure = draw_load(shown, max(sweep.statistics.percentiles), sweep.statistics.goodput)
        canvas.write_figure(figure, sweep.folder / "sweep.png")
        written += ", sweep.png"
    print(f"{written} and a file for every run are in {sweep.folder}.", file=sys.stderr)


def load_of(result: Mapping[str, Any]) -> tuple[float, float]:
    """What runs are ordered by: how many at a time, then how many a second. No limit comes last."""
    concurrency, rate = result["max_concurrency"], result["request_rate"]
    return (math.inf if concurrency is None else concurrency, math.inf if rate == "inf" else rate)


def table(rows: Sequence[Mapping[str, Any]], percentiles: Sequence[float]) -> str:
    """A line for every run, as a table in Markdown that is readable as text."""
    worst = f"p{max(percentiles):g}"
    header = ["load", "req/s", "out tok/s"]
    header += [f"{name.upper()} {which} ms" for name in LATENCIES for which in ("p50", worst)] + ["failed"]
    lines = [header]
    for row in rows:
        cells = [load_name(row), f"{row['request_throughput']:.2f}", f"{row['output_throughput']:.1f}"]
        cells += [f"{row[f'{which}_{name}_ms']:.1f}" for name in LATENCIES for which in ("median", worst)]
        lines.append([*cells, str(row["failed"])])
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    lines.insert(1, [("-" * (width - 1) + ":") if width > 1 else ":" for width in widths])
    return "\n".join("| " + " | ".join(map(str.rjust, line, widths)) + " |" for line in lines)


def load_name(row: Mapping[str, Any]) -> str:
    """`16 at a time`, `4/s`, or `all at once`."""
    if row["max_concurrency"] is not None:
        return f"{row['max_concurrency']} at a time"
    return "all at once" if row["request_rate"] == "inf" else f"{row['request_rate']:g}/s"


def write_summary(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A line for every run with all of its fields."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
