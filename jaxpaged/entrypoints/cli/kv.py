"""`jaxpaged kv`: what is in a folder of cached keys and values, whether it is whole, and what is to go.

It works on files; an engine may use the folder meanwhile. What concerns single files is in `kv_prefix.py`.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxpaged.entrypoints.cli.flags import Parser
from jaxpaged.entrypoints.cli.kv_prefix import add_actions
from jaxpaged.entrypoints.cli.machine import gibibytes
from jaxpaged.entrypoints.cli.values import whole_number
from jaxpaged.errors import UsageError

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
EPILOG = """\
Pages belong to a namespace: a digest of the model's weights and configuration and of the cache's type.

examples:
  jaxpaged kv ls /var/cache/kv
  jaxpaged kv verify /var/cache/kv --delete
  jaxpaged kv prune /var/cache/kv --older-than 7d --max-size 100G --dry-run
  jaxpaged kv prune /var/cache/kv --namespace 1f2e3d    # all pages of a model that is not served any more
"""


def add_parser(commands: Any) -> None:
    group: Parser = commands.add_parser("kv", help="look after cached keys and values on a disk", epilog=EPILOG)
    actions = group.add_commands(dest="action", metavar="ACTION")
    listing = add_action(actions, "ls", "namespaces, with their sizes and when they were used", run_ls, ["list"])
    listing.add_argument("--json", action="store_true", help="print one JSON object a line for every namespace")
    verifying = add_action(
        actions, "verify", "read every page and check it; exit status 1 where one is damaged", run_verify
    )
    verifying.add_argument("--delete", action="store_true", help="remove the damaged pages")
    verifying.add_argument(
        "--secret-file", metavar="FILE", help="a file with the secret that the pages are signed with, if they are"
    )
    pruning = add_action(actions, "prune", "remove pages, those used longest ago first", run_prune)
    pruning.add_argument("--max-size", type=whole_number, metavar="BYTES", help="what may remain, such as 100G")
    pruning.add_argument("--older-than", type=seconds, metavar="AGE", help="unused for 90s, 30m, 12h or 7d")
    pruning.add_argument("--dry-run", action="store_true", help="say what would go, and remove nothing")
    add_actions(actions)
    for parser in (verifying, pruning):
        parser.add_argument(
            "--namespace",
            action="append",
            default=[],
            metavar="DIGITS",
            help="this one only, by its first digits; may be given several times (default: all)",
        )


def add_action(
    actions: Any, name: str, help: str, run: Callable[[argparse.Namespace], int], aliases: Sequence[str] = ()
) -> Parser:
    parser: Parser = actions.add_parser(name, help=help, aliases=aliases)
    parser.add_argument("path", metavar="PATH", type=Path, help="the folder of a disk tier")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and debug messages")
    parser.set_defaults(run=run, command_parser=parser)
    return parser


def seconds(text: str) -> float:
    """`90s`, `30m`, `12h`, `1.5d`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an age such as 90s, 30m, 12h or 7d.")
    return float(match[1]) * UNITS[match[2]]


def run_ls(args: argparse.Namespace) -> int:
    """Print a line for each namespace. Returns the exit status."""
    from jaxpaged.entrypoints.cli.terminal import printable
    from jaxpaged.kv_store.folder_maintenance import reports

    found = reports(args.path)
    if args.json:
        for report in found:
            print(json.dumps(asdict(report)))
        return 0
    now = time.time()
    for report in found:
        used = f"used {age(now - report.newest_use)} to {age(now - report.oldest_use)} ago" if report.num_pages else "-"
        facts = (f"{name} {value}" for name, value in report.facts.items() if not isinstance(value, dict | list))
        sizes = f"{report.num_pages:>8} pages  {size(report.num_bytes):>9}"
        line = f"{report.namespace[:12]}  {sizes}  {used:<24}  {', '.join(facts)}".rstrip()
        print(printable(line, sys.stdout))
    pages, num_bytes = sum(report.num_pages for report in found), sum(report.num_bytes for report in found)
    print(f"{len(found)} namespaces, {pages} pages, {size(num_bytes)}")
    return 0


def run_verify(args: argparse.Namespace) -> int:
    """Print what is damaged. Returns the exit status."""
    from jaxpaged.entrypoints.cli.terminal import ProgressLine
    from jaxpaged.kv_store.folder_maintenance import remove, verify

    secret = read_secret(args.secret_file) if args.secret_file else None
    progress = ProgressLine()
    try:
        num_right, wrong = verify(
            args.path, args.namespace, secret, lambda done, total: progress.update("pages", done, total)
        )
    finally:
        progress.close()
    for name, problem in wrong.items():
        print(f"{name}: {problem}")
    removed = f", {remove(args.path, list(wrong))} removed" if wrong and args.delete else ""
    print(f"{num_right} pages are whole, {len(wrong)} are not{removed}")
    return 1 if wrong else 0


def run_prune(args: argparse.Namespace) -> int:
    """Remove pages, and say how many. Returns the exit status."""
    from jaxpaged.kv_store.folder_maintenance import pages_of, remove, to_prune

    if args.max_size is None and args.older_than is None and not args.namespace:
        raise UsageError("Nothing says what is to go. Give --max-size, --older-than, or a whole --namespace.")
    if args.max_size is not None and args.max_size < 0:
        raise UsageError(f"--max-size is {args.max_size}; it must be at least 0.")
    pages = pages_of(args.path, args.namespace)
    limited = args.max_size is not None or args.older_than is not None
    chosen = to_prune(pages, args.max_size, args.older_than) if limited else pages
    num_bytes = sum(page.num_bytes for page in chosen)
    gone = len(chosen) if args.dry_run else remove(args.path, [page.name for page in chosen])
    verb = "would be removed" if args.dry_run else "removed"
    print(f"{gone} of {len(pages)} pages {verb}, {size(num_bytes)}")
    return 0


def read_secret(path: str) -> bytes:
    """The file's content without white space around it."""
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise UsageError(f"The secret cannot be read: {error}.") from None
    if not secret:
        raise UsageError(f"{path} is empty; it must hold the secret that pages are signed with.")
    return secret


def size(num_bytes: int) -> str:
    return gibibytes(num_bytes) if num_bytes >= 2**20 else f"{num_bytes / 2**10:.0f} KiB"


def age(passed: float) -> str:
    """`5 s`, `12 min`, `3 h`, `8 d`."""
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if passed >= 2 * unit:
            return f"{passed / unit:.0f} {name}"
    return f"{max(passed, 0.0):.0f} s"
