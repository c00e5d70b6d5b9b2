#!/usr/bin/env python
"""Measure the CPU seconds that the programs of an engine's start take to trace, lower and compile, for a device that
this machine does not have.

    python scripts/compile_seconds.py MODEL --target h100|v6e:1x1|... [--programs forward:64,sample:8,...]
        [--layers FEW MORE] [--json FILE] [options of the engine]

Needs the extra `aot-gpu` or `aot-tpu`, and of the model only config.json: a folder, or the name of one of
bench_offline's random models, such as llama-8b. Without --programs those of the start, the first token's first, are
measured, each at two depths; what a further layer adds is added for the others. Tracing, lowering included, holds the
interpreter; a compiler has threads for all cores. Seconds are of CPU time, so a busy machine changes them little.
Nothing is run.
"""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
from count_step import HAVE_LAYERS, depths_of, model_of, planner_of

from jaxpaged.entrypoints.argument_parser import Parser
from jaxpaged.entrypoints.cli.flags import engine_options
from jaxpaged.entrypoints.option_flags import add_engine_flags
from jaxpaged.messages import ProgramKey
from jaxpaged.tools.planning.planner import Planner
from jaxpaged.tools.planning.targets import parse_target
from jaxpaged.worker.programs.declare import PROGRAMS, When
from jaxpaged.worker.programs.engine_programs import NUM_FIRST

PARTS = ("traced", "compiled")


def starting(planner: Planner) -> list[ProgramKey]:
    """The programs that a start compiles, in its order."""
    at_start = {str(program.kind) for program in PROGRAMS if program.when is When.START}
    return [key for key in planner.compiler.builders if key.kind in at_start]


def seconds_of(planner: Planner, key: ProgramKey) -> dict[str, float]:
    """CPU seconds by part of a program that was not traced before."""
    jax.clear_caches()
    with jax.sharding.use_abstract_mesh(planner.engine_spec.mesh.abstract_mesh):
        began = time.process_time()
        lowered = planner.compiler.builders[key]()
        traced = time.process_time()
        lowered.compile()
    return {"traced": traced - began, "compiled": time.process_time() - traced}


def at_depth(few: dict[str, float], more: dict[str, float], depths: tuple[int, int], num_layers: int) -> dict[str, Any]:
    """Seconds of a program with all layers, from those with few and with more."""
    layers = (num_layers - depths[1]) / (depths[1] - depths[0]) if depths[1] > depths[0] else 0
    return {part: more[part] + layers * max(more[part] - few[part], 0.0) for part in PARTS}


def parsed() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("model_argument", metavar="MODEL", help="a folder, or a model of bench_offline's")
    parser.add_argument("--target", required=True)
    parser.add_argument("--programs", help="KIND:SIZE,...")
    parser.add_argument("--layers", type=int, nargs=2, metavar=("FEW", "MORE"), help="that are compiled")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the seconds there too")
    add_engine_flags(parser)
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    options = {name: value for name, value in engine_options(arguments).items() if name != "model"}
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # programs for absent devices cannot be read back
    target = parse_target(arguments.target)
    if not target.compiles:
        sys.exit(f"nothing compiles for {target.name} here. Install the extra aot-gpu or aot-tpu.")
    model, decoder = model_of(arguments.model_argument)
    whole = planner_of(model, decoder, target, len(decoder.layers), **options)
    options = {"num_gpu_blocks_override": max(whole.num_blocks, whole.blocks_per_request + 1), **options}
    depths = tuple(arguments.layers or depths_of(decoder))
    few, more = (planner_of(model, decoder, target, depth, **options) for depth in depths)
    first = starting(more)[:NUM_FIRST]
    words = [word.split(":") for word in (arguments.programs or "").split(",") if word]
    keys = [ProgramKey(kind, int(size or 0)) for kind, size in words] or starting(more)
    print(f"{arguments.model_argument} on {target.name}, {len(decoder.layers)} layers from {depths}: CPU seconds")
    print(f"{'program':20} {'first token':>12}" + "".join(f"{part:>10}" for part in PARTS), flush=True)
    found: dict[str, dict[str, float]] = {}
    sums: Counter[tuple[str, str]] = Counter()
    for key in keys:
        seconds = seconds_of(more, key)
        if key.kind in HAVE_LAYERS and depths[1] > depths[0]:
            seconds = at_depth(seconds_of(few, key), seconds, depths, len(decoder.layers))
        found[f"{key.kind}:{key.size}"] = seconds
        for part in PARTS:
            sums["all", part] += seconds[part]
            sums["of the first token", part] += seconds[part] * (key in first)
        print(line(f"{key.kind}:{key.size}", "yes" if key in first else "", seconds), flush=True)
    for name in ("of the first token", "all"):
        print(line(name, "", {part: sums[name, part] for part in PARTS}))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def line(name: str, first: str, seconds: dict[str, float]) -> str:
    return f"{name:20} {first:>12}" + "".join(f"{seconds[part]:10.1f}" for part in PARTS)


if __name__ == "__main__":
    main()
