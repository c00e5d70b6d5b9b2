#!/usr/bin/env python
"""What `deterministic` costs on this machine: CPU time with it over CPU time without, the two taken in turns.

    python scripts/bench_deterministic.py [--model demo] [--repeat 5]

Figures are CPU milliseconds of all threads, the smallest of several runs: steadier than the wall clock on a machine
that others use too. Both run one decode step a program. `--model` is whatever `jaxpaged generate` takes, or the name of
one of bench_offline's random models, such as `llama-110m` (12 layers, hidden 768, bfloat16).
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from offline_bench import checkpoints

from jaxpaged import LLM, SamplingParams

NUM_TOKENS = 32


def work(rows: int, prompt_length: int, max_tokens: int):
    """Random prompts, and how far to continue them."""
    rng = random.Random(rows)
    prompts = [{"prompt_token_ids": [rng.randrange(3, 2000) for _ in range(prompt_length)]} for _ in range(rows)]
    return prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


WORK = {
    **{f"decode, {rows} rows": work(rows, 96, NUM_TOKENS) for rows in (1, 8, 32)},
    "prefill, 1,024 tokens": work(1, 1024, 1),
    "prefill, 32 prompts of 32": work(32, 32, 1),
}


def cpu_seconds(llm: LLM, prompts, params) -> float:
    start = time.process_time()
    llm.generate(prompts, params, use_tqdm=False)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shape = checkpoints.MODELS.get(options.model)
        compare(str(checkpoints.make_checkpoint(shape, Path(folder))) if shape else options.model, options.repeat)


def compare(model: str, repeat: int) -> None:
    """Print the CPU milliseconds of every kind of work without the option and with it, and their ratio."""
    shared = {
        "max_model_len": 1280,
        "max_num_seqs": 32,
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 512,
        "token_buckets": (2, 8, 32, 512),
        "num_scheduler_steps": 1,
        "num_gpu_blocks_override": 400,
    }
    engines = [LLM(model, deterministic=deterministic, **shared) for deterministic in (False, True)]
    for llm in engines:
        llm.wait_for_programs()
    for name, (prompts, params) in WORK.items():
        best = [float("inf")] * 2
        for turn in range(repeat + 1):  # the first one warms up
            for i, llm in enumerate(engines):
                seconds = cpu_seconds(llm, prompts, params)
                best[i] = min(best[i], seconds) if turn else best[i]
        print(f"{name:28} {best[0] * 1e3:9.1f} ms  {best[1] * 1e3:9.1f} ms  {best[1] / best[0]:5.2f} x", flush=True)
    for llm in engines:
        llm.shutdown()


if __name__ == "__main__":
    main()
