#!/usr/bin/env python
"""Count what the engine's programs do on a device that this machine does not have, per layer and per program.

    python scripts/count_step.py MODEL --target h100|h200|v6e:1x1|... [--programs decode:64,sample:64] [--rows N]
        [--context N] [--layers FEW MORE] [--top N] [--save FOLDER] [--json FILE] [options of the engine]

Needs the extra `aot-gpu` or `aot-tpu`, and of the model only config.json: a folder, or the name of one of
bench_offline's random models, such as llama-8b. Each program is compiled at two depths, and what a further layer adds
is added for the others. Seen, in what compilers write down: launches, graphs of CUDA, waits of the host, registers,
spills, shared memory; bundles, spills and VMEM of a TPU's kernels; bytes; collectives. Estimated: cycles, by the TPU's
compiler, and times (`jaxpaged/tools/counting/estimate.py` says how). Beside bytes by purpose stands the least that the
model needs (`minimum.py` there), and beside times the floor of a decode step, at the same rates: weights and contexts
read once. What kernels read and write of the KV cache depends on requests, so only its least is told. Nothing is run.
"""

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
from offline_bench.checkpoints import MODELS, hf_config

from jaxpaged.config import EngineConfig
from jaxpaged.engine.build import facts_of, read_model
from jaxpaged.entrypoints.argument_parser import Parser
from jaxpaged.entrypoints.cli.flags import engine_options
from jaxpaged.entrypoints.option_flags import add_engine_flags
from jaxpaged.messages import ProgramKey
from jaxpaged.models.config import DecoderConfig
from jaxpaged.models.interface import Model
from jaxpaged.models.registry import model_for
from jaxpaged.tools.counting.estimate import Rates, counts_of
from jaxpaged.tools.counting.minimum import Minimum, minimum_of
from jaxpaged.tools.counting.program_text import ProgramText, chosen
from jaxpaged.tools.planning.planner import Planner
from jaxpaged.tools.planning.step_time import context_bytes, floor_seconds, rates_of, step_seconds
from jaxpaged.tools.planning.targets import Target, parse_target
from jaxpaged.worker.programs.compiler_options import LAYERS
from jaxpaged.worker.programs.declare import PROGRAMS, SAMPLE_KINDS
from pallas_kernels.gpu_reports import Reports
from pallas_kernels.tpu_reports import dump_options, schedules_of
from pallas_kernels.tpu_targets import vmem_of_kernels

HAVE_LAYERS = {str(program.kind) for program in PROGRAMS if program.options == LAYERS}
DRAW = {*map(str, SAMPLE_KINDS), *(kind for kind in HAVE_LAYERS if kind.startswith("decode"))}


@dataclass
class Counted:
    """A program at one depth. counts: by name; see `counts_of`. text: as the compiler has it. operations: see
    `dearest`. kernels: of ours, what their compiler says of them."""

    counts: dict[str, float]
    text: str
    operations: list[tuple[str, str, float, int]] = field(default_factory=list)
    kernels: list[dict[str, Any]] = field(default_factory=list)


def planner_of(model: Model, decoder: DecoderConfig, target: Target, num_layers: int, **options: Any) -> Planner:
    """The engine of the first layers of a model, on all devices of a target unless `options` say otherwise."""
    decoder = replace(decoder, num_layers=num_layers, layers=decoder.layers[:num_layers])
    given = {"tensor_parallel_size": target.num_devices, "model": "model", **options}
    return Planner(
        EngineConfig.from_options(**given).resolve(facts_of(decoder), target.platform), model, decoder, target
    )


def depths_of(decoder: DecoderConfig) -> tuple[int, int]:
    """Two numbers of layers: all further ones repeat what the second has more than the first."""
    layers = decoder.layers
    least = max(1, min(2, len(layers) - 1))
    found = [(len(layers), len(layers))]
    for period in range(1, len(layers) - least + 1):
        for few in range(least, len(layers) - period + 1):
            repeats = all(layers[i] == layers[i + period] for i in range(few, len(layers) - period))
            if repeats and (len(layers) - few) % period == 0:
                found.append((few, few + period))
    return min(found, key=lambda depths: depths[1])


