"""`jaxpaged bench sweep`: `bench serve` at several loads, a table of all, and a picture of latency against load.

This module knows flags; what is done with them is in `sweep_run.py`.
"""

import argparse
from typing import Any

from jaxpaged.entrypoints.argument_parser import Parser
from jaxpaged.entrypoints.option_flags import comma_separated, number, whole_number
from jaxpaged.tools.bench.flags import add_run_flags, add_server_flags, check_extras

EPILOG = """\
Without --request-rates and --max-concurrencies the loads are found: one request at a time, all at once, and
--workload-iters in all, evenly between them. Every run has a cache salt of its own, so that the server's prefix cache
keeps nothing from one load to the next. Written are a JSON file a run, summary.csv, and sweep.png (extra plots).

exit status: 0 every request was answered; 1 some failed, or the server did not answer; 2 wrong usage; 130 interrupted

examples:
  jaxpaged bench sweep --num-prompts 100 --input-len 128 --output-len 32 --max-concurrencies 1,4,16,64
  jaxpaged bench sweep --backend openai-chat --request-rates 1,2,4,8,inf --num-runs 3 --goodput ttft:500
  jaxpaged bench sweep --workload-var request_rate --workload-iters 8
"""


def add_parser(commands: Any) -> None:
    parser: Parser = commands.add_parser("sweep", help="latency against load: serve at several loads", epilog=EPILOG)
    add_server_flags(parser)
    load = parser.add_argument_group("loads")
    given = load.add_mutually_exclusive_group()
    given.add_argument(
        "--request-rates",
        type=comma_separated(number, tuple),
        metavar="A,B,...",
        help="requests a second of every run; inf: all at once",
    )
    given.add_argument(
        "--max-concurrencies",
        type=comma_separated(whole_number, tuple),
        metavar="A,B,...",
        help="requests under way at most, of every run",
    )
    load.add_argument(
        "--workload-var",
        choices=("request_rate", "max_concurrency"),
        default="max_concurrency",
        help="what is varied when loads are found (default: max_concurrency)",
    )
    load.add_argument(
        "--workload-iters", type=whole_number, default=6, metavar="N", help="loads that are found (default: 6)"
    )
    load.add_argument("--num-runs", type=whole_number, default=1, metavar="N", help="runs at every load (default: 1)")
    load.add_argument("--no-cache-salt", action="store_true", help="send no cache_salt, for servers that refuse it")
    report = add_run_flags(parser, load)
    report.add_argument("-o", "--output-dir", default="results", metavar="FOLDER", help="default: results")
    report.add_argument(
        "--experiment-name", metavar="NAME", help="the new folder in it that holds everything (default: the time)"
    )
    parser.set_defaults(run=run, command_parser=parser)


def run(args: argparse.Namespace) -> int:
    """Measure and report. Returns the exit status."""
    check_extras(args.backend)
    from jaxpaged.entrypoints.cli.serve import run_loop
    from jaxpaged.tools.bench.sweep_run import bench_sweep

    return run_loop(bench_sweep(args))
