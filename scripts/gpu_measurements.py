"""What gpu_minutes.py measures, each in a process of its own: an engine, its first minute, its kernels one by one.

A measurement takes the options of that script and returns the lines of a table. Without a GPU, and with the model
"tiny", they go through the same motions.
"""

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

LOADS = ((1, 128, 128), (8, 512, 128), (64, 512, 128), (256, 512, 128))
"""(requests, tokens in, tokens out)."""
PROMPTS = (16, 2048, 1)
TINY_LOADS = ((1, 8, 24), (3, 12, 24))
TINY_PROMPTS = (3, 24, 1)
NUM_ADAPTERS, ADAPTER_RANK = 8, 16
NUM_PROFILED = 24
TIMED_CALLS = {True: 8, False: 2}  # of decodes and of others, in one program of several layers each
NUM_CALLS = 20
MOSAIC_S = 75
LONG = ((0, 8192),)
PROMPT_STEPS = (
    ("a prompt of 8,192", LONG, {}),
    ("a prompt of 2,048", ((0, 2048),), {}),
    ("16 prompts of 512", ((0, 512),) * 16, {}),
    ("2,048 behind 6,144", ((6144, 2048),), {}),
    ("64 decodes, 1,024 behind 1,024", (*((2047, 1),) * 64, (1024, 1024)), {}),
    ("256 behind 30,000", ((30_000, 256),), {}),
    ("48 behind 8,000", ((8000, 48),), {}),
    ("window of 1,024", LONG, {"window": 1024}),
    ("group of 8", LONG, {"group_size": 8, "num_kv_heads": 4}),
    ("group of 2", LONG, {"group_size": 2}),
    ("group of 1", LONG, {"group_size": 1, "num_kv_heads": 16}),
    ("group of 7", LONG, {"group_size": 7, "num_kv_heads": 4}),
    ("group of 5", LONG, {"group_size": 5}),
    ("heads of 64, group of 4", LONG, {"head_dim": 64}),
    (
        "heads of 64, group of 8, window of 128, sinks",
        LONG,
        {"head_dim": 64, "group_size": 8, "window": 128, "sinks": True},
    ),
    ("heads of 64, group of 8", LONG, {"head_dim": 64, "group_size": 8}),
    ("heads of 64, group of 1", LONG, {"head_dim": 64, "group_size": 1, "num_kv_heads": 16}),
)
"""(name, rows of (cached, new) tokens, the shape's other sizes), 8 kv heads of 128 and groups of 4 unless given."""
TINY_PROMPT_STEPS = (("a prompt of 40", ((0, 40),), {"num_kv_heads": 1, "head_dim": 64}),)


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


def generate(llm: Any, load: tuple[int, int, int], adapters: Sequence[Any] = (), **sampling: Any) -> float:
    """Seconds that the load takes, whose requests take turns with the adapters. Raises RuntimeError unless each request
    got all its tokens."""
    from jaxpaged import SamplingParams

    num_requests, num_in, num_out = load
    prompts = [{"prompt_token_ids": [5 + (37 * i + 11 * j) % 500 for j in range(num_in)]} for i in range(num_requests)]
    params = SamplingParams(**{"temperature": 0.0} | sampling, max_tokens=num_out, ignore_eos=True, detokenize=False)
    adapted = {"lora_request": [adapters[i % len(adapters)] for i in range(num_requests)]} if adapters else {}
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False, **adapted)
    seconds = time.perf_counter() - begin
    if short := [output.outputs[0] for output in outputs if len(output.outputs[0].token_ids) != num_out]:
        raise RuntimeError(f"{len(short)} of {num_requests} requests did not get {num_out} tokens: {short[0]}")
    return seconds


def settle(llm: Any, load: tuple[int, int, int], adapters: Sequence[Any] = ()) -> None:
    """Run the load until no step of it wants a program that is not there."""
    while missing(llm):
        time.sleep(0.1)
    for _ in range(3):
        generate(llm, load, adapters)
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
        lines.append(speed_of(llm, load))
    drawn = (load[0], load[1], load[2])
    seconds = min(generate(llm, drawn, temperature=1.0, top_p=0.9) for _ in range(2))
    lines.append({"load": load, "top_p": 0.9, "tokens/s": load[0] * load[2] / seconds})
    llm.shutdown()
    return lines


def speed_of(llm: Any, load: tuple[int, int, int], adapters: Sequence[Any] = ()) -> dict[str, Any]:
    """A line of the load."""
    settle(llm, load, adapters)
    since = time.perf_counter()
    seconds = min(generate(llm, load, adapters) for _ in range(2 if load[0] < 100 else 1))
    tokens, step = load[0] * load[2] / seconds, decode_milliseconds(llm, load[0], since)
    return {"load": load, "tokens/s": tokens, "ms a decode step": step}


W4A16 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
CHECKPOINTS = {
    "w4a16": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": W4A16}},
    },
    "fp8 blocks": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}
"""What config.json says of weights that lie in a file in few bits."""


