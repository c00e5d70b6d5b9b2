#!/usr/bin/env python
"""Find the fastest tiles of the GPU attention kernels on this machine's device, and write them to tuned.json.

    python scripts/tune_kernel.py [--cases TEXT ...] [--quick] [--steps N] [--output FILE]
    python scripts/tune_kernel.py --interpret --output FILE

The kernels read `tuned.json` beside them: device kind, kind of work, types and heads -> tiles; defaults elsewhere.
`tuned_mosaic.json` in the same folder has the tiles of prompts for which Mosaic's kernel is faster than Triton's best.
Entries that exist for other keys stay. A candidate that does not compile, or is slower than the default, is passed
over. Several steps of one key choose together, by the product of their times. Candidates are compiled side by side, on
all cores, and timed one after the other. --interpret goes through the same motions in Pallas's interpreter: a test,
whose timings mean nothing.
"""

import argparse
import dataclasses
import datetime
import itertools
import json
import math
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention.cases import SERVING_STEPS, TINY_STEPS, ServingStep
from pallas_kernels.ragged_paged_attention.gpu import GpuBackend
from pallas_kernels.ragged_paged_attention.gpu.mosaic import TUNED as TUNED_MOSAIC
from pallas_kernels.ragged_paged_attention.gpu.mosaic import MosaicTiles, cannot_take, default_mosaic_tiles
from pallas_kernels.ragged_paged_attention.gpu.statics import LayerRule
from pallas_kernels.ragged_paged_attention.gpu.tiles import TUNED, Tiles, choose_tiles, device_kind, tuned_key
from pallas_kernels.serving import attention_chain, layer_with
from pallas_kernels.timing import Calls, Chain, compiled

SLOTS, WARPS, STAGES = (32, 64, 128), (4, 8), (2, 3, 4)
ROWS = {"decode": (16,), "prefill": (64, 128)}
PER_CORE = {"decode": (2, 4, 8), "prefill": (2,)}
# What promises most by registers, shared memory and instructions: (rows, slots, programs a core, warps, stages).
QUICK = {
    "decode": (
        (16, 64, 4, 4, 2),
        (16, 64, 4, 4, 3),
        (16, 64, 2, 4, 3),
        (16, 64, 8, 4, 3),
        (16, 64, 4, 4, 4),
        (16, 128, 4, 4, 2),
        (16, 128, 3, 4, 2),
        (16, 128, 2, 4, 3),
        (16, 128, 2, 2, 2),
        (16, 128, 4, 8, 3),
        (16, 32, 8, 4, 4),
    ),
    "prefill": (
        (128, 64, 2, 8, 2),
        (128, 64, 2, 8, 3),
        (128, 64, 2, 8, 4),
        (128, 128, 2, 8, 2),
        (128, 128, 2, 8, 3),
        (64, 64, 4, 4, 2),
        (64, 128, 2, 4, 2),
    ),
}
MIN_GAIN = 0.02  # below it is noise
NUM_CALLS = {"decode": 8, "prefill": 2}  # of what is timed, several layers each: 10 to 50 ms on a GPU


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=[""], help="only steps whose names contain one of these")
    parser.add_argument("--quick", action="store_true", help="the few candidates that promise most")
    parser.add_argument("--steps", type=int, default=1, metavar="N", help="at most so many of each key")
    parser.add_argument("--interpret", action="store_true", help="tiny steps in Pallas's interpreter")
    parser.add_argument("--output", type=Path, default=TUNED, metavar="FILE")
    options = parser.parse_args()
    reason = GpuBackend(options.interpret).why_not(jax.default_backend())
    if reason is not None:
        sys.exit(f"nothing to tune on {jax.default_backend()}: {reason}. Use --interpret to try this script.")
    kind = device_kind(options.interpret)
    entries, of_mosaic = read(options.output), read(options.output.with_name(TUNED_MOSAIC.name))
    for key, steps in steps_to_tune(options, kind).items():
        steps, work = steps[: options.steps], work_of(steps[0])
        default = choose_tiles(*arguments_of(steps[0]), kind)
        entries[key] = tune(key, steps, [default, *candidates(default, work, options)], options.interpret)
        write(options.output, entries)
        if work == "prefill" and mosaic_takes(steps[0], kind):
            best = Tiles(**entries[key]["tiles"])
            found = tune(key, steps, [best, *mosaic_candidates(steps[0])], options.interpret)
            of_mosaic.pop(key, None)
            if "takes_turns" in found["tiles"]:
                of_mosaic[key] = found
            write(options.output.with_name(TUNED_MOSAIC.name), of_mosaic)


def read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def write(file: Path, entries: dict[str, Any]) -> None:
    file.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def steps_to_tune(options: argparse.Namespace, kind: str) -> dict[str, list[ServingStep]]:
    """The steps of each key, which share their tiles."""
    steps: dict[str, list[ServingStep]] = {}
    for step in TINY_STEPS if options.interpret else SERVING_STEPS:
        is_pure = step.is_decode or all(new > 1 for _, new in step.rows)
        if is_pure and not step.shape.shares and any(text in step.name for text in options.cases):
            steps.setdefault(tuned_key(*arguments_of(step), kind), []).append(step)
    return steps


