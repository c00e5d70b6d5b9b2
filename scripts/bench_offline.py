"""jaxpaged and its peers on the same work: tokens per second, starts, memory, and the share of what the machine can do.

    python scripts/bench_offline.py --setup-peers              # once: an environment for every peer
    python scripts/bench_offline.py --out /tmp/bench           # everything that suits two CPU cores, under 35 minutes
    python scripts/bench_offline.py --quick --peers none       # jaxpaged alone, a minute or two
    python scripts/bench_offline.py --models llama-8b          # on an accelerator
    python scripts/bench_offline.py --peers none --jaxpaged= --jaxpaged="--max-num-seqs 32"     # side by side
    python scripts/bench_offline.py --peers none --jaxpaged= --jaxpaged=--without-kernels       # the extra `cpu`

Models have random weights, which the script writes to the user's cache folder. Every engine runs each round in a fresh
process, on the same cores. Engines take turns of half a second, each with a clock that stands still while it is
stopped, so that all meet the same moments of a machine that others share; they need memory side by side, else
`--at-a-time 1` has one after the other. The first round starts with an empty compilation cache, and measures a minute
of small batches before it waits for anything to be compiled. A peer that is missing, fails or hangs is reported and
stops nothing. --out gets results.json (all that was measured), report.md, chart.png (extra `plots`) and every engine's
log.

What drafts give (--speculative-config) depends on the text: scripts/bench_speculation.py measures that.
"""

import argparse
import dataclasses
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from offline_bench import chart, checkpoints, peers, plan, report, workloads
from offline_bench.processes import Outcome, run_process
from offline_bench.results import Results, rate
from offline_bench.turns import Turns

ROOT = Path(__file__).parent.parent


@dataclasses.dataclass(frozen=True)
class Settings:
    """What holds for every process of a run."""

    repeat: int
    threads: int
    scale: float
    timeout: float
    minutes: float
    at_a_time: int
    checkpoints_dir: Path
    out: Path
    caches: Path  # compilation caches, empty at the start


def measure(the_plan: plan.Plan, settings: Settings, results: Results) -> None:
    """All rounds. What was measured is written after every process, so that an interrupted run keeps it."""
    end = time.monotonic() + 60 * settings.minutes
    for round_index in range(settings.repeat):
        measure_roofline(settings, results, round_index)
        for model in the_plan.workloads:
            # Engines go backwards in every other round.
            engines = [
                (engine, names)
                for engine in the_plan.engines[:: -1 if round_index % 2 else 1]
                if (names := the_plan.names(engine, model, round_index))
            ]
            for begin in range(0, len(engines), settings.at_a_time):
                group = engines[begin : begin + settings.at_a_time]
                if time.monotonic() > end:
                    what = f"round {round_index + 1}, {model}, {', '.join(engine.name for engine, _ in group)}"
                    results.left_out.append(f"{what}: more than --minutes {settings.minutes:g} had passed.")
                    continue
                measure_group(group, model, round_index, settings, results)


def measure_group(
    group: list[tuple[plan.EngineSetting, tuple[str, ...]]],
    model: str,
    round_index: int,
    settings: Settings,
    results: Results,
) -> None:
    """Engines that take turns, each with its workloads."""
    turns = Turns()
    group = [(with_checkpoint(engine, settings.checkpoints_dir / model), names) for engine, names in group]
    settings = dataclasses.replace(settings, timeout=len(group) * settings.timeout)  # of everybody's seconds
    with ThreadPoolExecutor(len(group)) as threads:
        under_way = {
            threads.submit(run_engine, engine, model, names, round_index, settings, turns): engine.name
            for engine, names in group
        }
        try:
            for future in as_completed(under_way):
                outcome, name = future.result(), under_way[future]
                run = {"model": model, "engine": name, "round": round_index}
                results.runs.append(run | dataclasses.asdict(outcome))
                results.write(settings.out / "results.json")
                say(f"round {round_index + 1}, {model}, {name}: {in_short(results, outcome, model)}")
        except BaseException:
            turns.end_all()
            raise


def measure_roofline(settings: Settings, results: Results, round_index: int) -> None:
    command = [sys.executable, str(plan.ENGINES / "run_roofline.py")]
    log = settings.out / "logs" / f"roofline-{round_index + 1}.log"
    outcome = run_process(command, {"threads": settings.threads}, log, settings.timeout, {}, Turns())
    results.roofline += [event for event in outcome.events if event["event"] == "roofline"]
    if outcome.error:
        say(f"the machine's limits could not be measured: {outcome.error}")


