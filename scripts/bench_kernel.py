#!/usr/bin/env python
"""Time the kernels on this machine's device, beside what a user would call instead.

    python scripts/bench_kernel.py [--sizes serving|tiny] [--backend NAME] [--cases TEXT ...] [--no-yardsticks]
                                   [--json FILE] [--markdown FILE]
    python scripts/bench_kernel.py --list

For each case: milliseconds, the bytes and the operations that it cannot avoid, and which share of this device's
measured memory bandwidth and matrix-product speed that makes. Cases are those of the op's `cases.py`; "tiny" ones,
the default without an accelerator, show that everything runs and say nothing about speed. --list shows every op with
its backends and why some cannot run here. A case that fails is reported in its row, and the exit status is 1.
"""

import argparse
import datetime
import importlib
import json
import pkgutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
from kernel_yardsticks import yardsticks

import pallas_kernels
from pallas_kernels import ragged_paged_attention as rpa
from pallas_kernels.ragged_paged_attention.cases import SERVING_STEPS, TINY_STEPS, ServingStep
from pallas_kernels.serving import attention_chain
from pallas_kernels.timing import measured_bandwidth, measured_matmul, seconds_per_call

OP = "ragged_paged_attention"
TIME_LIMIT_S = 420  # no case begins later: all of them in one call of 8 minutes
COLUMNS = ("case", "what", "ms", "GB", "TFLOP", "bandwidth", "matmul", "time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    platform = jax.default_backend()
    parser.add_argument("--list", action="store_true", help="every op and its backends")
    parser.add_argument("--sizes", choices=("serving", "tiny"), default="tiny" if platform == "cpu" else "serving")
    parser.add_argument("--backend", default="auto", help="of the attention")
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
    sys.exit(any("error" in row for row in report["rows"] if row["what"] == report["backend"]))


def known_ops(platform: str) -> Iterator[str]:
    """A line for each backend of each op: whether it runs here, or why not."""
    for module in pkgutil.iter_modules(pallas_kernels.__path__):
        if module.ispkg:
            yield module.name
            op = importlib.import_module(f"pallas_kernels.{module.name}")
            for backend, reason in op.backends(platform).items():
                yield f"  {backend:14} {'runs here' if reason is None else f'not here: {reason}'}"


def run(options: argparse.Namespace, platform: str) -> dict[str, Any]:
    """The whole report; rows are printed as they come."""
    start, tiny = time.monotonic(), options.sizes == "tiny"
    backend = rpa.choose_backend(options.backend, platform)
    steps = [step for step in (TINY_STEPS if tiny else SERVING_STEPS) if any(x in step.name for x in options.cases)]
    report = {
        "op": OP, "backend": backend, "device": jax.devices()[0].device_kind, "sizes": options.sizes,
        "date": datetime.date.today().isoformat(), "jax": jax.__version__,
        "bandwidth": measured_bandwidth(2**22 if tiny else 2**30),
        "matmul": measured_matmul(256 if tiny else 8192, jnp.bfloat16), "rows": [],
    }  # fmt: skip
    print(header(report))
    others = {} if options.no_yardsticks else yardsticks(platform)
    for step in steps:
        if time.monotonic() - start > TIME_LIMIT_S:
            report["rows"].append({"case": step.name, "what": backend, "error": f"not begun after {TIME_LIMIT_S} s"})
            continue
        for row in rows_of(step, backend, others, report):
            report["rows"].append(row)
            print(line(row), flush=True)
    return report


def rows_of(step: ServingStep, backend: str, others: dict[str, Any], report: dict[str, Any]) -> Iterator[dict]:
    """A row for our attention, and one for each yardstick that can do the step."""
    measurements = {backend: lambda step: lambda: seconds_per_call(attention_chain(step, backend))} | others
    own = None
    for what, prepare in measurements.items():
        row = {"case": step.name, "what": what}
        try:
            measure = prepare(step)
            if measure is None:
                continue
            seconds = measure()
        except Exception as error:  # a yardstick that cannot must not end the benchmark, and ours is reported
            yield row | {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"}
            continue
        own = seconds if what == backend else own
        yield row | figures(step, seconds, own, report)


def figures(step: ServingStep, seconds: float, own: float | None, report: dict[str, Any]) -> dict[str, Any]:
    return {
        "milliseconds": seconds * 1e3, "bytes": step.step_bytes, "flops": step.flops,
        "bandwidth_share": step.step_bytes / seconds / report["bandwidth"],
        "matmul_share": step.flops / seconds / report["matmul"],
        "times_ours": None if own is None else seconds / own,
    }  # fmt: skip


def header(report: dict[str, Any]) -> str:
    return (
        f"{report['op']} on {report['device']}, {report['date']}, jax {report['jax']}, sizes: {report['sizes']}\n"
        f"measured: {report['bandwidth'] / 1e9:.0f} GB/s of memory, {report['matmul'] / 1e12:.3g} TFLOP/s of bfloat16"
    )


def cells(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [row["case"], row["what"], f"failed: {row['error']}", *[""] * (len(COLUMNS) - 3)]
    times = "" if row["times_ours"] is None else f"{row['times_ours']:.2f} x"
    return [
        row["case"], row["what"], f"{row['milliseconds']:.3f}", f"{row['bytes'] / 1e9:.3f}",
        f"{row['flops'] / 1e12:.4f}", f"{row['bandwidth_share']:.0%}", f"{row['matmul_share']:.0%}", times,
    ]  # fmt: skip


def line(row: dict[str, Any]) -> str:
    case, what, *rest = cells(row)
    return f"{case:42} {what:52} {'  '.join(f'{cell:>8}' for cell in rest)}"


def markdown(report: dict[str, Any]) -> str:
    """The table, with what it was measured on."""
    table = [COLUMNS, ["---"] * len(COLUMNS), *(cells(row) for row in report["rows"])]
    lines = [f"| {' | '.join(row)} |" for row in table]
    return "\n".join([*header(report).split("\n"), "", *lines, ""])


if __name__ == "__main__":
    main()
