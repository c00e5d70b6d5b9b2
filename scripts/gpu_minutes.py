#!/usr/bin/env python
"""What a GPU that is here for minutes should tell: right answers first, then speed, one change at a time.

    python scripts/gpu_minutes.py --out FOLDER [--minutes 10] [--parts PART ...] [--model llama-8b] [--undo CHANGE ...]
    python scripts/gpu_minutes.py --out FOLDER --model tiny     # the same motions anywhere: its timings mean nothing

Parts, in this order, each in processes of its own, as far as the minutes go:

    tests     what `scripts/test --gpu` has of samplers, attention, runs of decode steps and models
    products  scripts/tune_products.py: the model's matrix products by cuBLAS and by our own kernel, whose table all
              later parts use; FOLDER/few_rows.json is the next pallas_kernels/few_rows_matmul/tuned.json, and what XLA
              found lies in FOLDER/autotuned.txt
    speed     an engine of the model with default options: tokens per second and milliseconds of a decode step for 1, 8,
              64 and 256 requests; then the same without each of CHANGES, without all of them, and as it is once more
    minute    milliseconds of a decode step beside the compiling of programs, and after it, with an empty cache
    pictures  first tokens of pictures and pictures a second, of an engine of Gemma 3 4B's sizes
    profile   the kernels of a decode step for 1 and 64 requests, with XLA's graphs of launches kept as they are
    sampler   the sampling program by each way to find limits, and its dearest kernels
    attention a layer's attention over steps of serving, and what each of its kernels takes of that
    tiles     scripts/tune_kernel.py --quick: FOLDER/tuned.json is the next pallas_kernels/.../gpu/tuned.json

FOLDER/report.md has all tables, and is written anew after each measurement. A part that fails or takes too long is told
there, and the others go on.
"""

import argparse
import collections
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

PARTS = ("tests", "products", "speed", "minute", "pictures", "profile", "sampler", "attention", "tiles")
TESTS = (
    "tests/sampling/test_sampler.py",
    "tests/sampling/test_limits.py",
    "tests/pallas_kernels/top_k_top_p",
    "tests/pallas_kernels/few_rows_matmul/test_gpu.py",
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
LOADS = ((1, 128, 128), (8, 512, 128), (64, 512, 128), (256, 512, 128))
"""(requests, tokens in, tokens out)."""
PROMPTS = (16, 2048, 1)
TINY_LOADS = ((1, 8, 24), (3, 12, 24))
TINY_PROMPTS = (3, 24, 1)
NUM_PROFILED = 24
LAST_WORDS_S = 20
TIMED_CALLS = {True: 8, False: 2}  # of decodes and of others, in one program of several layers each
NUM_CALLS = 20


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


def products_apart() -> None:
    from jaxpaged.models import joined

    joined.PLATFORMS = ()


def rotated_by_xla() -> None:
    from pallas_kernels.ragged_paged_attention.gpu import GpuBackend

    GpuBackend.rotates = lambda self, kv_dtype: False


CHANGES: dict[str, Callable[[], None]] = {
    "one launch rotates and writes": rotated_by_xla,
    "a kernel finds the sampler's limits": limits_by_candidates,
    "several programs find the limits of a row": limits_of_a_row_by_one_program,
    "no launches for spans that nobody shares": one_program_for_shared_spans,
    "decodes are dispatched step by step": runs_of_several_steps,
    "runs from the first decode on": runs_after_many_decodes,
    "weights with the same inputs are joined": products_apart,
    "our kernel multiplies few rows where it is faster": products_by_cublas,
}
"""What a change is called -> what undoes it in a process that has not made an engine yet."""


# ---- measurements, each in a process of its own --------------------------------------------------


class Lines(list[dict[str, Any]]):
    """Lines of a table, which are in the file as soon as they are there."""

    def __init__(self, file: Path):
        super().__init__()
        self.file = file

    def append(self, line: dict[str, Any]) -> None:
        super().append(line)
        self.file.write_text(json.dumps(self), encoding="utf-8")


def open_engine(model: str, **options: Any) -> Any:
    """An engine of random weights, that has its programs for large steps and small ones and no others."""
    from offline_bench.checkpoints import MODELS, hf_config, write_json

    from jaxpaged import LLM

    folder = Path(tempfile.mkdtemp()) / model
    folder.mkdir()
    write_json(folder / "config.json", hf_config(MODELS[model]))
    tiny = model == "tiny"
    buckets = (8, 32) if tiny else (8, 64, 256, 2048)
    return LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=64 if tiny else 8192,
        token_buckets=options.pop("token_buckets", buckets),
        max_num_batched_tokens=buckets[-1],
        max_num_seqs=4 if tiny else 256,
        enable_prefix_caching=False,
        **options,
    )


