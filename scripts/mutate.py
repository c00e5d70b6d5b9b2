#!/usr/bin/env python
"""Make deliberate mistakes in the source, one at a time, and see whether tests notice.

    python scripts/mutate.py [--only PATH] [--list]

The mistakes are in lists beside the tests: those in kernels, those in pages, tiers, and what travels between them and
the device, those in groups of processes and attention ranks, in what is compiled when, in decoders, in what becomes of
quantised weights, and in adapters. Each lives in a copy of the repository in a temporary folder. It is killed if a test
fails, or takes two minutes: first the tests that are expected to notice, then all of its part, slow ones left out.
Prints "killed", "SURVIVED", or "HANGS" where tests did not end in time; the exit status is 1 if one survived, or if one
no longer applies to the source.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.core.lora.mutants import MUTANTS as OF_SLOTS
from tests.executor.mutants import MUTANTS as OF_GROUPS
from tests.kv_store.mutants import MUTANTS as OF_PAGES
from tests.mutants import Mutant
from tests.pallas_kernels.mutants import MUTANTS as OF_KERNELS
from tests.params.formats.mutants import MUTANTS as OF_FORMATS
from tests.params.mutants import MUTANTS as OF_STORED
from tests.worker.mutants import MUTANTS as OF_COMPILING

ROOT = Path(__file__).resolve().parent.parent
MUTANTS = (*OF_KERNELS, *OF_PAGES, *OF_GROUPS, *OF_COMPILING, *OF_FORMATS, *OF_STORED, *OF_SLOTS)
OWN_MUTANTS = "not mutant"  # tests of mutants compare with the source, and would notice any change of it
TIME_LIMIT = 900  # seconds for one run of tests
TEST_SECONDS = 120  # for one test, which takes a few: a mistake that makes it wait for ever is noticed
PYTEST = "import os, sys, pytest; status = pytest.main(sys.argv[1:]); sys.stdout.flush(); os._exit(status)"
"""pytest, which then ends at once: a thread of a test that failed may wait for ever."""
TIMED_OUT = -1
PASSED, FAILED, NONE_SELECTED = 0, 1, 5  # pytest's exit statuses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="PATH", help="a folder or file, such as pallas_kernels/top_k")
    parser.add_argument("--list", action="store_true", help="print the mutants and try none")
    options = parser.parse_args()
    wanted = [mutant for mutant in MUTANTS if mutant.module.startswith(options.only)]
    if not wanted:
        sys.exit(f"no mutants in {options.only!r}; some are in {', '.join(sorted({m.module for m in MUTANTS}))}.")
    survivors = 0
    for mutant in wanted:
        outcome = "" if options.list else verdict(mutant, run_tests)
        survivors += outcome.startswith(("SURVIVED", "STALE"))
        print(f"{outcome:9} {mutant.module:42} {mutant.what}", flush=True)
    if not options.list:
        print(f"{len(wanted) - survivors} of {len(wanted)} killed")
    sys.exit(survivors > 0)


def verdict(mutant: Mutant, run: Callable[[Mutant, str], int]) -> str:
    """What became of a mutant; "STALE" if it is none. `run` gives pytest's status for some of its tests."""
    if mutated(mutant) is None:
        return "STALE"
    for selection in (mutant.noticed_by, ""):
        status = run(mutant, selection)
        if status == TIMED_OUT:
            return "HANGS"  # such as waiting for a copy that was never started; or the machine is busy
        if status == FAILED or status < TIMED_OUT:  # by a signal: the mistake led to memory that is none
            return "killed"
        if status not in (PASSED, NONE_SELECTED):
            return f"STALE ({status})"  # not even imported
    return "SURVIVED"


def mutated(mutant: Mutant) -> str | None:
    """The module's text with the mistake, or None if its text has changed so that it does not apply."""
    text = (ROOT / mutant.module).read_text(encoding="utf-8")
    return text.replace(mutant.original, mutant.wrong) if text.count(mutant.original) == 1 else None


def run_tests(mutant: Mutant, selection: str) -> int:
    """pytest's exit status for the selected ones of the mutant's tests, or for all ("")."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_copy(folder, mutant)
        (folder / mutant.module).write_text(str(mutated(mutant)), encoding="utf-8")
        chosen = f"({selection}) and {OWN_MUTANTS}" if selection else OWN_MUTANTS
        marks = "not slow and not exhaustive and not aot_tpu and not aot_gpu"
        bounds = [f"--timeout={TEST_SECONDS}", "--timeout-method=thread"]  # which ends what waits in a lock
        command = [sys.executable, "-c", PYTEST, *mutant.tests, "-x", "-q", "-k", chosen, "-m", marks, *bounds]
        environment = {**os.environ, "PYTHONPATH": name, "JAX_ENABLE_COMPILATION_CACHE": "0"}  # not worth keeping
        nowhere = subprocess.DEVNULL  # a pipe would be read until the last process that a test has started lets it go
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=nowhere, stderr=nowhere, start_new_session=True
        )
        try:
            return process.wait(TIME_LIMIT)
        except subprocess.TimeoutExpired:
            return TIMED_OUT
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # it and what it has left
            process.wait()


def make_copy(folder: Path, mutant: Mutant) -> None:
    """The package with the mutant and the tests, as copies, so that they are found before the originals. The rest lies
    where it was."""
    package = mutant.module.split("/")[0]
    for part in (package, "tests"):
        shutil.copytree(ROOT / part, folder / part)
    for part in ("pyproject.toml", "scripts", *{"jaxpaged", "pallas_kernels"} - {package}):
        (folder / part).symlink_to(ROOT / part)


if __name__ == "__main__":
    main()
