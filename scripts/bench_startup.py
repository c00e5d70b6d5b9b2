"""Where the time to the first token goes: imports, config, tokenizer, weights, programs, first step.

    python scripts/bench_startup.py [--model demo] [--output FOLDER] [--option max_num_seqs=8 ...]

Three starts, each in a process of its own: with an empty compilation cache, with the one that this filled, and from a
bundle, which is made first. Prints a waterfall of each and what they take against each other; `--output` keeps that as
startup.json, and as startup.png where matplotlib is installed (extra `plots`).

Seconds are wall clock since the process was started. Programs are prepared by threads beside the other stages; a
program's line has its tracing and lowering, then its compiling, or, if it was compiled before, its loading. The files
of Python and of the model may be in the system's cache in all three: the disk is not measured.
"""

import argparse
import dataclasses
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MAIN = "main"
STARTS = ("cold cache", "warm cache", "bundle")
COLORS = {
    "python": "#7f7f7f",
    "import": "#9467bd",
    "config": "#8c564b",
    "tokenizer": "#e377c2",
    "weights": "#1f77b4",
    "wait": "#dddddd",
    "first step": "#2ca02c",
    "lower": "#ff7f0e",
    "compile": "#d62728",
    "load": "#bcbd22",
}


@dataclasses.dataclass
class Span:
    """A stage, or a part of a program's preparation, in seconds since the process was started."""

    lane: str  # the main thread, or a program such as "forward 64"
    stage: str
    begin: float
    end: float


# ---- one start, in a process of its own ------------------------------------------------------------


class Recorder:
    """Collects spans. `origin` is when the process was started, in seconds since the epoch."""

    def __init__(self, origin: float):
        self.origin = origin
        self.spans: list[Span] = []

    def now(self) -> float:
        return time.time() - self.origin

    @contextmanager
    def span(self, stage: str, lane: str = MAIN) -> Iterator[None]:
        begin = self.now()
        yield
        self.spans.append(Span(lane, stage, begin, self.now()))


