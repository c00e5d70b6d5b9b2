"""The benchmarks that no other test runs: small, to their end, with the lines that people read."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
SCRIPTS = Path(__file__).parents[2] / "scripts"
FEW_PROGRAMS = ["max_num_seqs=2", "max_model_len=128", "max_num_batched_tokens=16", "num_scheduler_steps=1"]
PRODUCTS = ["bench_products.py", "--rows", "2", "--shape", "64x64", "--repeat", "1"]
PARALLEL = ["bench_parallel.py", "--devices", "1", "2", "--tokens", "2", "--repeat", "1"]
TRANSFER = ["bench_kv_transfer.py", "--lengths", "64", "100", "--repeats", "1"]
STARTS = ["bench_startup.py", *(part for option in FEW_PROGRAMS for part in ("--option", option))]
MINUTE = ["bench_first_minute.py", "--models", "demo", "--requests", "2", "--seconds", "3"]
SHORT = ["bench_short_requests.py", "--streams", "8", "--max-num-seqs", "4", "--rows", "0", "1", "--seconds", "2"]
ONCE = ["--repeat", "1", "--seconds", "1"]
SMALL = ["--requests", "1", "--tokens", "8", "--prompt-tokens", "8"]


RL = ["bench_rl.py", "--models", "demo", "--dtypes", "float32", *ONCE]


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        pytest.param(STARTS, "**first token**", marks=pytest.mark.exhaustive),  # compiles everything three times
        (["bench_host.py", "--running", "8", "--steps", "20"], "whole step"),
        (["bench_host.py", "--running", "8", "--steps", "20", "--device-ms", "1"], "idle"),
        (["bench_group.py", "--processes", "1", "3", "--running", "4", "--steps", "50"], "| 3 | 4 |"),
        (["bench_process.py", "--streams", "4", "--tokens", "8", "--rounds", "1"], "two processes give"),
        (["bench_serving.py", "--free", "--streams", "2", *SMALL], "tokens/CPU-s"),
        (["bench_serving.py", "--device-ms", "1", "--streams", "2", *SMALL], "overhead"),
        pytest.param(
            ["bench_disaggregated.py", "--seconds", "1", "--prompt-tokens", "300", "--rounds", "1"],
            "once computed |",
            marks=pytest.mark.exhaustive,  # three engines
        ),
        pytest.param(SHORT, "| 1 |", marks=pytest.mark.exhaustive),  # two engines
        pytest.param(RL, "x the weights", marks=pytest.mark.exhaustive),  # an update from every source
        (["bench_kv_tiers.py", "--page-mib", "0.1", "--pages", "2"], "scattered"),
        pytest.param(TRANSFER, "times sooner", marks=pytest.mark.exhaustive),  # nine engines
        pytest.param(PARALLEL, "64 of 64 alike", marks=pytest.mark.exhaustive),  # five engines
        pytest.param(MINUTE, "| demo | 2 |", marks=pytest.mark.exhaustive),  # two engines, one with all programs
        pytest.param(PRODUCTS, "GB/s", marks=pytest.mark.exhaustive),  # weights that no cache holds, in every form
    ],
)
def test_a_benchmark_runs_to_its_end(command, printed):
    script, *arguments = command
    done = subprocess.run([sys.executable, SCRIPTS / script, *arguments], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert printed in done.stdout
