"""`jaxpaged plan`: memory and speed of an engine on devices that are not here.

This module knows options and how a plan is shown; the plan is made below the engine.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpaged.entrypoints.argument_parser import Parser
from jaxpaged.entrypoints.cli.flags import add_model_argument, engine_options
from jaxpaged.entrypoints.option_flags import add_engine_flags, whole_number

if TYPE_CHECKING:
    from jaxpaged.tools.kv_trace import TracedRequest
    from jaxpaged.tools.pictures.kv_trace_report import TraceResult
    from jaxpaged.tools.planning.plan import Plan

SIZES = [1 << power for power in (30, 32, 34, 36, 38, 40)]
BANDWIDTH = 10 * 2**30

EPILOG = """\
The plan says what fits, and how fast the engine can be: as compiled programs let one expect, and at most. Programs for
a TPU are compiled here (extra aot-tpu), and so are those for an A100, H100, H200 or B200 (extra aot-gpu). For other
GPUs, and with --no-compile, shapes alone are used. Of the model only config.json is read.

Without -tp, the model is split over as many devices of one host as can share it. With -tp, it may be split over some
devices of one host, or over all devices of several.

exit status: 0 the engine fits; 1 it does not fit or run, and the plan says what to change; 2 wrong usage

examples:
  jaxpaged plan meta-llama/Llama-3.1-8B --target v6e-8 --max-model-len 32K
  jaxpaged plan meta-llama/Llama-3.1-70B --target v6e:2x4 -tp 4 -pp 2 --max-model-len 8K
  jaxpaged plan Qwen/Qwen3-8B --target h100 --json
  jaxpaged plan Qwen/Qwen3-8B --target h100 --kv-trace mooncake.jsonl --kv-sizes 64G,512G --kv-chart tiers.png
  jaxpaged plan ./model --target v5e:2x2 --save ./bundle && scp -r ./bundle tpu-host:
"""


def add_parser(commands: Any) -> None:
    parser: Parser = commands.add_parser(
        "plan",
        help="memory and speed on a TPU or GPU that is not here",
        usage="%(prog)s [MODEL] --target TARGET [options]",
        epilog=EPILOG,
    )
    add_model_argument(parser)
    parser.add_argument(
        "--target", required=True, metavar="TARGET", help="a TPU slice such as v6e-8 or v6e:2x4, or GPUs such as h100:8"
    )
    parser.add_argument("--no-compile", action="store_true", help="estimate from shapes, in a second")
    parser.add_argument("--json", action="store_true", help="print the plan as one JSON object")
    parser.add_argument("--chart", metavar="FILE", help="draw the memory of a device as a picture (.png, .svg, .pdf)")
    parser.add_argument(
        "--save", metavar="FOLDER", help="compile all programs and keep them as a bundle for the target's --bundle"
    )
    parser.add_argument(
        "--kv-trace", metavar="FILE", type=Path, help="simulate tiers of kv_offload under a trace in Mooncake's format"
    )
    parser.add_argument(
        "--kv-sizes",
        metavar="BYTES,...",
        type=sizes,
        default=argparse.SUPPRESS,
        help="with --kv-trace: sizes of the tier (default: 1G,4G,16G,64G,256G,1024G)",
    )
    parser.add_argument(
        "--kv-bandwidth",
        metavar="BYTES",
        type=whole_number,
        default=argparse.SUPPRESS,
        help="with --kv-trace: bytes a second that a load brings (default: 10G)",
    )
    parser.add_argument(
        "--kv-chart",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="with --kv-trace: draw hit rate and saved time by size (.png, .svg, .pdf)",
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks and debug messages")
    add_engine_flags(parser)
    parser.set_defaults(run=run, command_parser=parser)


def run(args: argparse.Namespace) -> int:
    """Make the plan and print it. Returns the exit status."""
    from jaxpaged.config import EngineConfig
    from jaxpaged.entrypoints.terminal import ProgressLine
    from jaxpaged.tools.pictures.canvas import check_picture_path
    from jaxpaged.tools.pictures.plan_report import json_report, text_report
    from jaxpaged.tools.planning.plan_engine import plan_engine

    options = options_of(args)
    requests = trace_of(args)
    if args.chart:
        check_picture_path(args.chart)
    output = Path(args.save) if args.save else None
    progress = ProgressLine()
    try:
        plan = plan_engine(
            EngineConfig.from_options(**options),
            args.target,
            compile=not args.no_compile,
            output=output,
            progress=progress.update,
            choose_split="tensor_parallel_size" not in options,
        )
    finally:
        progress.close()
    result = trace_result(args, plan, requests) if requests else None
    print(json_report(plan, {"kv_trace": result.as_json()} if result else {}) if args.json else text_report(plan))
    if result is not None and not args.json:
        print(f"\n{result.text()}")
    if result is not None and hasattr(args, "kv_chart"):
        from jaxpaged.tools.pictures.canvas import write_figure

        write_figure(result.figure(), args.kv_chart)
    if args.chart:
        from jaxpaged.tools.pictures.canvas import write_figure
        from jaxpaged.tools.pictures.plan_report import draw_memory

        write_figure(draw_memory(plan), args.chart)
    if output is not None:
        print(saved_message(plan, output), file=sys.stderr)
    return 0 if plan.fits else 1


def trace_of(args: argparse.Namespace) -> "list[TracedRequest]":
    """The requests of --kv-trace, none without it. Raises UsageError before anything is compiled."""
    from jaxpaged.errors import UsageError

    for flag in ("kv_sizes", "kv_bandwidth", "kv_chart"):
        if hasattr(args, flag) and args.kv_trace is None:
            raise UsageError(f"--{flag.replace('_', '-')} says how --kv-trace is simulated, and there is none. Add it.")
    if args.kv_trace is None:
        return []
    from jaxpaged.tools.kv_trace import TracedRequest, read_trace
    from jaxpaged.tools.pictures.canvas import check_picture_path

    if hasattr(args, "kv_chart"):
        check_picture_path(args.kv_chart)
    if getattr(args, "kv_bandwidth", 1) <= 0:
        raise UsageError(f"--kv-bandwidth is {args.kv_bandwidth}; it must be above 0.")
    return read_trace(args.kv_trace, TracedRequest)


def trace_result(args: argparse.Namespace, plan: "Plan", requests: "list[TracedRequest]") -> "TraceResult | None":
    """The simulation; None for a plan that does not fit, which says so itself."""
    from jaxpaged.tools.pictures.kv_trace_report import TraceResult

    if not plan.fits:
        return None
    bandwidth = getattr(args, "kv_bandwidth", BANDWIDTH)
    return TraceResult(plan, requests, getattr(args, "kv_sizes", SIZES), bandwidth)


def sizes(text: str) -> list[int]:
    """`1G,16G`"""
    found = [whole_number(part) for part in text.split(",")]
    if min(found) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} has a size that is not above 0.")
    return found


def saved_message(plan: "Plan", output: Path) -> str:
    if not plan.fits:
        return "nothing was saved, since it does not fit or run"
    split = f" --tensor-parallel-size {plan.tensor_parallel_size}" if plan.tensor_parallel_size > 1 else ""
    return f"the programs are in {output}; on the target, with the same versions and options: --bundle {output}{split}"


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's options. Raises UsageError for what excludes each other."""
    from jaxpaged.errors import UsageError

    options = engine_options(args)
    if args.save and args.no_compile:
        raise UsageError("--save needs compiled programs, and --no-compile makes none. Leave one out.")
    if options.get("bundle") is not None:
        raise UsageError(f"--bundle {options['bundle']} belongs to an engine that runs. Leave it out of a plan.")
    return options