def work_of(step: ServingStep) -> str:
    return "decode" if step.is_decode else "prefill"


def arguments_of(step: ServingStep) -> tuple[Any, ...]:
    """What tiles are chosen by, but for the device."""
    shape = step.shape
    return work_of(step), shape.group_size, shape.head_dim, shape.kv_dtype


def tune(key: str, steps: list[ServingStep], choices: list[Tiles], interpret: bool) -> dict[str, Any]:
    """The entry of the fastest choice, or of the first one where that is about as fast."""
    default = choices[0]
    found: dict[Tiles, list[float]] = {tiles: [] for tiles in choices}
    for step in steps:
        print(f"{key}: {step.name}", flush=True)
        for tiles, seconds in timed(choices, step, interpret):
            if isinstance(seconds, Exception):  # too many registers, too much shared memory, not supported by Triton
                print(f"  {describe(tiles)}  {type(seconds).__name__}", flush=True)
                continue
            print(f"  {describe(tiles)}  {seconds * 1e3:9.4f} ms{share(step, seconds)}", flush=True)
            found[tiles].append(seconds)
    means = {tiles: math.prod(times) ** (1 / len(steps)) for tiles, times in found.items() if len(times) == len(steps)}
    best = min(means, key=means.__getitem__)
    if default in means and means[best] > means[default] * (1 - MIN_GAIN):
        best = default
    date = datetime.date.today().isoformat()
    return {
        "tiles": dataclasses.asdict(best),
        "milliseconds": found[best][0] * 1e3,
        "step": steps[0].name,
        "date": date,
        "jax": jax.__version__,
    }


def share(step: ServingStep, seconds: float) -> str:
    return f"  {step.step_bytes / seconds / 1e9:6.0f} GB/s  {step.flops / seconds / 1e12:6.1f} TFLOP/s"


def timed(choices: list[Tiles], step: ServingStep, interpret: bool) -> Iterator[tuple[Tiles, float | Exception]]:
    """(tiles, seconds of a call or why there are none) of every choice."""

    def prepare(tiles: Tiles) -> Calls | Exception:
        try:
            return compiled(chain_with(step, tiles, interpret), 1 if interpret else NUM_CALLS[work_of(step)])
        except Exception as error:
            return error

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        prepared = list(threads.map(prepare, choices))
    chain = chain_with(step, choices[0], interpret)
    state = chain.state
    for tiles, calls in zip(choices, prepared):
        if isinstance(calls, Calls):
            seconds, state = calls.seconds(state, chain.operands)
            yield tiles, seconds
        else:
            yield tiles, calls


def candidates(default: Tiles, work: str, options: argparse.Namespace) -> Iterator[Tiles]:
    every = itertools.product(ROWS[work], SLOTS, PER_CORE[work], WARPS, STAGES)
    if options.interpret:
        every = [(default.rows, slots, default.per_core, default.warps, default.stages) for slots in SLOTS]
    elif options.quick:
        every = QUICK[work]
    for rows, slots, per_core, warps, stages in every:
        sizes = {"rows": rows, "slots": slots, "per_core": per_core, "warps": warps, "stages": stages}
        tiles = dataclasses.replace(default, **sizes, min_slots=max(default.min_slots, slots))
        if tiles != default:
            yield tiles


def mosaic_takes(step: ServingStep, kind: str) -> bool:
    """Whether Mosaic's kernel can attend for the step's layer."""
    shape = step.shape
    rule = LayerRule(1.0, shape.window, shape.soft_cap, shape.sinks, shape.kv_scales, shape.sees_ahead)
    heads = {
        "num_tokens": shape.num_tokens,
        "group_size": shape.group_size,
        "head_dim": shape.head_dim,
        "block_size": shape.block_size,
    }
    types = {"q_dtype": jnp.dtype(shape.dtype), "kv_dtype": jnp.dtype(shape.kv_dtype), "shares": shape.shares}
    return cannot_take(default_mosaic_tiles(shape.head_dim), rule, **heads, **types, kind=kind) is None


def mosaic_candidates(step: ServingStep) -> list[MosaicTiles]:
    """128 slots in turns were fastest on an H200; where iterations are few, 64 were as fast."""
    first = default_mosaic_tiles(step.shape.head_dim)
    return [first, dataclasses.replace(first, slots=64, stages=2 * first.stages)]


def chain_with(step: ServingStep, tiles: Tiles, interpret: bool) -> Chain:
    """Calls of the step, with these tiles for its kind of work."""
    mosaic = tiles if isinstance(tiles, MosaicTiles) else None

    def choose(work: str, *arguments: Any) -> Tiles:
        return tiles if work == work_of(step) and mosaic is None else choose_tiles(work, *arguments)

    backend = GpuBackend(interpret, choose=choose, choose_mosaic=lambda *_: mosaic)
    return attention_chain(step, "gpu-interpret" if interpret else "gpu", layer_with(backend, step))


def describe(tiles: Tiles) -> str:
    return "  ".join(f"{name} {value:4}" for name, value in dataclasses.asdict(tiles).items())


if __name__ == "__main__":
    main()
