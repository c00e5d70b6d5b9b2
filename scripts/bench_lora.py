#!/usr/bin/env python
"""What adapters cost a decode step on this machine's CPU, beside the same engine without any.

    python scripts/bench_lora.py [--models demo llama-110m] [--rows 1 8] [--rounds 7] [--steps 24]

Every engine is in this process, and rounds go around all of them, so that what else the machine does meets all alike.
A round decodes `--steps` tokens of every row. Printed is the CPU time of all threads for a step, the least of the
rounds, and over the engine's that takes no adapters. `off`: that engine. `unused`: adapters are enabled, and no request
has one. Others are named by the adapters in the batch and the largest rank; rows take turns with them.

`load`: milliseconds until an adapter is in its slot, dispatched and waited for, and until its dispatch returns.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from offline_bench import checkpoints

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jaxpaged.config import EngineConfig  # noqa: E402
from jaxpaged.engine.build import resolve_model  # noqa: E402
from jaxpaged.executor.uniproc import UniProcExecutor  # noqa: E402
from jaxpaged.messages import LoRARequest, NewRequestData, SchedulerOutput  # noqa: E402
from jaxpaged.sampling_params import SamplingParams  # noqa: E402
from tests.worker.adapted_engine import Adapters, with_lora  # noqa: E402

PROMPT, BLOCK = 16, 16


class Variant(NamedTuple):
    """An engine, and the adapters that rows of its batch have: slots 1 to `used`."""

    name: str
    slots: int = 0
    max_rank: int = 16
    used: int = 0
    rank: int = 16


VARIANTS = (
    Variant("off"),
    Variant("unused", 8),
    Variant("1 of rank 16", 1, 16, 1),
    Variant("8 of rank 16", 8, 16, 8),
    Variant("1 of 8 slots, rank 16", 8, 16, 1),
    Variant("8 of rank 8, largest 64", 8, 64, 8, 8),
    Variant("32 of rank 64", 32, 64, 32, 64),
)


class Decoder:
    """An executor whose rows decode, step by step."""

    def __init__(self, model: str, variant: Variant, rows: int, steps: int):
        self.variant, self.rows, self.steps = variant, rows, steps
        config = EngineConfig.from_options(
            model=model,
            max_num_seqs=rows,
            max_num_batched_tokens=max(PROMPT * rows, 32),
            max_model_len=256,
            block_size=BLOCK,
            num_gpu_blocks_override=1 + 4 * rows * 16,
            num_scheduler_steps=1,
            enable_prefix_caching=False,
        )
        if variant.slots:
            config = with_lora(config, variant.slots, variant.max_rank)
        folder, functions, decoder, config = resolve_model(config)
        self.executor = UniProcExecutor(config, functions, decoder, folder)
        worker = self.executor.worker
        worker.wait_for_programs()
        self.loads = [(slot, slot) for slot in range(1, variant.used + 1)]
        if variant.slots:
            self.adapters = Adapters(self.executor)
            for _, number in self.loads or [(1, 1)]:
                self.adapters.make(number, variant.rank)
                worker.read_lora(LoRARequest(f"a{number}", number, "made"))
        self.round()  # lighter programs are wanted from now on
        worker.programs.wait_all(on_demand=True)
        self.round()
        self.loads = []

    def blocks_of(self, row: int) -> tuple[list[int], ...]:
        """For each KV group."""
        groups = len(self.executor.kv_cache_config.groups)
        first = [1 + 16 * (row * groups + group) for group in range(groups)]
        return tuple([*range(each, each + 16)] for each in first)

    def round(self) -> float:
        """CPU seconds of a step."""
        names, params = [f"r{i}" for i in range(self.rows)], SamplingParams(temperature=0.0, seed=0, max_tokens=200)
        used = self.variant.used
        new = [
            NewRequestData(
                name,
                [*range(3, 3 + PROMPT)],
                PROMPT,
                0,
                self.blocks_of(i),
                params,
                lora_slot=1 + i % used if used else 0,
            )
            for i, name in enumerate(names)
        ]
        ones, nothing = [1] * self.rows, [None] * self.rows
        first = SchedulerOutput(0, new, [], names, [PROMPT] * self.rows, [0] * self.rows, ones, nothing)
        first.total_num_scheduled_tokens, first.lora_loads = PROMPT * self.rows, self.loads
        self.executor.execute_model(first).result()
        pending, begin = None, time.process_time()
        for step in range(self.steps):
            computed = [PROMPT + step] * self.rows
            scheduled = SchedulerOutput(step, [], [], names, ones, computed, ones, nothing, self.rows)
            next_one = self.executor.execute_model(scheduled)
            if pending is not None:
                pending.result()
            pending = next_one
        pending.result()
        seconds = (time.process_time() - begin) / self.steps
        self.executor.execute_model(SchedulerOutput(0, [], names, [], [], [], [], []))
        return seconds

    def load_ms(self) -> tuple[float, float]:
        """(until an adapter is in a slot, until its move is dispatched)."""
        worker, times = self.executor.worker, []
        for _ in range(20):
            begin = time.perf_counter()
            worker.adapters.load(worker.device, 1, 1)
            dispatched = time.perf_counter()
            jax.block_until_ready(worker.device.stacks)
            times.append((time.perf_counter() - begin, dispatched - begin))
        return tuple(1000 * statistics.median(each) for each in zip(*times))


def model_of(name: str, folder: str) -> str:
    if name == "demo":
        return name
    return str(checkpoints.make_checkpoint(checkpoints.MODELS[name], Path(folder)))


def measure(model: str, rows: int, options: argparse.Namespace) -> None:
    wanted = [variant for variant in VARIANTS if not options.variants or variant.name in options.variants]
    decoders = [Decoder(model, variant, rows, options.steps) for variant in wanted]
    times = [[decoder.round() for decoder in decoders] for _ in range(options.rounds)]
    least = np.min(times, axis=0)
    for decoder, seconds in zip(decoders, least):
        words = f"{decoder.variant.name:26} {1000 * seconds:8.3f} ms  {seconds / least[0]:6.3f}"
        if decoder.variant.slots:
            there, dispatched = decoder.load_ms()
            stacks: Any = decoder.executor.worker.engine_spec.lora
            words += (
                f"   stacks {stacks.num_bytes / 1e6:7.1f} MB, load {there:6.2f} ms, dispatched in {dispatched:5.2f}"
            )
        print(words, flush=True)
        decoder.executor.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["demo", "llama-110m"], choices=["demo", *checkpoints.MODELS])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--variants", nargs="+", default=[], help="names of some")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            model = model_of(name, folder)
            for rows in options.rows:
                print(f"\n{name}, {rows} rows")
                measure(model, rows, options)


if __name__ == "__main__":
    main()