def measure_quantised(options: argparse.Namespace, bits: str) -> list[dict[str, Any]]:
    """As `measure_speed`, for weights of 8 or 4 bits and some of its loads; or for those of a checkpoint."""
    lines, tiny, begin = Lines(options.out), options.model == "tiny", time.perf_counter()
    of_checkpoint = {"hf_overrides": {"quantization_config": CHECKPOINTS[bits]}} if bits in CHECKPOINTS else {}
    llm = open_engine(options.model, **(of_checkpoint or {"quantization": bits}))
    lines.append({"made, s": time.perf_counter() - begin})
    for load in TINY_LOADS if tiny else (LOADS[0], LOADS[2]):
        lines.append(speed_of(llm, load))
    llm.shutdown()
    return lines


def measure_lora(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Some loads of `measure_speed` for an engine with 8 slots of rank 16, whose requests have no adapter, one, or take
    turns with 8; and for the same engine without slots."""
    from jaxpaged.messages import LoRARequest

    lines, tiny = Lines(options.out), options.model == "tiny"
    files = write_adapters(options.model, NUM_ADAPTERS, ADAPTER_RANK)
    adapters = [LoRARequest(path.name, i, str(path)) for i, path in enumerate(files, 1)]
    slots = {"enable_lora": True, "max_loras": NUM_ADAPTERS, "max_lora_rank": ADAPTER_RANK}
    for title, taken, counts in (("8 slots", slots, (0, 1, NUM_ADAPTERS)), ("no slots", {}, (0,))):
        llm = open_engine(options.model, **taken)
        for load in TINY_LOADS if tiny else LOADS[:3]:
            for count in counts:
                lines.append({"engine": title, "adapters": count, **speed_of(llm, load, adapters[:count])})
        llm.shutdown()
        del llm
    return lines


def write_adapters(model: str, count: int, rank: int) -> list[Path]:
    """Folders of adapters for all projections of the model, with the same small random weights."""
    import ml_dtypes
    import numpy as np
    from offline_bench.checkpoints import MODELS, hf_config, write_json
    from safetensors.numpy import save_file

    config = hf_config(MODELS[model])
    D, F, H = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    N, K = config["num_attention_heads"] * H, config["num_key_value_heads"] * H
    heads = {"q_proj": (D, N), "k_proj": (D, K), "v_proj": (D, K), "o_proj": (N, D)}
    sizes = {f"self_attn.{name}": size for name, size in heads.items()}
    sizes |= {"mlp.gate_proj": (D, F), "mlp.up_proj": (D, F), "mlp.down_proj": (F, D)}
    draw, tensors = np.random.default_rng(0), {}
    for layer, (name, (inputs, outputs)) in itertools.product(range(config["num_hidden_layers"]), sizes.items()):
        for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            values = 0.01 * draw.standard_normal(shape, np.float32)
            key = f"base_model.model.model.layers.{layer}.{name}.lora_{part}.weight"
            tensors[key] = values.astype(ml_dtypes.bfloat16)
    folders = [Path(tempfile.mkdtemp()) / f"adapter-{i}" for i in range(count)]
    modules = sorted({name.split(".")[-1] for name in sizes})
    for folder in folders:
        folder.mkdir()
        about = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules}
        write_json(folder / "adapter_config.json", about)
        weights = folder / "adapter_model.safetensors"
        if folder == folders[0]:
            save_file(tensors, weights)
        else:
            weights.hardlink_to(folders[0] / weights.name)
    return folders


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
    return (ways, (2,), 512) if options.model == "tiny" else (ways, (1, 8, 64, 256), 128_256)


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
    from pallas_kernels.ragged_paged_attention.cases import SERVING_STEPS, TINY_STEPS
    from pallas_kernels.serving import attention_chain
    from pallas_kernels.timing import measured_bandwidth, measured_matmul

    tiny = options.model == "tiny"
    bandwidth, speed = (
        measured_bandwidth(1 << 20 if tiny else 1 << 31),
        measured_matmul(64 if tiny else 8192, "bfloat16"),
    )
    steps = TINY_STEPS[:1] if tiny else SERVING_STEPS
    chains = [partial(attention_chain, step, "gpu-interpret" if tiny else "gpu") for step in steps]
    lines = Lines(options.out)
    lines.append({"step": "measured on this device", "GB/s": bandwidth / 1e9, "TFLOP/s": speed / 1e12})
    for step, calls, chain in zip(steps, compiled_calls(steps, chains, tiny), chains):
        found = timed_layer(step, calls, chain, speed)
        if "us" in found:
            found["of the bandwidth"] = 1e6 * step.step_bytes / found["us"] / bandwidth
        lines.append({"step": step.name, **found})
    return lines


def measure_mosaic(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Mosaic's kernel for prompts: its largest error in each of its cases, then microseconds of a layer with its tiles
    beside those with Triton's kernel, for steps and heads. What fails is told in its line."""
    from pallas_kernels.ragged_paged_attention.cases import PROMPT_CASES, serving_step
    from pallas_kernels.ragged_paged_attention.gpu.mosaic import default_mosaic_tiles
    from pallas_kernels.timing import measured_matmul

    tiny, lines = options.model == "tiny", Lines(options.out)
    end = time.monotonic() + (600 if tiny else MOSAIC_S)
    for line in mosaic_errors(PROMPT_CASES[:1] if tiny else PROMPT_CASES, tiny):
        lines.append(line)
    speed = measured_matmul(64 if tiny else 8192, "bfloat16")
    lines.append({"case": "measured on this device", "of the products": 1.0, "TFLOP/s": speed / 1e12})
    steps = [serving_step(name, rows, **heads) for name, rows, heads in (TINY_PROMPT_STEPS if tiny else PROMPT_STEPS)]
    tried = [(step, None) for step in steps]
    if not tiny:  # the interpreter would take minutes
        tried += [(step, default_mosaic_tiles(step.shape.head_dim)) for step in steps]
    tried.sort(key=lambda pair: steps.index(pair[0]))
    chains = [partial(mosaic_chain, step, tiles, tiny) for step, tiles in tried]
    for (step, tiles), calls, chain in zip(tried, compiled_calls([step for step, _ in tried], chains, tiny), chains):
        is_late = time.monotonic() > end and not isinstance(calls, Exception)
        found = {"error": "no time"} if is_late else timed_layer(step, calls, chain, speed)
        lines.append({"case": step.name, "kernel": "Triton" if tiles is None else "Mosaic", **found})
    return lines


def mosaic_errors(cases: Sequence[Any], interpret: bool) -> Iterator[dict[str, Any]]:
    """The largest error of each case and what is allowed, or why there is none."""
    import jax.numpy as jnp

    from pallas_kernels import ragged_paged_attention as rpa
    from pallas_kernels.ragged_paged_attention.gpu import GpuBackend
    from pallas_kernels.ragged_paged_attention.gpu.mosaic import default_mosaic_tiles
    from pallas_kernels.testing import make_step
    from tests.pallas_kernels.ragged_paged_attention.one_step import case_tolerance, error, run

    def attempt(case: Any) -> dict[str, Any]:
        tiles = dataclasses.replace(default_mosaic_tiles(case.head_dim), min_slots=128)  # so that there are parts
        rpa._BACKENDS[case.name] = GpuBackend(interpret, choose_mosaic=lambda *_: tiles)
        try:
            step = make_step(case, jnp.bfloat16)
            out_TNH, _ = run(case, step, jnp.bfloat16, case.name)
            found = {"error": error(case, out_TNH, step), "allowed": case_tolerance(case, jnp.bfloat16)}
        except Exception as failure:
            found = {"error": f"{type(failure).__name__}: {failure}"[-500:]}
        return {"case": case.name} | found

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        yield from threads.map(attempt, cases)


def mosaic_chain(step: Any, tiles: Any, interpret: bool) -> Any:
    """Calls of a step with these tiles for prompts; None: Triton's kernel."""
    from pallas_kernels.ragged_paged_attention.gpu import GpuBackend
    from pallas_kernels.serving import attention_chain, layer_with

    backend = GpuBackend(interpret, choose_mosaic=lambda *_: tiles)
    return attention_chain(step, "gpu-interpret" if interpret else "gpu", layer_with(backend, step))


def compiled_calls(steps: Sequence[Any], chains: Sequence[Callable[[], Any]], tiny: bool) -> list[Any]:
    """The program of each step's chain, or why there is none."""
    from pallas_kernels.timing import compiled

    def prepare(step: Any, chain: Callable[[], Any]) -> Any:
        try:
            return compiled(chain(), 1 if tiny else TIMED_CALLS[step.is_decode])
        except Exception as error:
            return error

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(prepare, steps, chains))