def generate(llm: Any, load: tuple[int, int, int], **sampling: Any) -> float:
    """Seconds that the load takes. Raises RuntimeError unless each request got all its tokens."""
    from jaxpaged import SamplingParams

    num_requests, num_in, num_out = load
    prompts = [{"prompt_token_ids": [5 + (37 * i + 11 * j) % 500 for j in range(num_in)]} for i in range(num_requests)]
    params = SamplingParams(**{"temperature": 0.0} | sampling, max_tokens=num_out, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    if short := [output.outputs[0] for output in outputs if len(output.outputs[0].token_ids) != num_out]:
        raise RuntimeError(f"{len(short)} of {num_requests} requests did not get {num_out} tokens: {short[0]}")
    return seconds


def settle(llm: Any, load: tuple[int, int, int]) -> None:
    """Run the load until no step of it wants a program that is not there."""
    while missing(llm):
        time.sleep(0.1)
    for _ in range(3):
        generate(llm, load)
        if not missing(llm):
            return
        while missing(llm):
            time.sleep(0.1)


def missing(llm: Any) -> int:
    """How many programs that are wanted are not compiled."""
    stats = llm.llm_engine.executor_stats()
    return stats["programs"] - stats["programs_ready"]


def decode_times(llm: Any, num_requests: int, since: float) -> list[float]:
    """Milliseconds of each decode step, from result to result, of the records that began after `since`."""
    records, _ = llm.step_records()
    times = []
    for before, record in itertools.pairwise(records):
        all_decode = record.num_tokens == record.num_sampled == num_requests * record.num_steps
        if all_decode and before.schedule_begin >= since:
            times.append(1e3 * (record.result_ready - before.result_ready) / record.num_steps)
    return times


def decode_milliseconds(llm: Any, num_requests: int, since: float) -> float:
    """Their median."""
    times = decode_times(llm, num_requests, since)
    return statistics.median(times) if times else float("nan")


def measure_speed(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A line for each load."""
    begin = time.perf_counter()
    llm = open_engine(options.model)
    lines = Lines(options.out)
    tiny, made = options.model == "tiny", time.perf_counter()
    loads, prompts = (TINY_LOADS, TINY_PROMPTS) if tiny else (LOADS, PROMPTS)
    generate(llm, (1, loads[0][1], 1))
    lines.append({"made, s": made - begin, "first token, s": time.perf_counter() - made})
    settle(llm, prompts)
    seconds = min(generate(llm, prompts) for _ in range(2))
    lines.append({"load": prompts, "tokens in/s": prompts[0] * prompts[1] / seconds})
    for load in loads:
        settle(llm, load)
        since = time.perf_counter()
        seconds = min(generate(llm, load) for _ in range(2 if load[0] < 100 else 1))
        tokens, step = load[0] * load[2] / seconds, decode_milliseconds(llm, load[0], since)
        lines.append({"load": load, "tokens/s": tokens, "ms a decode step": step})
    drawn = (load[0], load[1], load[2])
    seconds = min(generate(llm, drawn, temperature=1.0, top_p=0.9) for _ in range(2))
    lines.append({"load": load, "top_p": 0.9, "tokens/s": load[0] * load[2] / seconds})
    llm.shutdown()
    return lines


def measure_first_minute(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Steps of one request from the first on, while the programs of default options are compiled, with threads that
    take the interpreter in turns of two lengths; and who has it then."""
    from interpreter_watch import InterpreterWatch

    from jaxpaged.worker.programs.compiled import THREAD_NAME

    load, lines = (TINY_LOADS if options.model == "tiny" else LOADS)[0], Lines(options.out)
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
    llm = open_engine(options.model, **({} if options.model == "tiny" else {"token_buckets": None}))
    for title, seconds in (("beside compiling", 10 if options.model == "tiny" else 60), ("after it", 2)):
        since, times = time.perf_counter(), {0.0005: list[float](), 0.0001: list[float]()}
        with InterpreterWatch(THREAD_NAME) as watch:
            while time.perf_counter() < since + seconds and (missing(llm) or title == "after it"):
                turn = min(times, key=lambda turn: sum(times[turn]))
                sys.setswitchinterval(turn)
                begin = time.perf_counter()
                generate(llm, load)
                times[turn] += decode_times(llm, load[0], begin)
        for turn, steps in times.items():
            steps = sorted(steps) or [float("nan")]
            line: dict[str, Any] = {"decode steps": title, "turns, ms": 1e3 * turn, "steps": len(steps)}
            line["programs missing"] = missing(llm)
            for name, share in (("median", 0.5), ("p90", 0.9), ("p99", 0.99)):
                line[f"{name}, ms"] = steps[int(share * (len(steps) - 1))]
            lines.append(line | {"mean, ms": statistics.mean(steps)})
        for about in watch.lines():
            lines.append(about)
        settle(llm, load)
    llm.shutdown()
    return lines


def measure_profile(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The dearest kernels of a decode step."""
    import jax

    llm, tables = open_engine(options.model), Lines(options.out)
    loads = TINY_LOADS[:1] if options.model == "tiny" else (LOADS[0], LOADS[2])
    for num_requests, num_in, _ in loads:
        load = (num_requests, num_in, NUM_PROFILED)
        settle(llm, load)
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                generate(llm, load)
            kernels = kernels_of(Path(folder))
        for name, (count, nanoseconds) in kernels.most_common(30):
            per_step = {"launches a step": count / NUM_PROFILED, "us a step": nanoseconds / 1e3 / NUM_PROFILED}
            tables.append({"load": load, "kernel": name, **per_step})
    llm.shutdown()
    return tables


class Kernels(dict[str, tuple[int, float]]):
    """Name of a kernel -> (how often it ran, nanoseconds of all)."""

    def add(self, name: str, duration: float) -> None:
        count, before = self.get(name, (0, 0.0))
        self[name] = count + 1, before + duration

    def most_common(self, most: int) -> list[tuple[str, tuple[int, float]]]:
        return sorted(self.items(), key=lambda entry: -entry[1][1])[:most]


def kernels_of(folder: Path) -> Kernels:
    """What ran on the devices; on the host's threads where there is no plane of a device, as on a CPU."""
    import jax

    (file,) = folder.rglob("*.xplane.pb")
    planes = list(jax.profiler.ProfileData.from_file(str(file)).planes)
    kernels = Kernels()
    for plane in [plane for plane in planes if "/device:" in plane.name] or planes:
        for line in plane.lines:
            if plane.name.startswith("/host") or line.name.startswith("Stream"):
                for event in line.events:
                    kernels.add(event.name, event.duration_ns)
    return kernels


def drawing(num_rows: int, vocabulary: int, limits: dict[str, Any]) -> tuple[Any, Any]:
    """Logits, and packed lines of requests that draw from them."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxpaged.sampling.rows import SamplingRows
    from jaxpaged.sampling_params import SamplingParams

    logits_SV = 3 * jax.random.normal(jax.random.key(0), (num_rows, vocabulary), jnp.float32)
    table, rows = SamplingRows(num_rows), np.arange(num_rows)
    for row in range(num_rows):
        table.set(row, SamplingParams(temperature=1.0, seed=row, **limits))
    packed_SF = table.pack(rows, np.full(num_rows, 7), np.ones(num_rows, int), num_rows)
    return logits_SV, jnp.asarray(packed_SF)


def sampling_programs(options: argparse.Namespace) -> tuple[dict[str, Any], tuple[int, ...], int]:
    """(ways to draw a token for each row, numbers of rows, the size of the vocabulary)."""
    import jax

    from jaxpaged.distributed.mesh import make_mesh
    from jaxpaged.sampling.limits import BY_CANDIDATES, LimitsMethod
    from jaxpaged.sampling.sampler import sample_plain
    from pallas_kernels.top_k_top_p import gpu

    by_kernel = LimitsMethod("gpu" if jax.default_backend() == "gpu" else "gpu-interpret", make_mesh(1))
    own = {"ALONE": gpu.ALONE, "PIECE": gpu.PIECE, "WARPS": gpu.WARPS}

    def program(method: LimitsMethod, **settings: int) -> Any:
        def sample(logits_SV: Any, packed_SF: Any) -> Any:
            vars(gpu).update(own | settings)
            return sample_plain(logits_SV, packed_SF, method).tokens_S

        return jax.jit(sample)

    ways = {
        "kernel": program(by_kernel),
        "8 warps": program(by_kernel, WARPS=8),
        "pieces of 2048": program(by_kernel, PIECE=2048),
        "a program a row": program(by_kernel, ALONE=2**31),
        "candidates": program(BY_CANDIDATES),
    }
    return (ways, (1, 2), 512) if options.model == "tiny" else (ways, (1, 8, 64, 256), 128_256)


def measure_sampler(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds to draw a token for each of some rows, by each way to find limits."""
    import numpy as np

    ways, sizes, vocabulary = sampling_programs(options)
    lines = Lines(options.out)
    for num_rows in sizes:
        for limits in ({}, {"top_p": 0.9}, {"top_k": 50}, {"top_p": 0.9, "top_k": 1000}):
            arrays = drawing(num_rows, vocabulary, limits)
            line: dict[str, Any] = {"rows": num_rows, "limits": str(limits)}
            draws = []
            for name, sample in ways.items():
                line[f"{name}, ms"] = median_milliseconds(sample, *arrays)
                draws.append(np.asarray(sample(*arrays)))
            line["equal draws"] = float(np.mean([np.mean(draw == draws[0]) for draw in draws]))
            lines.append(line)
    return lines


def measure_sampler_kernels(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The dearest kernels of drawing."""
    import jax

    ways, sizes, vocabulary = sampling_programs(options)
    lines = Lines(options.out)
    for num_rows in sizes:
        for limits in ({}, {"top_p": 0.9}):
            arrays = drawing(num_rows, vocabulary, limits)
            jax.block_until_ready(ways["kernel"](*arrays))
            with tempfile.TemporaryDirectory() as folder:
                with jax.profiler.trace(folder):
                    for _ in range(NUM_CALLS):
                        jax.block_until_ready(ways["kernel"](*arrays))
                kernels = kernels_of(Path(folder))
            for name, (count, nanoseconds) in kernels.most_common(12):
                per_call = {"launches": count / NUM_CALLS, "us": nanoseconds / 1e3 / NUM_CALLS}
                lines.append({"rows": num_rows, "limits": str(limits), "kernel": name, **per_call})
    return lines


def median_milliseconds(call: Callable[..., Any], *arguments: Any) -> float:
    import jax

    jax.block_until_ready(call(*arguments))
    times = []
    for _ in range(NUM_CALLS):
        begin = time.perf_counter()
        jax.block_until_ready(call(*arguments))
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def measure_attention(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Microseconds of a layer for steps of serving, its shares of what the device can do, and those of its kernels."""
    import jax

    from pallas_kernels.ragged_paged_attention.cases import SERVING_STEPS, TINY_STEPS
    from pallas_kernels.serving import attention_chain
    from pallas_kernels.timing import compiled, measured_bandwidth, measured_matmul

    tiny = options.model == "tiny"
    bandwidth, speed = (
        measured_bandwidth(1 << 20 if tiny else 1 << 31),
        measured_matmul(64 if tiny else 8192, "bfloat16"),
    )
    steps = TINY_STEPS[:1] if tiny else SERVING_STEPS
    chains = [lambda step=step: attention_chain(step, "gpu-interpret" if tiny else "gpu") for step in steps]

    def prepare(step: Any, chain: Callable[[], Any]) -> Any:
        try:
            return compiled(chain(), 1 if tiny else TIMED_CALLS[step.is_decode])
        except Exception as error:
            return error

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        programs = list(threads.map(prepare, steps, chains))
    lines = Lines(options.out)
    lines.append({"step": "measured on this device", "GB/s": bandwidth / 1e9, "TFLOP/s": speed / 1e12})
    for step, calls, make in zip(steps, programs, chains):
        if isinstance(calls, Exception):
            lines.append({"step": step.name, "us": f"{type(calls).__name__}: {calls}"[:200]})
            continue
        chain = make()
        seconds, state = calls.seconds(chain.state, chain.operands)
        line = {"step": step.name, "us": 1e6 * seconds}
        line["of the bandwidth"] = step.step_bytes / seconds / bandwidth
        line["of the products"] = step.flops / seconds / speed
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                jax.block_until_ready(calls.program(state, *chain.operands))
            for name, (_, nanoseconds) in sorted(kernels_of(Path(folder)).items()):
                if name.startswith("paged_"):
                    line[f"{name}, us"] = nanoseconds / 1e3 / calls.count
        lines.append(line)
    return lines


MEASUREMENTS: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
    "speed": measure_speed,
    "minute": measure_first_minute,
    "profile": measure_profile,
    "sampler": measure_sampler,
    "sampler kernels": measure_sampler_kernels,
    "attention": measure_attention,
}


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


def product_part(options: argparse.Namespace, seconds: float) -> str:
    is_tiny, ours = options.model == "tiny", ROOT / "pallas_kernels" / "few_rows_matmul" / "tuned.json"
    out = options.out / "few_rows.json"
    command = [sys.executable, "scripts/tune_products.py", "--output", str(out if is_tiny else ours)]
    own = ["--model", options.model, "--seconds", str(min(seconds, 20 if is_tiny else 60))]
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
    parser.add_argument("--undo", nargs="*", default=[], choices=CHANGES, metavar="CHANGE", help="of a measurement")
    parser.add_argument("--measure", choices=MEASUREMENTS, help="only this, in this process, into the file --out")
    options = parser.parse_args()
    if options.measure:
        for name in options.undo:
            CHANGES[name]()
        options.out.write_text(json.dumps(MEASUREMENTS[options.measure](options)), encoding="utf-8")
        return
    end = time.monotonic() + 60 * options.minutes
    left = lambda: end - time.monotonic()
    report = Report(options.out, f"{options.model}, {time.strftime('%Y-%m-%d')}")
    kept = {"XLA_FLAGS": "--xla_enable_command_buffers_during_profiling=true"} if options.model != "tiny" else {}
    parts: dict[str, Callable[[], None]] = {
        "tests": lambda: report.add("tests", test_part(options, min(left(), 240))),
        "products": lambda: report.add("products", product_part(options, min(left(), 100))),
        "speed": lambda: speed_part(options, report, left),
        "minute": lambda: report.add("minute", measured("minute", options, [], min(left(), 75))),
        "pictures": lambda: report.add("pictures", picture_part(options, min(left(), 100))),
        "profile": lambda: report.add("profile", measured("profile", options, [], min(left(), 120), **kept)),
        "sampler": lambda: sampler_part(options, report, left, kept),
        "attention": lambda: report.add("attention", measured("attention", options, [], min(left(), 90), **kept)),
        "tiles": lambda: report.add("tiles", tile_part(options, min(left(), 120))),
    }
    for part in PARTS:
        if part in options.parts and left() > 0:
            parts[part]()


if __name__ == "__main__":
    main()
