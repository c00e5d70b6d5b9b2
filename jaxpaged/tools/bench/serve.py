"""`jaxpaged bench serve`: latency and throughput of a server under a load.

This module knows flags; what is done with them is in `serve_run.py`.
"""

import argparse
from typing import Any

from jaxpaged.entrypoints.argument_parser import Parser
from jaxpaged.entrypoints.option_flags import number, whole_number
from jaxpaged.tools.bench.flags import add_run_flags, add_server_flags, check_extras

EPILOG = """\
Requests are sent when they are due, whether or not earlier ones have been answered; --max-concurrency holds them back.
Latencies count from the sending of a request. Names, definitions and results are those of vLLM's `bench serve`.
The guide is jaxpaged/guides/measuring.md.

exit status: 0 every request was answered; 1 some failed, or the server did not answer; 2 wrong usage; 130 interrupted

examples:
  jaxpaged bench serve --num-prompts 100 --input-len 128 --output-len 32
  jaxpaged bench serve --backend openai-chat --dataset-name custom --dataset-path prompts.jsonl --request-rate 4
  jaxpaged bench serve --backend grpc --port 50051 --max-concurrency 16 --goodput ttft:500 tpot:50
  jaxpaged bench serve --request-rate 8 --burstiness 0.5 --save-result --result-dir results --metadata machine=a
"""


def add_parser(commands: Any) -> None:
    parser: Parser = commands.add_parser("serve", help="latency and throughput of a server under a load", epilog=EPILOG)
    add_server_flags(parser)
    load = parser.add_argument_group("load")
    load.add_argument(
        "--request-rate",
        type=number,
        default=float("inf"),
        metavar="X",
        help="requests a second; inf sends all at once (default: inf)",
    )
    load.add_argument(
        "--max-concurrency", type=whole_number, metavar="N", help="most requests at a time; the others wait here"
    )
    load.add_argument(
        "--ramp-up-strategy",
        choices=("linear", "exponential"),
        help="raise the rate from request to request; replaces --request-rate",
    )
    load.add_argument("--ramp-up-start-rps", type=number, metavar="X", help="requests a second at the first request")
    load.add_argument("--ramp-up-end-rps", type=number, metavar="X", help="requests a second at the last request")
    load.add_argument(
        "--self-timed",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="send at the times of the file (default: on for timed_trace, off for burstgpt)",
    )
    report = add_run_flags(parser, load)
    report.add_argument(
        "--profile", action="store_true", help="have the server record what its devices do, in its --profile-dir"
    )
    report.add_argument(
        "--admin-base-url",
        metavar="URL",
        help="address of the server's admin endpoints for --profile: http://127.0.0.1:PORT with the "
        "--admin-port of `jaxpaged serve` (default: --base-url)",
    )
    report.add_argument(
        "--plot-timeline",
        action="store_true",
        help="draw when each request waited and was answered, in a file beside the result",
    )
    report.add_argument("--save-result", action="store_true", help="write the result as JSON")
    report.add_argument("--append-result", action="store_true", help="add the result to the file, as a line of JSON")
    report.add_argument("--save-detailed", action="store_true", help="write figures and text of every request, too")
    report.add_argument("--result-dir", metavar="FOLDER", help="folder for the result (default: the current folder)")
    report.add_argument(
        "--result-filename",
        metavar="NAME",
        help="name of the result's file (default: made of label, rate, model and time)",
    )
    parser.set_defaults(run=run, command_parser=parser)


def run(args: argparse.Namespace) -> int:
    """Measure and report. Returns the exit status."""
    check_extras(args.backend)
    from jaxpaged.entrypoints.cli.serve import run_loop
    from jaxpaged.tools.bench.serve_run import bench_serve

    return run_loop(bench_serve(args))
