"""`jaxpaged generate`: prompts in, text out.

This module knows the engine as something that takes requests and steps; it computes nothing.
"""

import argparse
import re
import time
from pathlib import Path
from typing import Any

from jaxpaged.entrypoints.cli.flags import Parser, add_engine_flags, add_sampling_flags
from jaxpaged.entrypoints.cli.recordings import add_recording_flags, check_recordings, write_recordings

EPILOG = """\
A model with a chat template gets every prompt as a user's message; --raw continues the text as it is.
Answers end where the model ends them, or after 2048 tokens, with --raw after 256, unless --max-tokens says otherwise.

Arguments are prompts, never a model: that is -m MODEL. --file, and standard input without any prompt, hold a prompt a
line, or JSON lines with "prompt" (text or token ids) or "messages". --prompt-file holds one prompt, lines and all.

exit status: 0 every prompt was answered; 1 some were not, or the engine failed; 2 wrong usage; 130 interrupted

examples:
  jaxpaged generate "What is the capital of Portugal?"
  jaxpaged generate --temperature 0.8 --seed 7 -n 3 "Tell me a story about a fox."
  cat letter.txt | jaxpaged generate --prompt-file -
  jaxpaged generate --file prompts.txt --json > answers.jsonl
  jaxpaged generate --json-schema person.json "Invent a person."
  jaxpaged generate --model Qwen/Qwen3-0.6B --max-model-len 4K --raw "Once upon a time"
"""


def add_parser(commands: Any) -> None:
    parser: Parser = commands.add_parser(
        "generate",
        help="answer prompts, or continue them",
        usage="%(prog)s [PROMPT ...] [options]",
        epilog=EPILOG,
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="a prompt; standard input if there is none")
    parser.add_argument("--file", metavar="FILE",
                        help="read prompts from a file, one a line or JSON lines; - is standard input")  # fmt: skip
    parser.add_argument("--prompt-file", metavar="FILE", action="append", default=[],
                        help="a prompt that is the whole text of a file, less the end of its last line; - is standard "
                        "input; may be repeated")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object a line for every answer")
    parser.add_argument("--raw", action="store_true", help="continue the text without the model's chat template")
    parser.add_argument("--json-schema", metavar="FILE", help="make every answer JSON that this schema allows")
    parser.add_argument("--system", metavar="TEXT", help="a system message before every prompt")
    parser.add_argument("--stats", action="store_true", help="print rates and counters to standard error at the end")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and debug messages")
    add_recording_flags(parser)
    add_sampling_flags(parser)
    add_engine_flags(parser)
    parser.set_defaults(run=run, command_parser=parser)


def run(args: argparse.Namespace) -> int:
    """Answer all prompts. Returns the exit status."""
    from jaxpaged.entrypoints.cli.batch import Batch
    from jaxpaged.entrypoints.cli.engine import start
    from jaxpaged.entrypoints.cli.program_waits import ProgramWaits
    from jaxpaged.entrypoints.cli.prompts import collect_prompts
    from jaxpaged.entrypoints.cli.results import JsonResults, TextResults
    from jaxpaged.entrypoints.cli.stats import print_stats

    check_combination(args)
    read_schema(args)
    check_recordings(args)
    sources = collect_prompts(args.prompts, args.file, args.prompt_file)
    remark_on_models(args)
    engine, progress = start(args)
    started = time.time()
    try:
        results = JsonResults(sources) if args.json else TextResults(sources)
        batch = Batch(engine, results, progress)
        batch.submit(sources, args)
        batch.finish()
        if args.stats:
            waits = ProgramWaits(engine.step_records()[0])
            print_stats(batch.finished, started, time.time(), engine.executor_stats(), waits)
        write_recordings(args, engine)
    finally:
        progress.close()
        engine.shutdown()
    return 1 if batch.num_failed else 0


def check_combination(args: argparse.Namespace) -> None:
    """Raise UsageError for flags that contradict each other."""
    from jaxpaged.errors import UsageError

    if args.raw and args.system is not None:
        raise UsageError("--system needs the chat template that --raw switches off. Leave one of them out.")
    if args.json_schema is not None and hasattr(args, "structured_outputs"):
        raise UsageError("--json-schema is a part of --structured-outputs. Leave one of them out.")


def remark_on_models(args: argparse.Namespace) -> None:
    """A first prompt such as `Qwen/Qwen3-0.6B` is a prompt; whoever meant a model is told how to say so."""
    from jaxpaged.entrypoints.cli.terminal import complain

    word = args.prompts[0] if args.prompts else ""
    is_folder = bool(word) and not set(word) & set(" \n") and (Path(word) / "config.json").is_file()
    if (is_folder or re.fullmatch(r"[\w.-]+/[\w.-]+", word)) and not hasattr(args, "model") and not args.config:
        complain("jaxpaged generate", f"{word} is taken as a prompt; a model is given with -m {word}")


def read_schema(args: argparse.Namespace) -> None:
    """Turn --json-schema into the sampling parameter that it stands for. Raises UsageError."""
    from jaxpaged.errors import UsageError

    if args.json_schema is None:
        return
    try:
        schema = Path(args.json_schema).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"cannot read {args.json_schema}: {reason}. Check the path after --json-schema.") from None
    args.structured_outputs = {"json": schema}
