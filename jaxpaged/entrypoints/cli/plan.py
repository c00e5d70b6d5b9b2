"""`jaxpaged plan`: memory and speed of an engine on devices that are not here.

This module knows options and how a plan is shown; the plan is made below the engine.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpaged.entrypoints.cli.flags import Parser, add_engine_flags, add_model_argument, engine_options

if TYPE_CHECKING:
    from jaxpaged.plan import Plan

EPILOG = """\
Compiles the engine's own programs for a TPU that is not here (this needs libtpu: pip install 'jaxpaged[aot-tpu]'),
and says what fits and how fast it can be at most. Of the model only config.json is read. For GPUs, and with
--no-compile, everything comes from shapes. Unless -tp is given the model is split over as many devices of one host as
can share it; the engine cannot run across hosts yet.

exit status: 0 the engine fits; 1 it does not fit or run, and the plan says what to change; 2 wrong usage

examples:
  jaxpaged plan meta-llama/Llama-3.1-8B --target v6e:2x4 --max-model-len 32K
  jaxpaged plan Qwen/Qwen3-8B --target h100 --json
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
    parser.add_argument("--target", required=True, metavar="TARGET",
                        help="a TPU topology such as v6e:2x4, or GPUs such as h100:8")  # fmt: skip
    parser.add_argument("--no-compile", action="store_true", help="estimate from shapes, in a second")
    parser.add_argument("--json", action="store_true", help="print the plan as one JSON object")
    parser.add_argument("--chart", metavar="FILE", help="draw the memory of a device as a picture (.png, .svg, .pdf)")
    parser.add_argument("--save", metavar="FOLDER",
                        help="compile all programs and keep them as a bundle for the target's --bundle")  # fmt: skip
    parser.add_argument("--debug", action="store_true", help="show tracebacks and debug messages")
    add_engine_flags(parser)
    parser.set_defaults(run=run, command_parser=parser)


def run(args: argparse.Namespace) -> int:
    """Make the plan and print it. Returns the exit status."""
    from jaxpaged.config import EngineConfig
    from jaxpaged.engine.build import plan_engine
    from jaxpaged.entrypoints.cli.terminal import ProgressLine
    from jaxpaged.entrypoints.pictures.canvas import check_picture_path
    from jaxpaged.entrypoints.pictures.plan_report import json_report, text_report

    options = options_of(args)
    if args.chart:
        check_picture_path(args.chart)
    output = Path(args.save) if args.save else None
    progress = ProgressLine()
    try:
        plan = plan_engine(
            EngineConfig.from_options(**options), args.target,
            compile=not args.no_compile, output=output, progress=progress.update,
        )  # fmt: skip
    finally:
        progress.close()
    print(json_report(plan) if args.json else text_report(plan))
    if args.chart:
        from jaxpaged.entrypoints.pictures.memory_plot import draw_memory, write_figure

        write_figure(draw_memory(plan), args.chart)
    if output is not None:
        print(saved_message(plan, output), file=sys.stderr)
    return 0 if plan.fits else 1


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
