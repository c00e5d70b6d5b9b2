#!/usr/bin/env python
"""What training with the engine costs on this machine: updates of the weights, and how exact log probabilities are.

    python scripts/bench_rl.py [--models demo llama-110m] [--dtypes float32 bfloat16] [--repeat 5]

An update is compared with a plain copy of its bytes in the host's memory. Times are the least of several, but for the
tokens a second, which are the mean of a few seconds. `--models` are what `jaxpaged generate` takes, or names of
bench_offline's random models.

Letters: R texts, C tokens of a text.
"""

import argparse
import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import numpy as np
from offline_bench import checkpoints
from safetensors.flax import load_file

import jaxpaged
from jaxpaged import LLM, LogprobDifference, SamplingParams, logprob_difference

ENGINE = {
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "token_buckets": (8, 256),
    "num_scheduler_steps": 1,
    "num_gpu_blocks_override": 200,
}
ROWS, PROMPT, DRAWN = 8, 24, 40
DEMO = Path(jaxpaged.__file__).parent / "assets" / "demo"
SHARED_MEMORY = Path("/dev/shm")


def least(repeat: int, work: Callable[[], Any]) -> float:
    """Seconds, after a first time that does not count."""
    found = []
    for _ in range(repeat + 1):
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return min(found[1:])


def peak_of(work: Callable[[], Any]) -> int | None:
    """By how many bytes the process's memory grew at most meanwhile; None where the system does not tell."""
    status = Path("/proc/self/status")
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return None
    read = lambda name: next(
        int(line.split()[1]) for line in status.read_text(encoding="utf-8").splitlines() if line.startswith(name)
    )
    before = read("VmRSS:")
    work()
    return max(read("VmHWM:") - before, 0) * 1024


def prompts(rows: int = ROWS) -> list[dict[str, Any]]:
    rng = random.Random(rows)
    return [{"prompt_token_ids": [rng.randrange(3, 1000) for _ in range(PROMPT)]} for _ in range(rows)]


TRAINER = """
import sys
from jaxpaged import WeightOffer
from safetensors.flax import load_file
offer = WeightOffer({name: array for file in sys.argv[1:] for name, array in load_file(file).items()})
print(offer.address, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def offered(files: Sequence[Path]) -> Iterator[str]:
    """The address where another process offers the weights of files."""
    command = [sys.executable, "-c", TRAINER, *map(str, files)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(jaxpaged.__file__).parent.parent)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as trainer:
        assert trainer.stdout is not None
        yield trainer.stdout.readline().strip()
        trainer.kill()


def sources(llm: LLM, folder: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Where an update may come from, and the update. Each gives the weights that the engine has."""
    params = jax.tree.map(lambda leaf: leaf + 0, llm.apply_model(lambda params: params)[0])  # ours, to lend
    yield "tree, the engine's layout", lambda: llm.update_weights(params)
    host = jax.tree.map(np.asarray, params)
    yield "tree of host arrays", lambda: llm.update_weights(host)
    files = list(folder.glob("*.safetensors"))
    named = {name: np.asarray(array) for file in files for name, array in load_file(file).items()}
    yield "arrays by name", lambda: llm.update_weights(named)
    with offered(files) as address:
        yield "another process's offer", lambda: llm.update_weights(address)
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None) as shared:
        for file in files:
            shutil.copy(file, shared)
        yield "file in shared memory", lambda: llm.update_weights(shared)
    yield "file on disk", lambda: llm.update_weights(str(folder))

    def sleep_and_wake() -> None:
        llm.sleep(2)
        llm.wake_up()

    yield "sleep(2), wake_up()", sleep_and_wake


def show_updates(llm: LLM, folder: Path, repeat: int) -> None:
    """Seconds by source, as a share of the speed of a plain copy, and what they take of memory."""
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.apply_model(lambda params: params)[0]))
    plain = np.ones(num_bytes, np.uint8)
    copy = least(repeat, lambda: np.copyto(np.empty_like(plain), plain))
    print(f"  weights of {num_bytes / 1e6:.1f} MB; a plain copy takes {copy * 1e3:.1f} ms")
    for name, update in sources(llm, folder):
        seconds, peak = least(repeat, update), peak_of(update)
        grown = "-" if peak is None else f"{peak / num_bytes:.2f}"
        took = f"{seconds * 1e3:9.2f} ms  {copy / seconds:8.2f} x a copy"
        print(f"  {name:28} {took}  peak {grown:>5} x the weights", flush=True)


