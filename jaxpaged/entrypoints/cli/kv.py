"""`jaxpaged kv`: what is in a folder of cached keys and values, whether it is whole, and what is to go.

It works on files; an engine may use the folder meanwhile. `export` writes the beginning of a text as a file, with an
engine of its own, and `import` puts such a file into a folder.
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

from jaxpaged.entrypoints.argument_parser import Parser
from jaxpaged.entrypoints.cli.machine import gibibytes
from jaxpaged.entrypoints.option_flags import add_engine_flags, whole_number
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
DEFAULT_TIER = "host=64M"
"""What an engine that only exports keeps: the file is written from the device."""
NO_LIMIT = 1 << 62
EXPORT_EPILOG = """\
A model with a chat template takes PROMPT as a user's message; --raw continues the text as it is. A conversation is the
file that /save of `jaxpaged chat` writes. What does not fill a block and a page of its tokens is left out.

examples:
  jaxpaged kv export --prompt-file sea.txt -o sea.safetensors
  jaxpaged kv export --file conversation.jsonl -o talk.safetensors -m Qwen/Qwen3-0.6B
"""
IMPORT_EPILOG = """\
The pages are in the folder of the model that computed them, and no other is given them. An engine that uses the folder
finds them within half a minute, others when they start with --kv-offload disk=PATH:SIZE.

example:
  jaxpaged kv import sea.safetensors /var/cache/kv
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
    add_prefix_actions(actions)
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
    from jaxpaged.entrypoints.terminal import printable
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
    from jaxpaged.entrypoints.terminal import ProgressLine
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


# ---- single files ----------------------------------------------------------------------------------


def add_prefix_actions(actions: Any) -> None:
    """`export` and `import` among the actions of `jaxpaged kv`."""
    export: Parser = actions.add_parser(
        "export", help="compute a prompt and write its keys and values to a file", epilog=EXPORT_EPILOG
    )
    export.add_argument("prompts", nargs="*", metavar="PROMPT", help="the prompt; standard input if there is none")
    export.add_argument("-o", "--output", required=True, type=Path, metavar="FILE", help="a .safetensors file")
    export.add_argument(
        "--file", metavar="FILE", help='a line of JSON with "prompt" or "messages"; - is standard input'
    )
    export.add_argument(
        "--prompt-file",
        metavar="FILE",
        action="append",
        default=[],
        help="the prompt is the whole text of a file; - is standard input",
    )
    export.add_argument("--raw", action="store_true", help="continue the text without the model's chat template")
    export.add_argument("--debug", action="store_true", help="show tracebacks and debug messages")
    add_engine_flags(export)
    export.set_defaults(run=run_export, command_parser=export)
    importing: Parser = actions.add_parser(
        "import", help="put such a file into the folder of a disk tier", epilog=IMPORT_EPILOG
    )
    importing.add_argument("file", metavar="FILE", type=Path, help="what export wrote")
    importing.add_argument("path", metavar="PATH", type=Path, help="the folder of a disk tier")
    importing.add_argument(
        "--max-size",
        type=whole_number,
        metavar="BYTES",
        default=NO_LIMIT,
        help="what the folder may hold, such as 100G (default: no limit)",
    )
    importing.add_argument(
        "--secret-file", metavar="FILE", help="a file with the secret that the pages are signed with"
    )
    importing.add_argument("--debug", action="store_true", help="show tracebacks and debug messages")
    importing.set_defaults(run=run_import, command_parser=importing)


def run_export(args: argparse.Namespace) -> int:
    """Compute one prompt and write its file. Returns the exit status."""
    from jaxpaged.entrypoints.cli.engine import has_chat_template, start
    from jaxpaged.entrypoints.cli.prompts import PromptSource, collect_prompts

    sources: list[PromptSource] = collect_prompts(args.prompts, args.file, args.prompt_file)
    if len(sources) != 1:
        raise UsageError(f"there are {len(sources)} prompts, and a file holds one. Export each by itself.")
    (source,) = sources
    if source.error is not None:
        raise source.error
    if not args.output.parent.is_dir():
        raise UsageError(f"{args.output.parent} is no folder. Choose another place for --output.")
    if not hasattr(args, "kv_offload") and not hasattr(args, "kv_transfer_config") and not args.config:
        args.kv_offload = DEFAULT_TIER
    engine: Any
    engine, progress = start(args)
    try:
        from jaxpaged.entrypoints.llm import LLM

        prompt: Any = source.messages or source.text
        if source.token_ids is not None:
            prompt = {"prompt_token_ids": source.token_ids}
        elif source.messages is None and has_chat_template(engine) and not args.raw:
            prompt = [{"role": "user", "content": source.text}]
        info = LLM.from_engine(engine).save_prefix(prompt, args.output)
    finally:
        progress.close()
        engine.shutdown()
    print(f"{args.output}: {described(info)}")
    return 0


def run_import(args: argparse.Namespace) -> int:
    """Put a file's pages into a folder. Returns the exit status."""
    from jaxpaged.kv_store.disk import DiskTier
    from jaxpaged.kv_store.prefix_file import PrefixFile, info_of

    secret = read_secret(args.secret_file) if args.secret_file else None
    file = PrefixFile(args.file, secret)
    pages = list(file.pages())  # all are checked before the first is kept
    tier = DiskTier(args.path, args.max_size, file.header.namespace, facts={"model": file.header.model}, secret=secret)
    try:
        tier.wait_ready()
        num_kept = sum(tier.put(key, buffers) for key, buffers in pages)
    finally:
        tier.close()
    if num_kept < len(pages):
        raise UsageError(f"{args.path} kept {num_kept} of {len(pages)} pages. See that it may be written and has room.")
    print(f"{args.path}: {described(info_of(file.header))}")
    return 0


def described(info: Any) -> str:
    from jaxpaged.entrypoints.cli.kv import size

    pages = f"{info.num_pages} pages, {size(info.num_bytes)}"
    return f"{info.num_tokens} tokens of {info.model}, {pages}, namespace {info.namespace[:12]}"


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
