#!/usr/bin/env python
"""Time the kernels on this machine's device, beside what a user would call instead.

    python scripts/bench_kernel.py [--op OP ...] [--sizes serving|tiny] [--backend NAME] [--cases TEXT ...]
                                   [--no-yardsticks] [--json FILE] [--markdown FILE]
    python scripts/bench_kernel.py --list

For each case of each op: milliseconds, the bytes and the operations that it cannot avoid, and which share of this
device's measured memory bandwidth and matrix-product speed that makes. What fits a device's cache can exceed 100 % of
its bandwidth, and products of 8 bits that of bfloat16's speed. Cases are those of the op's `cases.py`; "tiny" ones, the
default without an accelerator, show that everything runs and say nothing about speed.

All of ours are timed first, yardsticks after them as far as time goes: one call ends within 8 minutes. --list shows
every op with its backends and why some cannot run here. A case of ours that fails is reported in its row, and the exit
status is 1; a yardstick that fails is reported only.
"""

import argparse
import datetime
import importlib
import json
import pkgutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
from kernel_bench.subjects import NAMES, Subject, subjects
from kernel_bench.table import figures, header, line, markdown
from kernel_bench.yardsticks import Measurable, seconds_of

import pallas_kernels
from pallas_kernels.timing import measured_bandwidth, measured_matmul

TIME_LIMIT_S = 420  # nothing begins later: all in one call of 8 minutes
TARGET_S = {"serving": 0.1, "tiny": 0.01}  # of one run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    platform = jax.default_backend()
    parser.add_argument("--list", action="store_true", help="every op and its backends")
    parser.add_argument("--op", nargs="*", choices=NAMES, default=list(NAMES), metavar="OP", help="all by default")
    parser.add_argument("--sizes", choices=("serving", "tiny"), default="tiny" if platform == "cpu" else "serving")
    parser.add_argument("--backend", default="auto", help="of ours")
    parser.add_argument("--cases", nargs="*", default=[""], help="only cases whose names contain one of these")
    parser.add_argument("--no-yardsticks", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.list:
        print("\n".join(known_ops(platform)))
        return
    report = run(options, platform)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.markdown:
        options.markdown.write_text(markdown(report), encoding="utf-8")
    sys.exit(any("error" in row for row in report["rows"] if row["ours"]))


def known_ops(platform: str) -> Iterator[str]:
    """A line for each backend of each op: whether it runs here, or why not."""
    for module in pkgutil.iter_modules(pallas_kernels.__path__):
        op = importlib.import_module(f"pallas_kernels.{module.name}")
        if hasattr(op, "backends"):
            yield module.name
            for backend, reason in op.backends(platform).items():
                yield f"  {backend:14} {'runs here' if reason is None else f'not here: {reason}'}"


def run(options: argparse.Namespace, platform: str) -> dict[str, Any]:
    """The whole report; rows are printed as they come."""
    deadline, tiny = time.monotonic() + TIME_LIMIT_S, options.sizes == "tiny"
    report = {
        "device": jax.devices()[0].device_kind,
        "sizes": options.sizes,
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "bandwidth": measured_bandwidth(2**22 if tiny else 2**30),
        "matmul": measured_matmul(256 if tiny else 8192, jnp.bfloat16),
        "rows": [],
        "notes": [],
    }
    print(header(report))
    chosen = [x for x in subjects(options.op, options.sizes, platform) if any(y in x.name for y in options.cases)]
    own = {}
    for subject in chosen:
        row = own_row(subject, options.backend, report, deadline)
        own[subject] = row.get("milliseconds")
        add(report, row)
    for subject in () if options.no_yardsticks else chosen:
        for row in other_rows(subject, own[subject], report, deadline):
            add(report, row)
    for note in report["notes"]:
        print(note)
    return report


def add(report: dict[str, Any], row: dict[str, Any]) -> None:
    if not report["rows"] or report["rows"][-1]["op"] != row["op"]:
        print(f"\n{row['op']}")
    report["rows"].append(row)
    print(line(row), flush=True)


def own_row(subject: Subject, name: str, report: dict[str, Any], deadline: float) -> dict[str, Any]:
    row = {"op": subject.op, "case": subject.name, "what": name, "ours": True}
    if time.monotonic() > deadline:
        return row | {"error": f"not begun after {TIME_LIMIT_S} s"}
    try:
        row["what"] = subject.choose(name)
    except ValueError as error:
        return row | {"error": said(error)}
    measured = measure(lambda: subject.chain(row["what"]), report["sizes"])
    return row | filled(subject, measured, measured.get("seconds"), report)


def other_rows(
    subject: Subject, own_ms: float | None, report: dict[str, Any], deadline: float
) -> Iterator[dict[str, Any]]:
    """A row for each yardstick that can do the case, while there is time."""
    for what, make in subject.yardsticks().items():
        if time.monotonic() > deadline:
            report["notes"].append(f"not begun after {TIME_LIMIT_S} s: {subject.op}, {subject.name}, {what}")
            continue
        measured = measure(make, report["sizes"])
        if measured:
            row = {"op": subject.op, "case": subject.name, "what": what, "ours": False}
            yield row | filled(subject, measured, None if own_ms is None else own_ms / 1e3, report)


def measure(make: Callable[[], Measurable], sizes: str) -> dict[str, Any]:
    """{"seconds"} or {"error"}; empty for what cannot do the case."""
    try:
        measurable = make()
        return {} if measurable is None else {"seconds": seconds_of(measurable, TARGET_S[sizes])}
    except Exception as error:  # what fails must not end the benchmark
        return {"error": said(error)}


def filled(subject: Subject, measured: dict[str, Any], own: float | None, report: dict[str, Any]) -> dict[str, Any]:
    if "error" in measured:
        return measured
    return figures(subject.num_bytes, subject.flops, measured["seconds"], own, report)


def said(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


if __name__ == "__main__":
    main()