def show_pauses(llm: LLM, repeat: int, seconds: float) -> None:
    """A step with an update before it and without one, and tokens a second with an update each second and without: with
    keys and values computed again, or kept."""
    params = jax.tree.map(lambda leaf: leaf + 0, llm.apply_model(lambda params: params)[0])
    endless = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True, detokenize=False)
    engine = llm.llm_engine

    def update_over_kept() -> None:
        engine.pause_generation("keep", clear_cache=False)
        llm.update_weights(params)
        engine.resume_generation()

    ways = {"an update": lambda: llm.update_weights(params), "one over kept KV": update_over_kept}
    plain, paused = [], {way: [] for way in ways}
    for _ in range(repeat):
        for way, update in ways.items():
            ids = [f"pause{number}" for number in range(ROWS)]
            for request_id, prompt in zip(ids, prompts()):
                engine.add_request(request_id, prompt, endless)
            for _ in range(20):
                engine.step()
            plain.append(time_of_next(llm))
            begin = time.perf_counter()
            update()
            time_of_next(llm)
            paused[way].append(time.perf_counter() - begin)
            engine.abort_request(ids)
    told = "".join(f", with {way} before it {min(times) * 1e3:.1f} ms" for way, times in paused.items())
    print(f"  next token of {ROWS} requests {min(plain) * 1e3:.1f} ms{told}")
    rate = tokens_per_second(llm, seconds, None)
    rates = {way: tokens_per_second(llm, seconds, update) for way, update in ways.items()}
    told = "".join(f", with {way} a second {each:.0f} ({each / rate:.3f})" for way, each in rates.items())
    print(f"  {rate:.0f} tokens/s{told}", flush=True)


def time_of_next(llm: LLM) -> float:
    """Until requests under way have got a token."""
    begin, counted = time.perf_counter(), llm.llm_engine.metrics.generation_tokens
    while llm.llm_engine.metrics.generation_tokens == counted:
        llm.llm_engine.step()
    return time.perf_counter() - begin


def tokens_per_second(llm: LLM, seconds: float, update: Callable[[], Any] | None) -> float:
    engine, metrics = llm.llm_engine, llm.llm_engine.metrics
    endless = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True, detokenize=False)
    ids, begin, first = [], time.perf_counter(), metrics.generation_tokens
    next_update, number = begin + 0.5, 0
    while (now := time.perf_counter()) < begin + seconds:
        while engine.get_num_unfinished_requests() < ROWS:
            ids.append(f"bench{number}")
            engine.add_request(ids[-1], prompts()[number % ROWS], endless)
            number += 1
        if update is not None and now >= next_update:
            update()
            next_update += 1
        engine.step()
    engine.abort_request(ids)
    return (metrics.generation_tokens - first) / (time.perf_counter() - begin)


def show_differences(llm: LLM) -> None:
    """How far log probabilities are apart: those that tokens were drawn with, `score_tokens`, and the trainer's."""
    params = SamplingParams(max_tokens=DRAWN, logprobs=0, seed=1, ignore_eos=True, detokenize=False)
    answers = [output.outputs[0] for output in llm.generate(prompts(), params, use_tqdm=False)]
    drawn = [[line[token].logprob for line, token in zip(each.logprobs, each.token_ids)] for each in answers]
    tokens_RC = np.array([[*given["prompt_token_ids"], *each.token_ids] for given, each in zip(prompts(), answers)])
    dense, weights = llm.dense_model(), llm.apply_model(lambda params: params)[0]
    trained = np.asarray(jax.jit(dense.logprobs)(weights, tokens_RC, np.ones_like(tokens_RC)))[:, PROMPT:]
    scored = llm.score_tokens(prompts(), [each.token_ids for each in answers], use_tqdm=False)
    for name, others in (("score_tokens", scored), ("the trainer's dense_model", list(trained))):
        print(f"  log p of {name:26} {shown(logprob_difference(drawn, others))}", flush=True)


def shown(apart: LogprobDifference) -> str:
    return f"mean {apart.mean:.1e}  p99 {apart.p99:.1e}  max {apart.largest:.1e}  of {apart.num_tokens} tokens"


def measure(name: str, dtype: str, repeat: int, seconds: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shape = checkpoints.MODELS.get(name)
        model = str(checkpoints.make_checkpoint(shape, Path(folder))) if shape else name
        print(f"{name}, {dtype}", flush=True)
        with LLM(model, dtype=dtype, **ENGINE) as llm:
            llm.wait_for_programs()
            show_differences(llm)
            show_pauses(llm, repeat, seconds)
            show_updates(llm, DEMO if model == "demo" else Path(model), repeat)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["demo", "llama-110m"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement of tokens a second")
    options = parser.parse_args()
    for name in options.models:
        for dtype in options.dtypes:
            measure(name, dtype, options.repeat, options.seconds)


if __name__ == "__main__":
    main()