def timed_layer(step: Any, calls: Any, chain: Callable[[], Any], speed: float) -> dict[str, Any]:
    """Microseconds of a layer, its share of the products' speed, and what each of its kernels takes, or the error of
    `calls` or of a run."""
    import jax

    try:
        if isinstance(calls, Exception):
            raise calls
        made = chain()
        seconds, state = calls.seconds(made.state, made.operands)
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                jax.block_until_ready(calls.program(state, *made.operands))
            kernels = {
                f"{name}, us": nanoseconds / 1e3 / calls.count
                for name, (_, nanoseconds) in sorted(kernels_of(Path(folder)).items())
                if name.startswith("paged_")
            }
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[-500:]}
    return {"us": 1e6 * seconds, "of the products": step.flops / seconds / speed, **kernels}


MEASUREMENTS: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
    "speed": measure_speed,
    "quantised int8": partial(measure_quantised, bits="int8"),
    "quantised int4": partial(measure_quantised, bits="int4"),
    **{f"quantised {bits}": partial(measure_quantised, bits=bits) for bits in CHECKPOINTS},
    "lora": measure_lora,
    "minute": measure_first_minute,
    "profile": measure_profile,
    "sampler": measure_sampler,
    "sampler kernels": measure_sampler_kernels,
    "attention": measure_attention,
    "mosaic": measure_mosaic,
}
