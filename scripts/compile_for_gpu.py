#!/usr/bin/env python
"""Compile the GPU kernels of an op for a GPU that this machine does not have, and print what they take.

    python scripts/compile_for_gpu.py [--op OP] [--backend NAME] [--target h100|a100|b200] [--shapes NAME ...] [--json]

Needs the extra `aot-gpu`. For each kernel: registers per thread and spilled bytes as ptxas reports them, and the shared
memory of a program. What jax-triton compiles, which needs that package too, is assembled once more: it looks for ptxas
elsewhere. A kernel that several shapes share is reported for the first of them.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"  # what is cached is not reported
os.environ["JAX_TRITON_DUMP_DIR"] = tempfile.mkdtemp(prefix="compile_for_gpu-")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pallas_kernels.gpu_reports import Reports
from pallas_kernels.gpu_targets import TARGETS, compile_for, why_not
from pallas_kernels.programs import Program, programs, tuned_products
from pallas_kernels.ragged_paged_attention.cases import SERVING_SHAPES
from pallas_kernels.testing import layer_of

ATTENTION, PRODUCTS = "ragged_paged_attention", "few_rows_matmul"
KERNELS = {ATTENTION: "paged_"}  # what an op's kernels are called, where it is not the op's name


def reports_of(reports: Reports) -> Iterator[dict[str, Any]]:
    """What ptxas and XLA reported since the last call, kernel by kernel."""
    triton = Path(os.environ["JAX_TRITON_DUMP_DIR"])
    assembled = sorted(triton.glob("*/*.ptx"))
    names = {path.stem for path in assembled}
    yield from (report for report in reports.kernels() if report["kernel"] not in names)
    for path in assembled:
        target = re.search(r"^\.target (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)[1]
        command = [reports.ptxas, f"--gpu-name={target}", "-o", os.devnull, path]
        subprocess.run(command, check=True, capture_output=True)
        size = re.search(r"shared_mem_bytes: (\d+)", path.with_suffix(".compile_info").read_text(encoding="utf-8"))
        yield from reports.kernels({path.stem: int(size[1])})
    shutil.rmtree(triton, ignore_errors=True)
    reports.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", default=ATTENTION, help=f"{ATTENTION} or another folder of pallas_kernels")
    parser.add_argument("--backend", default="gpu", help=f"gpu, or gpu-triton, which {ATTENTION} has")
    parser.add_argument("--target", default="h100", help="a100, h100 or b200")
    parser.add_argument("--shapes", nargs="*", help="names of shapes; all by default")
    parser.add_argument("--json", action="store_true", help="one JSON object per kernel")
    options = parser.parse_args()
    if reason := why_not():
        sys.exit(f"{reason}.")
    with tempfile.TemporaryDirectory() as folder:
        compile_all(Reports(Path(folder) / "reports"), options)


def compile_all(reports: Reports, options: argparse.Namespace) -> None:
    for name, program in programs_of(options.op, options.backend):
        if options.shapes and name not in options.shapes:
            continue
        donate, target = program.donate, TARGETS[options.target]
        compile_for(target, program.function, *program.args, donate=donate, options=reports.options)
        for report in reports_of(reports):
            if report["kernel"].startswith(KERNELS.get(options.op, options.op)):
                show({"target": options.target, "shape": name, **report}, options.json)


def programs_of(op: str, backend: str) -> Iterator[tuple[str, Program]]:
    """(name, program) of the op's serving cases."""
    if op == PRODUCTS:
        yield from tuned_products()
        return
    if op != ATTENTION:
        yield from programs(op, backend)
        return
    for shape in SERVING_SHAPES:
        yield shape.name, Program(*layer_of(shape, backend), donate=(0,))


def show(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(report), flush=True)
        return
    warnings = "; ".join(report["warnings"])
    print(
        f"{report['target']}  {report['shape']:46} {report['kernel']:20} {report['registers']:4} registers"
        f"  {report['spilled_bytes']:5} B spilled  {report['shared_memory'] or 0:7} B shared  {warnings}",
        flush=True,
    )


if __name__ == "__main__":
    main()