class Counting:
    """Counts the programs of a model on a target. `folder`: for what the compilers write down."""

    def __init__(self, model: Model, decoder: DecoderConfig, target: Target, folder: Path, **options: Any):
        self.model, self.decoder, self.target = model, decoder, target
        self.schedules = schedules_in(folder)
        self.options = options
        self.whole = planner_of(model, decoder, target, len(decoder.layers), **options)
        self.rates = rates_of(target.device)
        self.reports = Reports(folder / "reports") if target.platform == "gpu" else None
        self.planners: dict[int, Planner] = {}

    def planner(self, num_layers: int) -> Planner:
        """Of so many layers, with the arrays of the KV cache as long as those of the whole model."""
        if num_layers not in self.planners:
            blocks = max(self.whole.num_blocks, self.whole.blocks_per_request + 1)
            options = {"num_gpu_blocks_override": blocks, **self.options}
            self.planners[num_layers] = planner_of(self.model, self.decoder, self.target, num_layers, **options)
        return self.planners[num_layers]

    def count(self, key: ProgramKey, num_layers: int) -> Counted:
        """Compile a program at a depth, and count it."""
        planner = self.planner(num_layers)
        with jax.sharding.use_abstract_mesh(planner.engine_spec.mesh.abstract_mesh):
            lowered = planner.compiler.builders[key]()
            compiled = lowered.compile(self.reports.options if self.reports else None)
        as_text = compiled.as_text()
        vocabulary = -(-self.decoder.vocab_size // self.whole.engine_spec.num_shards)
        text = ProgramText(as_text, planner.compiler.kv_tensor_bytes(-1), vocabulary)
        counted = Counted(counts_of(text, self.rates), as_text, list(dearest(text, self.rates)))
        if self.reports:
            counted.counts |= {f"{name} (seen)": value for name, value in asdict(self.reports.launches()).items()}
            counted.kernels = [each for each in self.reports.kernels() if each["kernel"] in text.kernels]
            self.reports.clear()
        else:
            vmem = vmem_of_kernels(compiled)
            counted.kernels = [
                asdict(each) | {"vmem": vmem.get(each.kernel, 0)} for each in schedules_of(self.schedules, text.kernels)
            ]
        return counted

    def minimum(self, key: ProgramKey, context: int) -> Minimum:
        """Of the program of the whole model, or of its last stage. Each token is a row with so long a context."""
        (work,) = self.whole.works()[-1:]
        seen = context_bytes(work, key.size * work.num_ranks, context)
        layers, draws = key.kind in HAVE_LAYERS, key.kind in DRAW
        itemsize = self.whole.engine_spec.dtype.itemsize
        return minimum_of(work, self.whole.engine_spec.decoder, itemsize, key.size, seen, layers=layers, draws=draws)

    def program(self, key: ProgramKey, depths: tuple[int, int]) -> tuple[Counted, dict[str, float], dict[str, float]]:
        """(the program at the second depth, what a layer adds, what all layers make of it)."""
        few, more = depths
        if key.kind not in HAVE_LAYERS or few == more:
            counted = self.count(key, more)
            return counted, {}, counted.counts
        first, second = self.count(key, few), self.count(key, more)
        names = first.counts.keys() | second.counts.keys()
        of = lambda counted, name: counted.counts.get(name, 0)
        layer = {name: (of(second, name) - of(first, name)) / (more - few) for name in names}
        num_layers = len(self.decoder.layers)
        return second, layer, {name: of(second, name) + (num_layers - more) * layer[name] for name in names}


def schedules_in(folder: Path) -> Path:
    """Where a TPU's compiler leaves the schedules of kernels."""
    (folder / "schedules").mkdir(exist_ok=True)
    return folder / "schedules"


def dearest(text: ProgramText, rates: Rates) -> Iterator[tuple[str, str, float, int]]:
    """(what an operation is, its part, microseconds of all of its kind, how many these are), the dearest first."""
    seconds: Counter[tuple[str, str]] = Counter()
    number: Counter[tuple[str, str]] = Counter()
    for operation, times in chosen(text.region, rates.seconds):
        kind = (operation.kernel or operation.name.split(".")[0], operation.part)
        seconds[kind] += times * rates.seconds(operation)
        number[kind] += times
    yield from ((*kind, 1e6 * value, number[kind]) for kind, value in seconds.most_common())


# ---- what is printed -----------------------------------------------------------------------------


def program_lines(
    key: ProgramKey, counted: Counted, layer: dict[str, float], whole: dict[str, float], least: Minimum, top: int
) -> Iterator[str]:
    yield f"\n{key.kind}:{key.size}"
    yield f"  {'':34} {'a layer':>14} {'program':>14}"
    for name in sorted(whole, key=lambda name: (name.startswith(("bytes of", "cycles of")), name)):
        yield f"  {name:34} {layer.get(name, 0):14,.1f} {whole[name]:14,.1f}"
    yield f"  {'MB by purpose':34} {'least':>14} {'program':>14}"
    for purpose, size in asdict(least).items():
        moved = whole.get(f"{purpose}, bytes")
        if size or moved:
            beside = f"{moved / 1e6:14,.2f}  {moved / size if size else 0:.2f} of it" if moved is not None else ""
            yield f"  {purpose.replace('_', ' '):34} {size / 1e6:14,.2f} {beside}"
    yield "  dearest at the depth that was compiled, microseconds (estimated):"
    for name, part, microseconds, times in counted.operations[:top]:
        yield f"    {name:44} {times:4} x  {microseconds:9.1f}  {part}"
    for kernel in counted.kernels:
        yield "  kernel " + "  ".join(f"{name} {value}" for name, value in kernel.items() if value is not None)


def step_lines(
    counting: Counting, wholes: dict[ProgramKey, dict[str, float]], rows: int, context: int
) -> Iterator[str]:
    """A decode step of so many rows, if the programs of one are among those that were counted."""
    (work,) = counting.whole.works()[-1:]
    sized = lambda kind: [whole for key, whole in wholes.items() if key.kind == kind]
    ways = [sized("decode")[:1], [*sized("forward")[:1], *sized("sample")[:1]]]
    for name, programs in zip(("decode", "forward and sample"), ways, strict=True):
        if len(programs) < len(name.split(" and ")):
            continue
        seconds = [1e-6 * whole["microseconds"] for whole in programs]
        step = step_seconds(seconds, work, counting.rates, rows, context)
        floor = floor_seconds(work, counting.rates, rows, context)
        yield (
            f"\na step of {name}, {rows} rows with contexts of {context}: {1e3 * step:.2f} ms estimated, of which"
            f" programs {1e3 * sum(seconds):.2f}; floor {1e3 * floor:.2f} ms; {step / floor:.2f} of it"
        )


def model_of(name: str) -> tuple[Model, DecoderConfig]:
    if name not in MODELS:
        return read_model(Path(name))
    hf = hf_config(MODELS[name])
    model = model_for(hf)
    return model, model.config_from_hf(hf)


def parsed() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("model_argument", metavar="MODEL", help=f"a folder, or of {', '.join(MODELS)}")
    parser.add_argument("--target", required=True)
    parser.add_argument("--programs", default="decode:64,sample:64", help="KIND:SIZE,... (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=64, help="of the step that is estimated")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each row")
    parser.add_argument("--layers", type=int, nargs=2, metavar=("FEW", "MORE"), help="that are compiled")
    parser.add_argument("--top", type=int, default=12, help="operations to print")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="keep the texts of the programs there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts there too")
    add_engine_flags(parser)
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    options = {name: value for name, value in engine_options(arguments).items() if name != "model"}
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # programs for absent devices cannot be read back
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        # A TPU's compiler reads where to leave schedules when it is loaded.
        os.environ["LIBTPU_INIT_ARGS"] = (
            f"{dump_options(schedules_in(folder))} {os.environ.get('LIBTPU_INIT_ARGS', '')}".strip()
        )
        target = parse_target(arguments.target)
        if not target.compiles:
            sys.exit(f"nothing compiles for {target.name} here. Install the extra aot-gpu or aot-tpu.")
        model, decoder = model_of(arguments.model_argument)
        counting = Counting(model, decoder, target, folder, **options)
        depths = tuple(arguments.layers or depths_of(decoder))
        print(
            f"{arguments.model_argument} on {target.name}: {len(decoder.layers)} layers, of which {depths} are compiled"
        )
        wholes = {}
        for word in arguments.programs.split(","):
            kind, _, size = word.partition(":")
            key = ProgramKey(kind, int(size or 0))
            if key not in counting.planner(depths[1]).compiler.builders:
                sys.exit(f"this engine has no program {word}.")
            counted, layer, wholes[key] = counting.program(key, depths)
            least = counting.minimum(key, arguments.context)
            print("\n".join(program_lines(key, counted, layer, wholes[key], least, arguments.top)), flush=True)
            if arguments.save:
                arguments.save.mkdir(parents=True, exist_ok=True)
                (arguments.save / f"{kind}_{size}.hlo").write_text(counted.text, encoding="utf-8")
        print("\n".join(step_lines(counting, wholes, arguments.rows, arguments.context)))
    if arguments.json:
        found = {f"{key.kind}:{key.size}": whole for key, whole in wholes.items()}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
