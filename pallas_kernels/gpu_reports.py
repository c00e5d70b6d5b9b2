"""What CUDA's compilers and XLA report of a program for a GPU: registers, spills and shared memory of its kernels, and
how it is launched.

Options of a compilation have XLA compile through a copy of the CUDA folder, whose ptxas keeps its reports, and write
down its sequence of launches. Knows no kernel.
"""

import importlib.util
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PTXAS = """#!/bin/sh
case "$*" in *--version* | *--input-as-string*) exec {ptxas} "$@" ;; esac
report=$(mktemp {reports}/XXXXXXXX)
{ptxas} -v "$@" >"$report" 2>&1
status=$?
cat "$report" >&2
exit $status
"""
GRAPH, LOOP, CHOICE = "kCommandBuffer", "kWhile", "kConditional"
INNER = "kDynamicSliceFusion"
"""What holds other launches: a CUDA graph, loops and conditionals, and a call whose parts are listed below it."""


@dataclass(frozen=True)
class Launches:
    """What the host does for a program: `graphs` that it launches, launches outside of them, `singly`, and how often it
    reads a number and waits for it, `host_waits`: once for a conditional, and in each turn of a loop.

    launched: all kernels, copies and calls of libraries, those in graphs and in all branches included.
    """

    graphs: int
    singly: int
    host_waits: int
    launched: int


class Reports:
    """Of what is compiled with `options`; in an empty folder. Raises ModuleNotFoundError without CUDA's compilers."""

    def __init__(self, folder: Path):
        found = importlib.util.find_spec("nvidia.cu13")
        if found is None or not found.submodule_search_locations:
            raise ModuleNotFoundError("nvidia-cuda-nvcc is not installed; pip install -e '.[aot-gpu]'")
        cuda = Path(next(iter(found.submodule_search_locations)))
        self.folder = folder
        self.ptxas = folder / "bin" / "ptxas"
        for name in ("bin", "reports", "dump"):
            (folder / name).mkdir(parents=True)
        (folder / "nvvm").symlink_to(cuda / "nvvm")
        (folder / "bin" / "nvlink").symlink_to(cuda / "bin" / "nvlink")
        script = PTXAS.format(ptxas=cuda / "bin" / "ptxas", reports=folder / "reports")
        self.ptxas.write_text(script, encoding="utf-8")
        self.ptxas.chmod(self.ptxas.stat().st_mode | stat.S_IXUSR)

    @property
    def options(self) -> dict[str, Any]:
        """As `jax.stages.Lowered.compile` takes them."""
        return {
            "xla_gpu_cuda_data_dir": str(self.folder),
            "xla_dump_to": str(self.folder / "dump"),
            "xla_dump_hlo_as_text": True,
        }

    def kernels(self, shared_memory: dict[str, int] | None = None) -> list[dict[str, Any]]:
        """What ptxas reported of every kernel since the last call. `shared_memory`: bytes by kernel, where XLA knows
        nothing of it."""
        shared = dict(shared_memory or {})
        for path in (self.folder / "dump").glob("*.thunk_sequence.txt"):
            for name, size in re.findall(
                r" (\S+) grid: .*shared_memory: (\d+) bytes", path.read_text(encoding="utf-8")
            ):
                shared[name] = int(size)
        return [report for path in sorted((self.folder / "reports").iterdir()) for report in parsed(path, shared)]

    def launches(self) -> Launches:
        """Of the one program that was compiled since `clear`."""
        last = [*(self.folder / "dump").glob("*.thunk_sequence*.txt")]
        after_passes = [path for path in last if "after_thunk_passes" in path.name]
        return launches_of(max(after_passes or last, key=lambda path: path.stat().st_size).read_text(encoding="utf-8"))

    def clear(self) -> None:
        """Forget what was compiled."""
        for name in ("reports", "dump"):
            for path in (self.folder / name).iterdir():
                path.unlink()


def parsed(path: Path, shared: dict[str, int]) -> Iterator[dict[str, Any]]:
    """A report of ptxas, which is removed."""
    text = path.read_text(encoding="utf-8")
    path.unlink()
    pattern = r"Compiling entry function '(\S+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers"
    for name, spills, registers in re.findall(pattern, text, re.DOTALL):
        yield {
            "kernel": name,
            "registers": int(registers),
            "spilled_bytes": int(spills),
            "shared_memory": shared.get(name),
            "warnings": re.findall(r"Potential Performance Loss: (.*)", text),
        }


def launches_of(sequence: str) -> Launches:
    """From XLA's text of a sequence of launches, in which what lies within another is indented below it."""
    holders: list[tuple[int, str]] = []
    graphs = singly = host_waits = launched = 0
    for depth, kind in re.findall(r"^( *)\d+: (k\w+)", sequence, re.MULTILINE):
        while holders and holders[-1][0] >= len(depth):
            holders.pop()
        in_graph = any(holder == GRAPH for _, holder in holders)
        if kind in (GRAPH, LOOP, CHOICE, INNER):
            holders.append((len(depth), kind))
            graphs += kind == GRAPH
            host_waits += kind in (LOOP, CHOICE) and not in_graph
            continue
        launched += 1
        singly += not in_graph
    return Launches(graphs, singly, host_waits, launched)
