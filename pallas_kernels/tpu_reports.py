"""What the TPU's compiler schedules for a kernel: bundles of instructions, loops, and registers that it spills.

It writes that down where `LIBTPU_INIT_ARGS` says so before it is loaded: `dump_options`. Knows no kernel.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s*(LB|LE|LH|PB|PF|CT)?\s*:\s*((?:> ?)*)(.*)$")


@dataclass(frozen=True)
class Schedule:
    """A kernel, of which every bundle takes at least a cycle. loops: (depth, bundles, spills) of each, in order, with
    the loops inside of it."""

    kernel: str
    bundles: int
    spills: int
    bounds_checks: int
    loops: tuple[tuple[int, int, int], ...]


def dump_options(folder: Path) -> str:
    """For `LIBTPU_INIT_ARGS`."""
    return (
        f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_hlo_text=false"
        " --xla_jf_dump_llo_html=false --xla_jf_dump_llo_pass_label_regex=final_bundles"
    )


def schedules_of(folder: Path, kernels: set[str]) -> Iterator[Schedule]:
    """What was dumped since the last call of the kernels with these names; removes it all."""
    for path in sorted(folder.iterdir()):
        named = re.fullmatch(r"\d+-(\w+?)(?:\.[\w.]*)?-\d+-final_bundles\.txt", path.name)
        if named and named[1] in kernels:
            yield schedule_of(named[1], path.read_text(encoding="utf-8"))
        path.unlink()


def schedule_of(kernel: str, text: str) -> Schedule:
    """From the text of the final bundles, in which a loop's body is marked and has its depth in front."""
    bundles: list[tuple[str | None, int, bool, bool]] = []
    for mark, depths, rest in (match.groups() for match in map(BUNDLE.match, text.splitlines()) if match):
        is_empty = rest.replace(" ", "") == "{}"  # then no depth is in front, whichever loop it is in
        depth = bundles[-1][1] if is_empty and bundles else depths.count(">")
        bundles.append((mark, depth, "_spill" in rest, "BoundsCheck" in rest))
    loops = []
    for i, (mark, depth, _, _) in enumerate(bundles):
        if mark != "LB":
            continue
        end = i + 1
        while end < len(bundles) and bundles[end][1] >= depth and bundles[end][:2] != ("LB", depth):
            end += 1
        loops.append((depth, end - i, sum(spills for _, _, spills, _ in bundles[i:end])))
    spills, checks = (sum(bundle[column] for bundle in bundles) for column in (2, 3))
    return Schedule(kernel, len(bundles), spills, checks, tuple(loops))
