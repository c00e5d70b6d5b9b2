"""`jaxpaged kv export` and `import`: a text's beginning as a file, written by an engine, and put into a disk tier."""

import argparse
from pathlib import Path
from typing import Any

from jaxpaged.entrypoints.cli.flags import Parser, add_engine_flags
from jaxpaged.entrypoints.cli.values import whole_number
from jaxpaged.errors import UsageError

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


def add_actions(actions: Any) -> None:
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
    from jaxpaged.entrypoints.cli.kv import read_secret
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