def run_engine(
    engine: plan.EngineSetting, model: str, names: tuple[str, ...], round_index: int, settings: Settings, turns: Turns
) -> Outcome:
    if engine.missing:
        return Outcome([], engine.missing)
    shape = checkpoints.MODELS[model]
    folder = settings.checkpoints_dir / model
    requests = {
        name: workloads.make_requests(workloads.WORKLOADS[name], shape.vocab_size, round_index, settings.scale)
        for name in names
    }
    safe_name = "".join(letter if letter.isalnum() else "-" for letter in engine.name)
    job = {
        "model": str(folder),
        "threads": settings.threads,
        "flags": list(engine.flags),
        "gguf": engine.gguf,
        "max_model_len": max_model_len(shape, list(requests.values())),
        "compile_cache": str(settings.caches / model / safe_name),
        "warm_up": [dataclasses.asdict(request) for request in workloads.warm_up_requests(shape.vocab_size)],
        "workloads": [
            {
                "name": name,
                "requests": [dataclasses.asdict(request) for request in requests[name]],
                "shared_prefix": round(settings.scale * workloads.WORKLOADS[name].shared_prefix),
            }
            for name in names
        ],
    }
    if round_index == 0:  # when the compilation cache is empty
        job["first_minute"] = workloads.first_minute(shape.vocab_size, settings.scale)
    log = settings.out / "logs" / f"{model}-{safe_name}-{round_index + 1}.log"
    variables = {"PYTHONPATH": str(ROOT)} | dict(engine.variables)
    return run_process(list(engine.command), job, log, settings.timeout, variables, turns)