def measure_start(origin: float, model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Start an engine as the command line does, up to the first token of a short prompt."""
    recorder = Recorder(origin)
    recorder.spans.append(Span(MAIN, "python", 0.0, recorder.now()))
    with recorder.span("import"):
        from jaxpaged.entrypoints.cli import collect_seldom

        collect_seldom()  # as the command does
        from jaxpaged.config import EngineConfig
        from jaxpaged.engine import build
        from jaxpaged.engine.core import EngineCore
        from jaxpaged.engine.llm_engine import LLMEngine
        from jaxpaged.tools.bench.startup_child import first_token
    watch_programs(recorder)
    watch_weights(recorder)
    with recorder.span("config"):
        config = EngineConfig.from_options(model=model, **options)
        folder, functions, decoder, config = build.resolve_model(config)
    with recorder.span("tokenizer"):
        input_processor = build.build_input_processor(config, decoder, folder)
    executor = build.UniProcExecutor(config, functions, decoder, folder)
    engine = LLMEngine(config, input_processor, EngineCore(config, executor))
    with recorder.span("first step"):
        first_token(engine)
    stats = engine.executor_stats()
    return {
        "seconds": recorder.now(),
        "cpu_seconds": time.process_time(),
        "programs": stats["programs"],
        "programs_ready": stats["programs_ready"],
        "spans": [dataclasses.asdict(span) for span in sorted(recorder.spans, key=lambda span: span.begin)],
    }


def watch_programs(recorder: Recorder) -> None:
    """Record how long every program takes to lower and to compile, or to load."""
    from jaxpaged.worker import worker

    class Timed:
        """A program on its way: both of its steps are recorded."""

        def __init__(self, lane: str, builder: Callable[[], Any]):
            self.lane = lane
            with recorder.span("lower", lane):
                self.lowered = builder()

        def compile(self) -> Any:
            with recorder.span("compile", self.lane):
                return self.lowered.compile()

    def loaded(lane: str, load: Callable[[], Any]) -> Any:
        with recorder.span("load", lane):
            return load()

    def name(key: Any) -> str:
        return f"{key.kind} {key.size or ''}".strip()

    class TimedPrograms(worker.CompiledPrograms):
        def __init__(self, builders: Any, *, stored: Any, index: Any = None, **settings: Any):
            if index is not None:
                load, known = index.load, index.known(builders)
                index.load = lambda key: loaded(name(key), lambda: load(key)) if key in known else None
            builders = {key: lambda key=key, build=build: Timed(name(key), build) for key, build in builders.items()}
            stored = {key: lambda key=key, load=load: loaded(name(key), load) for key, load in stored.items()}
            super().__init__(builders, stored=stored, index=index, **settings)

        def __getitem__(self, key: Any) -> Any:
            if key not in self._done:
                with recorder.span("wait"):
                    return super().__getitem__(key)
            return super().__getitem__(key)

    worker.CompiledPrograms = TimedPrograms


def watch_weights(recorder: Recorder) -> None:
    from jaxpaged.worker import weights

    loader_of = weights.loader_of

    def timed_loader_of(*arguments: Any) -> Callable[[], Any]:
        load = loader_of(*arguments)

        def timed_load() -> Any:
            with recorder.span("weights"):
                return load()

        return timed_load

    weights.loader_of = timed_loader_of


# ---- all starts ------------------------------------------------------------------------------------


def run_child(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """`measure_start` in a fresh process."""
    from jaxpaged.tools.bench.startup import answer_of_child

    return answer_of_child([sys.executable, __file__, "--child"], {"model": model, "options": options})


def measure_all(model: str, options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        bundle, cache = f"{folder}/bundle", {"compilation_cache_dir": f"{folder}/cache"}
        print("making the bundle ...", file=sys.stderr)
        flags = [word for name, value in options.items() for word in ("--" + name.replace("_", "-"), str(value))]
        subprocess.run([sys.executable, "-m", "jaxpaged", "compile", model, "-o", bundle, *flags], check=True)
        found = {}
        for start in STARTS:
            print(f"starting with {start} ...", file=sys.stderr)
            found[start] = run_child(model, options | ({"bundle": bundle} if start == "bundle" else cache))
        return found


def waterfall(name: str, start: dict[str, Any], width: int = 60) -> str:
    """A line for every span, as text: when it began, what it took, and a bar."""
    total = start["seconds"]
    lines = [
        f"{name}: first token after {total:.2f} s ({start['cpu_seconds']:.2f} CPU seconds), "
        f"{start['programs_ready']} of {start['programs']} programs ready"
    ]
    for span in start["spans"]:
        left = int(width * span["begin"] / total)
        bar = " " * left + "#" * max(1, int(width * (span["end"] - span["begin"]) / total))
        title = span["stage"] if span["lane"] == MAIN else f"  {span['lane']}: {span['stage']}"
        lines.append(f"{title:<30} {span['begin']:7.2f} {span['end'] - span['begin']:7.2f}  |{bar:<{width}}|")
    return "\n".join(lines)


def summary(starts: dict[str, dict[str, Any]]) -> str:
    """Markdown table: seconds per stage. "wait" is part of "first step"; programs are sums over threads."""
    lines = [machine(), "", "| stage | " + " | ".join(starts) + " |", "|---" * (len(starts) + 1) + "|"]
    for stage in COLORS:
        cells = [sum(s["end"] - s["begin"] for s in start["spans"] if s["stage"] == stage) for start in starts.values()]
        lines.append(f"| {stage} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
    for title, key in (("**first token**", "seconds"), ("CPU seconds", "cpu_seconds")):
        lines.append(f"| {title} | " + " | ".join(f"{start[key]:.2f}" for start in starts.values()) + " |")
    for title, key in (("times faster", "seconds"), ("times less CPU", "cpu_seconds")):
        most = max(start[key] for start in starts.values())
        lines.append(f"| {title} | " + " | ".join(f"{most / start[key]:.1f}" for start in starts.values()) + " |")
    return "\n".join(lines)


def machine() -> str:
    load = os.getloadavg()[0]
    return f"{platform.machine()}, {os.cpu_count()} CPUs, load average {load:.1f}, Python {platform.python_version()}"


def draw(starts: dict[str, dict[str, Any]], path: Path) -> None:
    """The waterfalls below each other, on one time axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lanes = {name: list(dict.fromkeys(span["lane"] for span in start["spans"])) for name, start in starts.items()}
    ratios = [len(names) + 2 for names in lanes.values()]
    figure, axes = pyplot.subplots(
        len(starts), 1, sharex=True, figsize=(10, 0.22 * sum(ratios) + 1), height_ratios=ratios, layout="constrained"
    )
    for axis, (name, start) in zip(axes, starts.items(), strict=True):
        for span in start["spans"]:
            axis.barh(
                lanes[name].index(span["lane"]),
                span["end"] - span["begin"],
                left=span["begin"],
                color=COLORS[span["stage"]],
                height=0.8,
            )
        axis.axvline(start["seconds"], color="black", linewidth=0.8)
        axis.set_yticks(range(len(lanes[name])), lanes[name], fontsize=7)
        axis.invert_yaxis()
        axis.set_title(f"{name}: first token after {start['seconds']:.2f} s", loc="left", fontsize=9)
    axes[-1].set_xlabel("seconds since the process was started")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    figure.legend(handles, list(COLORS), loc="outside right upper", fontsize=7)
    figure.savefig(path, dpi=120)


def write_results(starts: dict[str, dict[str, Any]], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "startup.json").write_text(json.dumps(starts, indent=1) + "\n", encoding="utf-8")
    try:
        draw(starts, folder / "startup.png")
    except ImportError:
        print("no picture: matplotlib is not installed. Run: pip install matplotlib", file=sys.stderr)


def parsed_option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not name=value.")
    return name, int(value) if value.isdigit() else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write startup.json and startup.png there")
    parser.add_argument(
        "--option",
        type=parsed_option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an engine option, such as max_num_seqs=8; may be repeated",
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure_start(**json.load(sys.stdin))), flush=True)
        os._exit(0)  # as the command does: programs that nobody waits for are still being compiled
    starts = measure_all(args.model, dict(args.option))
    for name, start in starts.items():
        print(waterfall(name, start), end="\n\n")
    print(summary(starts))
    if args.output:
        write_results(starts, args.output)


if __name__ == "__main__":
    main()
