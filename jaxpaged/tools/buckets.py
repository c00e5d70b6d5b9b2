"""`jaxpaged buckets fit`: token buckets that fit what an engine really computed.

It works on a step log; no engine runs.
"""

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jaxpaged.entrypoints.argument_parser import Parser
from jaxpaged.entrypoints.option_flags import whole_number
from jaxpaged.errors import UsageError

EPILOG = """\
A step is padded to the next of the token buckets, each of which is a compiled program. This finds the set of N sizes
with the least padding for the steps of a log: no other set of N sizes, multiples of --multiple-of, pads them less.

examples:
  jaxpaged generate --file prompts.txt --step-log steps.jsonl
  jaxpaged buckets fit --log steps.jsonl --programs 6
"""


def add_parser(commands: Any) -> None:
    group: Parser = commands.add_parser("buckets", help="padded step sizes: find those that fit your traffic")
    actions = group.add_commands(dest="action", metavar="ACTION")
    parser: Parser = actions.add_parser("fit", help="the sizes with the least padding for a step log", epilog=EPILOG)
    parser.add_argument("--log", required=True, metavar="FILE", help="a step log of jaxpaged generate --step-log")
    parser.add_argument("--programs", required=True, type=whole_number, metavar="N", help="how many sizes at most")
    parser.add_argument(
        "--largest",
        type=whole_number,
        metavar="N",
        help="the largest size, as max_num_batched_tokens (default: that of the log)",
    )
    parser.add_argument(
        "--multiple-of",
        type=whole_number,
        metavar="N",
        help="sizes are multiples of this: matrix units work in tiles (default: 8, or what the log's own sizes "
        "share with it)",
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks and debug messages")
    parser.set_defaults(run=run, command_parser=parser)


def run(args: argparse.Namespace) -> int:
    """Print today's padding, the proposal and its padding. Returns the exit status."""
    from jaxpaged.engine.observability.step_times import padding, step_sizes
    from jaxpaged.tools.bucket_fit import fit_buckets, padding_of
    from jaxpaged.tools.pictures.step_log_file import read_step_log

    records, today = read_step_log(args.log)
    steps = Counter(size for record in records for size in step_sizes(record))
    if not steps:
        raise UsageError(f"{args.log} has no steps. Make a log of the traffic that the buckets are to fit.")
    largest = args.largest or max([*today, *steps])
    if args.multiple_of is None:  # an engine on a CPU has programs of 1, 2 and 4 tokens, and no tiles to fill
        args.multiple_of = math.gcd(8, *today)
    check(args, largest, max(steps))
    proposed = fit_buckets(steps, args.programs, largest, args.multiple_of)
    wasted = sum(map(padding, records))
    num_tokens = sum(record.num_tokens for record in records)
    print(f"{steps.total()} steps of {min(steps)} to {max(steps)} tokens, {num_tokens} tokens in all")
    print(f"as it ran  {waste(wasted, num_tokens)}, also while programs were still being compiled")
    if today and max(today) >= max(steps):
        print(f"today      {waste(padding_of(steps, sorted(today)), num_tokens)}, with {option(sorted(today))}")
    print(f"proposed   {waste(padding_of(steps, proposed), num_tokens)}, with {option(proposed)}")
    print(f"\nIn a file of engine options:  token_buckets: {option(proposed)}")
    print(f"On the command line:          --token-buckets {','.join(map(str, proposed))}")
    return 0


def check(args: argparse.Namespace, largest: int, largest_step: int) -> None:
    """Raise UsageError for numbers that make no sense."""
    for name in ("programs", "multiple_of"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1.")
    if largest < largest_step:
        raise UsageError(f"--largest is {largest}, but the log has a step of {largest_step} tokens. Raise it.")


def waste(padding: int, num_tokens: int) -> str:
    return f"{padding} tokens of padding, {padding / max(padding + num_tokens, 1):.1%} of what is computed"


def option(buckets: Sequence[int]) -> str:
    return f"[{', '.join(map(str, buckets))}]"
