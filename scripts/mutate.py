#!/usr/bin/env python
"""Make deliberate mistakes in the kernels, one at a time, and see whether the tests of their op notice.

    python scripts/mutate_kernels.py [--op OP] [--list]

Each mutant lives in a copy of `pallas_kernels/` and its tests, in a temporary folder. It is killed if a test fails:
first the tests that are expected to notice, then all of the op. Prints "killed", "SURVIVED", or "HANGS" where tests did
not end in time; the exit status is 1 if one survived, or if one no longer applies to the source.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.pallas_kernels.mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parent.parent
OWN_MUTANTS = "not mutant"  # tests of mutants compare with the source, and would notice any change of it
TIME_LIMIT = 900  # seconds for one run of tests
TIMED_OUT = -1
PASSED, FAILED, NONE_SELECTED = 0, 1, 5  # pytest's exit statuses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", help="a folder of pallas_kernels; all by default")
    parser.add_argument("--list", action="store_true", help="print the mutants and try none")
    options = parser.parse_args()
    wanted = [mutant for mutant in MUTANTS if options.op in (None, mutant.op)]
    if not wanted:
        sys.exit(f"no mutants of {options.op!r}; there are some of {', '.join(sorted({m.op for m in MUTANTS}))}.")
    survivors = 0
    for mutant in wanted:
        outcome = "" if options.list else verdict(mutant, run_tests)
        survivors += outcome.startswith(("SURVIVED", "STALE"))
        print(f"{outcome:9} {mutant.module:42} {mutant.what}", flush=True)
    if not options.list:
        print(f"{len(wanted) - survivors} of {len(wanted)} killed")
    sys.exit(survivors > 0)


def verdict(mutant: Mutant, run: Callable[[Mutant, str], int]) -> str:
    """What became of a mutant; "STALE" if it is none. `run` gives pytest's status for some of its op's tests."""
    if mutated(mutant) is None:
        return "STALE"
    for selection in (mutant.noticed_by, ""):
        status = run(mutant, selection)
        if status == TIMED_OUT:
            return "HANGS"  # such as waiting for a copy that was never started; or the machine is busy
        if status not in (PASSED, FAILED, NONE_SELECTED):
            return f"STALE ({status})"  # not even imported
        if status == FAILED:
            return "killed"
    return "SURVIVED"


def mutated(mutant: Mutant) -> str | None:
    """The module's text with the mistake, or None if its text has changed so that it does not apply."""
    text = (ROOT / "pallas_kernels" / mutant.module).read_text(encoding="utf-8")
    return text.replace(mutant.original, mutant.wrong) if text.count(mutant.original) == 1 else None


def run_tests(mutant: Mutant, selection: str) -> int:
    """pytest's exit status for the selected tests of the mutant's op, or of all ("")."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_copy(folder)
        (folder / "pallas_kernels" / mutant.module).write_text(str(mutated(mutant)), encoding="utf-8")
        chosen = f"({selection}) and {OWN_MUTANTS}" if selection else OWN_MUTANTS
        marks = "not slow and not exhaustive and not aot_tpu and not aot_gpu"
        command = [sys.executable, "-m", "pytest", f"tests/pallas_kernels/{mutant.op}", "-x", "-q", "-k", chosen]
        try:
            return subprocess.run(
                [*command, "-m", marks], cwd=folder, env=environment(folder), capture_output=True, timeout=TIME_LIMIT
            ).returncode
        except subprocess.TimeoutExpired:
            return TIMED_OUT


def make_copy(folder: Path) -> None:
    """What the tests of a kernel need, so that the mutant is found before the original."""
    for part in ("pallas_kernels", "tests/pallas_kernels"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    for part in ("pyproject.toml", "tests/conftest.py"):
        shutil.copy(ROOT / part, folder / part)
    (folder / "jaxpaged").symlink_to(ROOT / "jaxpaged")


def environment(folder: Path) -> dict[str, str]:
    """Where the interpreter looks first; and what the copies compile is not worth keeping."""
    return os.environ | {"PYTHONPATH": str(folder), "JAX_ENABLE_COMPILATION_CACHE": "0"}


if __name__ == "__main__":
    main()
