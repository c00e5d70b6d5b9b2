#!/usr/bin/env python
"""What a GPU that is here for minutes should tell: right answers first, then speed, one change at a time.

    python scripts/gpu_minutes.py --out FOLDER [--minutes 10] [--parts PART ...] [--model llama-8b] [--undo CHANGE ...]
    python scripts/gpu_minutes.py --out FOLDER --model tiny     # the same motions anywhere: its timings mean nothing

Parts, in this order, each in processes of its own, as far as the minutes go:

    tests     what `scripts/test --gpu` has of samplers, attention, runs of decode steps and models
    products  scripts/tune_products.py: the model's matrix products by cuBLAS and by our own kernel, whose table all
              later parts use; FOLDER/few_rows.json is the next pallas_kernels/few_rows_matmul/tuned.json, and what XLA
              found lies in FOLDER/autotuned.txt
    scaled    the same for weights of 8 and 4 bits
    quantised an engine of the model with weights of 8 and of 4 bits, rounded, and of checkpoints: as `speed` for 1 and
              64 requests
    speed     an engine of the model with default options: tokens per second and milliseconds of a decode step for 1, 8,
              64 and 256 requests; then the same without each of CHANGES, without all of them, and as it is once more
    lora      an engine with 8 slots for adapters of rank 16: as `speed`, of requests with none, one and eight of them
    minute    milliseconds of a decode step beside the compiling of programs, and after it, with an empty cache
    pictures  first tokens of pictures and pictures a second, of an engine of Gemma 3 4B's sizes
    profile   the kernels of a decode step for 1 and 64 requests, with XLA's graphs of launches kept as they are
    sampler   the sampling program by each way to find limits, and its dearest kernels
    attention a layer's attention over steps of serving, and what each of its kernels takes of that
    mosaic    Mosaic's kernel for prompts: whether it is right, and its time with several tiles beside Triton's
    tiles     scripts/tune_kernel.py --quick: FOLDER/tuned.json is the next pallas_kernels/.../gpu/tuned.json

FOLDER/report.md has all tables, and is written anew after each measurement. A part that fails or takes too long is told
there, and the others go on.
"""

import argparse
import collections
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_measurements import MEASUREMENTS

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

PARTS = (
    "tests",
    "products",
    "scaled",
    "quantised",
    "speed",
    "lora",
    "minute",
    "pictures",
    "profile",
    "sampler",
    "attention",
    "mosaic",
    "tiles",
)
TESTS = (
    "tests/sampling/test_sampler.py",
    "tests/sampling/test_limits.py",
    "tests/pallas_kernels/top_k_top_p",
    "tests/pallas_kernels/few_rows_matmul/test_gpu.py",
    "tests/pallas_kernels/few_rows_matmul/test_scaled.py",
    "tests/layers/test_int8_linear.py",
    "tests/pallas_kernels/ragged_paged_attention/gpu",
    "tests/end_to_end/test_multi_step.py",
    "tests/end_to_end/test_second_turns.py",
    "tests/end_to_end/test_answers.py",
    "tests/models/test_golden.py",
    "tests/models/test_lfm2.py",
    "tests/models/test_seeing.py",
    "tests/models/vision",
    "tests/worker/test_encoder.py",
    "tests/worker/test_seeing_engines.py",
    "tests/end_to_end/test_demo_vision.py",
    "tests/end_to_end/test_pictures.py",
    "tests/end_to_end/test_pictures_of_any_size.py",
    "tests/end_to_end/test_seeing.py",
    "tests/end_to_end/test_states.py",
)
NOT_OF_ONE_GPU = (
    "not tpu and not cpu and not interpret and not shard and not devices and not -2 and not -4- and not deepseek "
    "and not kimi and not 4_bits and not stages and not strangers_connector and not TestWithCompiler"
)
LAST_WORDS_S = 20


# ---- changes that can be undone ------------------------------------------------------------------


def limits_by_candidates() -> None:
    from jaxpaged.sampling.limits import LimitsMethod
    from jaxpaged.worker import engine_spec

    engine_spec.choose_method = lambda *_, **__: LimitsMethod()


def one_program_for_shared_spans() -> None:
    from jaxpaged.worker.step.packed import StepLayout

    StepLayout.has_two_programs = False


def runs_of_several_steps() -> None:
    from jaxpaged.worker import engine_spec

    engine_spec.MAX_STEPS = {}


def runs_after_many_decodes() -> None:
    from jaxpaged.executor import uniproc
    from jaxpaged.worker.programs import choose

    sizes_of = uniproc.sizes_of
    uniproc.sizes_of = lambda *args: sizes_of(*args)._replace(decodes_that_pay=choose.DECODES_THAT_PAY)


def limits_of_a_row_by_one_program() -> None:
    from pallas_kernels.top_k_top_p import gpu

    gpu.ALONE = 2**31