def max_model_len(shape: checkpoints.ModelShape, batches: list[list[workloads.Request]]) -> int:
    """Room for the longest request, in whole thousands (of 1,024), for every engine the same."""
    longest = max(map(workloads.longest, batches))
    return min(shape.max_position_embeddings, 1024 * (longest // 1024 + 1))


def with_checkpoint(engine: plan.EngineSetting, folder: Path) -> plan.EngineSetting:
    """The engine, once the checkpoint is there as llama.cpp reads it, if it needs that; missing if it cannot be."""
    if engine.missing or not engine.gguf or (folder / f"model-{engine.gguf}.gguf").exists():
        return engine
    command = [engine.command[0], str(plan.ENGINES / "write_gguf.py"), str(folder), engine.gguf]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode == 0:
        return engine
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    return dataclasses.replace(engine, missing=f"the checkpoint could not be written as GGUF: {last}")


def in_short(results: Results, outcome: Outcome, model: str) -> str:
    """One line on a process that has ended."""
    found = [
        f"{event['workload']} {rate(results.models[model][event['workload']], event):,.1f}"
        for event in outcome.events
        if event["event"] == "run"
    ]
    last = f"{outcome.events[-1]['seconds']:.0f} s in all" if outcome.events else ""
    return "; ".join(filter(None, [", ".join(found), last, outcome.error]))


def say(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, file=sys.stderr, flush=True)


# ---- the run as a whole ----------------------------------------------------------------------------


def new_results(the_plan: plan.Plan, settings: Settings) -> Results:
    models = {
        model: {name: sizes_of(name, model, settings.scale) for name in names}
        for model, names in the_plan.workloads.items()
    }
    engines = [engine.name for engine in the_plan.engines]
    return Results(machine(settings), shlex.join(["python", *sys.argv]), engines, models, list(the_plan.left_out))


def sizes_of(workload_name: str, model: str, scale: float) -> dict:
    """What the report must know of a workload."""
    workload = workloads.WORKLOADS[workload_name]
    requests = workloads.make_requests(workload, checkpoints.MODELS[model].vocab_size, 0, scale)
    return {
        "title": workload.title + (f", all times {scale:g}" if scale != 1 else ""),
        "metric": workload.metric,
        "requests": len(requests),
        "tokens_in": sum(len(request.prompt_token_ids) for request in requests),
        "tokens_out": sum(request.max_tokens for request in requests),
    }


def machine(settings: Settings) -> dict:
    return {
        "processor": processor_name(),
        "cores": settings.threads,
        "load average before": round(os.getloadavg()[0], 1),
        "Python": platform.python_version(),
        "rounds": settings.repeat,
        "engines that took turns, at most": settings.at_a_time,
    }


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def write_report(results: Results, out: Path) -> None:
    text = report.markdown(results)
    (out / "report.md").write_text(text, encoding="utf-8")
    print(text)
    try:
        chart.draw(results, out / "chart.png")
    except ImportError:
        say("no chart: matplotlib is not installed. Run: pip install matplotlib")
    say(f"results.json, report.md and the logs are in {out}")


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxpaged"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", choices=checkpoints.MODELS, metavar="NAME", help=", ".join(checkpoints.MODELS))
    add("--workloads", nargs="+", choices=workloads.WORKLOADS, metavar="NAME", help=", ".join(workloads.WORKLOADS))
    add(
        "--peers",
        nargs="+",
        choices=[*peers.PEERS, "none"],
        metavar="NAME",
        default=peers.default_peers(),
        help=f"{', '.join(peers.PEERS)}, or none; by default all that suit the machine",
    )
    add(
        "--jaxpaged",
        action="append",
        metavar="FLAGS",
        help="engine options of jaxpaged, as --jaxpaged='--max-num-seqs 32'; repeat it for settings side by side; "
        "the first is what everything is compared with",
    )
    add("--repeat", type=int, help="rounds; 2 by default, 1 with --quick")
    add("--threads", type=int, default=cores, help=f"cores for every engine; {cores} by default")
    add("--scale", type=float, help="shrinks tokens and requests of all workloads: above 0, at most 1")
    add("--at-a-time", type=int, default=8, metavar="N", help="most engines that take turns; 8 by default")
    add(
        "--timeout",
        type=float,
        default=900,
        help="most seconds for one process, times those that take turns; 900 by default",
    )
    add("--minutes", type=float, default=30, help="no process is started after this many; 30 by default")
    add("--out", type=Path, metavar="FOLDER", help="default: a new folder in the system's temporary one")
    add("--quick", action="store_true", help="llama-110m, one round, workloads at a quarter")
    add("--list", action="store_true", help="say what would run, and stop")
    add("--setup-peers", nargs="*", choices=peers.PEERS, metavar="NAME", help="make environments, and stop")
    add("--peers-dir", type=Path, default=cache / "peers", help="environments of peers")
    add("--checkpoints-dir", type=Path, default=cache / "checkpoints", help="random-weight models")
    add("--report", type=Path, metavar="RESULTS.JSON", help="make the report of an earlier run again, and stop")
    args = parser.parse_args(words)
    if args.scale is not None and not 0 < args.scale <= 1:
        parser.error(f"--scale is {args.scale}; it must be above 0 and at most 1.")
    if args.repeat is not None and args.repeat < 1:
        parser.error(f"--repeat is {args.repeat}; it must be at least 1.")
    if args.at_a_time < 1:
        parser.error(f"--at-a-time is {args.at_a_time}; it must be at least 1.")
    if not 1 <= args.threads <= cores:
        parser.error(f"--threads is {args.threads}; it must be from 1 to {cores}, the cores of this machine.")
    return args


def plan_of(args: argparse.Namespace) -> plan.Plan:
    models = args.models or (["llama-110m"] if args.quick else list(plan.DEFAULT_MODELS))
    names = [] if "none" in args.peers else args.peers
    return plan.make_plan(models, args.workloads, names, args.jaxpaged or [""], args.peers_dir)


def settings_of(args: argparse.Namespace, caches: Path) -> Settings:
    out = args.out or Path(tempfile.mkdtemp(prefix="bench-offline-"))
    out.mkdir(parents=True, exist_ok=True)
    return Settings(
        repeat=args.repeat or (1 if args.quick else 2),
        threads=args.threads,
        scale=args.scale or (plan.QUICK_SCALE if args.quick else 1.0),
        timeout=args.timeout,
        minutes=args.minutes,
        at_a_time=args.at_a_time,
        checkpoints_dir=args.checkpoints_dir,
        out=out,
        caches=caches,
    )


def main(words: list[str] | None = None) -> int:
    args = parse_arguments(words)
    if args.setup_peers is not None:
        return 1 if peers.set_up(args.setup_peers or peers.default_peers(), args.peers_dir) else 0
    if args.report:
        write_report(Results.read(args.report), args.report.parent)
        return 0
    the_plan = plan_of(args)
    print(plan.describe(the_plan), file=sys.stderr)
    if args.list:
        return 0
    with tempfile.TemporaryDirectory() as caches:
        settings = settings_of(args, Path(caches))
        for model in the_plan.workloads:
            checkpoints.make_checkpoint(checkpoints.MODELS[model], settings.checkpoints_dir)
        results = new_results(the_plan, settings)
        try:
            measure(the_plan, settings, results)
        except KeyboardInterrupt:
            say("interrupted: the report has what was measured so far")
        write_report(results, settings.out)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as after Ctrl-C: no engine is left running
    sys.exit(main())
