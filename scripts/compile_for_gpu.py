#!/usr/bin/env python
"""Compile the GPU kernels of an op for a GPU that this machine does not have, and print what they take.

    python scripts/compile_for_gpu.py [--op OP] [--backend NAME] [--target h100|a100|b200] [--shapes NAME ...] [--json]

Needs the extra `aot-gpu`. For each kernel: registers per thread and spilled bytes as ptxas reports them, the shared
memory of a program, and how many programs a core holds by both. The process compiles through a copy of the CUDA
folder whose ptxas keeps its reports. What jax-triton compiles, which needs that package too, is assembled once more:
it looks for ptxas elsewhere. A kernel that several shapes share is reported for the first of them.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

ATTENTION = "ragged_paged_attention"
KERNELS = {ATTENTION: "paged_"}  # what an op's kernels are called, where it is not the op's name

PTXAS = """#!/bin/sh
case "$*" in *--version* | *--input-as-string*) exec {ptxas} "$@" ;; esac
report=$(mktemp {reports}/XXXXXXXX)
{ptxas} -v "$@" >"$report" 2>&1
status=$?
cat "$report" >&2
exit $status
"""


def prepare(folder: Path) -> None:
    """Point jax, which must not be imported yet, to a CUDA folder whose ptxas writes reports to `folder`/reports."""
    try:
        cuda = Path(next(iter(importlib.util.find_spec("nvidia.cu13").submodule_search_locations)))
    except (AttributeError, ModuleNotFoundError):
        sys.exit("nvidia-cuda-nvcc is not installed. Run pip install -e '.[aot-gpu]', or scripts/test --aot-gpu.")
    (folder / "bin").mkdir()
    (folder / "reports").mkdir()
    (folder / "nvvm").symlink_to(cuda / "nvvm")
    (folder / "bin" / "nvlink").symlink_to(cuda / "bin" / "nvlink")
    ptxas = folder / "bin" / "ptxas"
    ptxas.write_text(PTXAS.format(ptxas=cuda / "bin" / "ptxas", reports=folder / "reports"), encoding="utf-8")
    ptxas.chmod(ptxas.stat().st_mode | stat.S_IXUSR)
    os.environ["CUDA_ROOT"] = str(folder)
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), str(folder / "bin")])
    os.environ["JAX_TRITON_DUMP_DIR"] = str(folder / "triton")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"  # what is cached is not reported
    dump = f"--xla_dump_to={folder}/dump --xla_dump_hlo_as_text"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {dump}".strip()


def reports_of(folder: Path) -> Iterator[dict[str, Any]]:
    """What ptxas and XLA reported since the last call, kernel by kernel; removes it."""
    shared = {}
    for path in (folder / "dump").glob("*.thunk_sequence.txt"):
        for name, size in re.findall(r" (\S+) grid: .*shared_memory: (\d+) bytes", path.read_text(encoding="utf-8")):
            shared[name] = int(size)
    for path in (folder / "dump").iterdir():
        path.unlink()
    assembled = sorted((folder / "triton").glob("*/*.ptx"))
    names = {path.stem for path in assembled}
    yield from (report for report in parsed_reports(folder, shared) if report["kernel"] not in names)
    for path in assembled:
        target = re.search(r"^\.target (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)[1]
        command = [folder / "bin" / "ptxas", f"--gpu-name={target}", "-o", os.devnull, path]
        subprocess.run(command, check=True, capture_output=True)
        size = re.search(r"shared_mem_bytes: (\d+)", path.with_suffix(".compile_info").read_text(encoding="utf-8"))
        yield from parsed_reports(folder, {path.stem: int(size[1])})
    shutil.rmtree(folder / "triton", ignore_errors=True)


def parsed_reports(folder: Path, shared: dict[str, int]) -> Iterator[dict[str, Any]]:
    """What ptxas has reported, with the shared memory of each kernel; removes it."""
    for path in sorted((folder / "reports").iterdir()):
        text = path.read_text(encoding="utf-8")
        for name, spills, registers in re.findall(
            r"Compiling entry function '(\S+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers", text, re.DOTALL
        ):
            warnings = re.findall(r"Potential Performance Loss: (.*)", text)
            yield {
                "kernel": name,
                "registers": int(registers),
                "spilled_bytes": int(spills),
                "shared_memory": shared.get(name),
                "warnings": warnings,
            }
        path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", default=ATTENTION, help=f"{ATTENTION} or another folder of pallas_kernels")
    parser.add_argument("--backend", default="gpu", help=f"gpu, or gpu-triton, which {ATTENTION} has")
    parser.add_argument("--target", default="h100", help="a100, h100 or b200")
    parser.add_argument("--shapes", nargs="*", help="names of shapes; all by default")
    parser.add_argument("--json", action="store_true", help="one JSON object per kernel")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        compile_all(Path(folder), options)


def compile_all(folder: Path, options: argparse.Namespace) -> None:
    from pallas_kernels.gpu_targets import TARGETS, compile_for

    for name, program in programs_of(options.op, options.backend):
        if options.shapes and name not in options.shapes:
            continue
        compile_for(TARGETS[options.target], program.function, *program.args, donate=program.donate)
        for report in reports_of(folder):
            if report["kernel"].startswith(KERNELS.get(options.op, options.op)):
                show({"target": options.target, "shape": name, **report}, options.json)


def programs_of(op: str, backend: str) -> Iterator[tuple[str, Any]]:
    """(name, program) of the op's serving cases."""
    from pallas_kernels.programs import Program, programs
    from pallas_kernels.ragged_paged_attention.cases import SERVING_SHAPES
    from pallas_kernels.testing import layer_of

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
        f"{report['target']}  {report['shape']:34} {report['kernel']:20} {report['registers']:4} registers"
        f"  {report['spilled_bytes']:5} B spilled  {report['shared_memory'] or 0:7} B shared  {warnings}",
        flush=True,
    )


if __name__ == "__main__":
    main()