def products_by_cublas() -> None:
    from pallas_kernels.few_rows_matmul import gpu

    gpu.tuned = dict


def scaled_products_by_xla() -> None:
    from pallas_kernels.few_rows_matmul import gpu

    tuned = {name: tiles for name, tiles in gpu.tuned().items() if not name.endswith("bits")}
    gpu.tuned = lambda: tuned
    gpu.default_tiles = lambda *given: None


def products_apart() -> None:
    from jaxpaged.models import joined

    joined.PLATFORMS = ()


def rotated_by_xla() -> None:
    from pallas_kernels.ragged_paged_attention.gpu import GpuBackend

    GpuBackend.rotates = lambda self, kv_dtype: False


def prompts_by_triton() -> None:
    from pallas_kernels.ragged_paged_attention.gpu import mosaic

    mosaic.tuned = dict


CHANGES: dict[str, Callable[[], None]] = {
    "one launch rotates and writes": rotated_by_xla,
    "Mosaic's kernel attends to prompts where it is faster": prompts_by_triton,
    "a kernel finds the sampler's limits": limits_by_candidates,
    "several programs find the limits of a row": limits_of_a_row_by_one_program,
    "no launches for spans that nobody shares": one_program_for_shared_spans,
    "decodes are dispatched step by step": runs_of_several_steps,
    "runs from the first decode on": runs_after_many_decodes,
    "weights with the same inputs are joined": products_apart,
    "our kernel multiplies few rows where it is faster": products_by_cublas,
}
"""What a change is called -> what undoes it in a process that has not made an engine yet."""
OF_QUANTISED = "our kernel reads weights of 8 and 4 bits"
UNDONE = {**CHANGES, OF_QUANTISED: scaled_products_by_xla}


# ---- the order, and the report -------------------------------------------------------------------


class Report:
    """Tables as far as there are any."""

    def __init__(self, folder: Path, title: str):
        self.path, self.sections = folder / "report.md", [f"# {title}"]
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, title: str, text: str) -> None:
        self.sections.append(f"## {title}\n\n{text}")
        self.path.write_text("\n\n".join(self.sections) + "\n", encoding="utf-8")
        print(f"\n## {title}\n{text}", flush=True)


def table(lines: list[dict[str, Any]]) -> str:
    """A table with a column for each key of any line."""
    names = list(collections.ChainMap({}, *reversed(lines)))
    shown = lambda x: f"{x:.4g}" if isinstance(x, float) else str(x)
    rows = [" | ".join(shown(line.get(name, "")) for name in names) for line in lines]
    return "\n".join(f"| {row} |" for row in (" | ".join(names), " | ".join("---" for _ in names), *rows))


def run(command: list[str], seconds: float, **environment: str) -> tuple[int | None, str]:
    """(exit status, or None where time was over; what it printed). An interrupt comes first: pytest then sums up."""
    given = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", **environment}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=max(seconds, 1))
        return process.returncode, text
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        return None, process.communicate(timeout=LAST_WORDS_S)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]


def measured(name: str, options: argparse.Namespace, undone: list[str], seconds: float, **environment: str) -> str:
    """The table of a measurement, or why there is none."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, __file__, "--out", file.name, "--measure", name, "--model", options.model]
        status, text = run([*command, "--undo", *undone], seconds, **environment)
        found = Path(file.name).read_text(encoding="utf-8")
    lines = table(json.loads(found)) if found else ""
    if status == 0:
        return lines
    why = "took too long" if status is None else f"failed with exit status {status}"
    return f"{lines}\n\n{why}:\n\n```\n{text[-3000:]}\n```"


def test_part(options: argparse.Namespace, seconds: float) -> str:
    chosen = ["-k", NOT_OF_ONE_GPU, *TESTS] if options.model != "tiny" else ["tests/sampling/test_limits.py"]
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-m", "not exhaustive"]
    spread = ["-n", str(min(14, os.cpu_count() or 1))] if options.model != "tiny" else []
    given = {"JAX_PLATFORMS": "cuda,cpu", "XLA_CLIENT_MEM_FRACTION": "0.05", "XLA_FLAGS": ""}
    status, text = run(command + spread + chosen, seconds, **(given if options.model != "tiny" else {}))
    (options.out / "tests.txt").write_text(text, encoding="utf-8")
    return f"exit status {status}; tests.txt has all\n\n```\n{text[-2000:]}\n```"


def speed_part(options: argparse.Namespace, report: Report, left: Callable[[], float]) -> None:
    ways = [("as it is", [])] + [(f"without: {name}", [name]) for name in CHANGES]
    for title, undone in [*ways, ("without all of them", list(CHANGES)), ("as it is, again", [])]:
        if left() > 0:
            report.add(f"speed, {title}", measured("speed", options, undone, min(left(), 150)))


def picture_part(options: argparse.Namespace, seconds: float) -> str:
    model = "demo-vision" if options.model == "tiny" else "gemma3-4b"
    command = [sys.executable, "scripts/bench_multimodal.py", "--parts", "first-token", "pictures", "--model", model]
    status, text = run(command, seconds)
    return f"exit status {status}\n\n```\n{text[-2000:]}\n```"


def quantised_part(options: argparse.Namespace, report: Report, left: Callable[[], float]) -> None:
    """Weights of 8 and 4 bits, then without our kernel for few rows."""
    of_checkpoints = [(bits, undone) for bits in ("w4a16", "fp8 blocks") for undone in ([], [OF_QUANTISED])]
    for bits, undone in (("int8", []), ("int4", []), *of_checkpoints, ("int8", [OF_QUANTISED])):
        if left() > 0:
            title = f"quantised, {bits}{f', without: {undone[0]}' if undone else ''}"
            report.add(title, measured(f"quantised {bits}", options, undone, min(left(), 90)))


def product_part(options: argparse.Namespace, seconds: float, *bits: str) -> str:
    is_tiny, ours = options.model == "tiny", ROOT / "pallas_kernels" / "few_rows_matmul" / "tuned.json"
    out = options.out / "few_rows.json"
    command = [sys.executable, "scripts/tune_products.py", "--output", str(out if is_tiny else ours)]
    own = ["--model", options.model, "--seconds", str(min(seconds, 20 if is_tiny else 60 if bits == ("16",) else 110))]
    own += ["--bits", *bits]
    tried = {} if is_tiny else {"XLA_FLAGS": f"--xla_gpu_dump_autotune_results_to={options.out / 'autotuned.txt'}"}
    status, text = run([*command, *own, *(["--interpret"] if is_tiny else [])], seconds, **tried)
    if not is_tiny:
        shutil.copyfile(ours, out)
    return text if status == 0 else f"{text[-12000:]}\n\nexit status {status}"


def sampler_part(options: argparse.Namespace, report: Report, left: Callable[[], float], kept: dict[str, str]) -> None:
    report.add("sampler", measured("sampler", options, [], min(left(), 90)))
    report.add("sampler, kernels", measured("sampler kernels", options, [], min(left(), 60), **kept))


def tile_part(options: argparse.Namespace, seconds: float) -> str:
    kind = ["--interpret", "--cases", "decode, 4 x 64"] if options.model == "tiny" else ["--quick", "--steps", "3"]
    command = [sys.executable, "scripts/tune_kernel.py", *kind, "--output", str(options.out / "tuned.json")]
    status, text = run(command, seconds)
    return f"exit status {status}\n\n```\n{text[-20000:]}\n```"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--model", default="llama-8b", help="one of bench_offline's models")
    parser.add_argument("--undo", nargs="*", default=[], choices=UNDONE, metavar="CHANGE", help="of a measurement")
    parser.add_argument("--measure", choices=MEASUREMENTS, help="only this, in this process, into the file --out")
    options = parser.parse_args()
    if options.measure:
        for name in options.undo:
            UNDONE[name]()
        options.out.write_text(json.dumps(MEASUREMENTS[options.measure](options)), encoding="utf-8")
        return
    end = time.monotonic() + 60 * options.minutes
    left = lambda: end - time.monotonic()
    report = Report(options.out, f"{options.model}, {time.strftime('%Y-%m-%d')}")
    kept = {"XLA_FLAGS": "--xla_enable_command_buffers_during_profiling=true"} if options.model != "tiny" else {}
    # Threads of Mosaic's interpreter wait for each other, and XLA has as many as devices.
    threads = {"XLA_FLAGS": "--xla_force_host_platform_device_count=16"}
    parts: dict[str, Callable[[], None]] = {
        "tests": lambda: report.add("tests", test_part(options, min(left(), 240))),
        "products": lambda: report.add("products", product_part(options, min(left(), 100), "16")),
        "scaled": lambda: report.add("scaled", product_part(options, min(left(), 140), "8", "4")),
        "quantised": lambda: quantised_part(options, report, left),
        "speed": lambda: speed_part(options, report, left),
        "lora": lambda: report.add("lora", measured("lora", options, [], min(left(), 180))),
        "minute": lambda: report.add("minute", measured("minute", options, [], min(left(), 75))),
        "pictures": lambda: report.add("pictures", picture_part(options, min(left(), 100))),
        "profile": lambda: report.add("profile", measured("profile", options, [], min(left(), 120), **kept)),
        "sampler": lambda: sampler_part(options, report, left, kept),
        "attention": lambda: report.add("attention", measured("attention", options, [], min(left(), 90), **kept)),
        "mosaic": lambda: report.add("mosaic", measured("mosaic", options, [], min(left(), 90), **(kept or threads))),
        "tiles": lambda: report.add("tiles", tile_part(options, min(left(), 120))),
    }
    for part in PARTS:
        if part in options.parts and left() > 0:
            parts[part]()


if __name__ == "__main__":
    main()
