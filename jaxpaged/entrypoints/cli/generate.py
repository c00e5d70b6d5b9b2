"""`jaxpaged generate`: prompts in, text out; and, if it is asked for, files about the steps that gave it.

This module knows the engine as something that takes requests and steps; it computes nothing.
"""

import argparse
import functools
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpaged.entrypoints.argument_parser import Parser
from jaxpaged.entrypoints.cli.adapters import add_lora_flag
from jaxpaged.entrypoints.cli.flags import add_sampling_flags, chosen_model, sampling_options
from jaxpaged.entrypoints.cli.remote import (
    add_server_flags,
    asking,
    check_server_flags,
    refuse_engine_options,
)
from jaxpaged.entrypoints.option_flags import add_engine_flags

if TYPE_CHECKING:
    from jaxpaged.entrypoints.cli.batch import Batch
    from jaxpaged.entrypoints.cli.engine import Engine
    from jaxpaged.entrypoints.cli.prompts import PromptSource

EPILOG = """\
A model with a chat template gets every prompt as a user's message; with --raw it continues the text as it is.
An answer has at most 2048 tokens, with --raw 256, unless --max-tokens says otherwise.

All arguments are prompts; the model is named by -m. A file, or standard input where no prompt is given, holds one
prompt a line, or JSON lines with "prompt" (text or token ids) or "messages".

exit status: 0 every prompt was answered; 1 some were not, or the engine failed; 2 wrong usage; 130 interrupted

examples:
  jaxpaged generate "What is the capital of Portugal?"
  jaxpaged generate --temperature 0.8 --seed 7 -n 3 "Tell me a story about a fox."
  cat letter.txt | jaxpaged generate --prompt-file -
  jaxpaged generate --file prompts.txt --json > answers.jsonl
  jaxpaged generate --json-schema person.json "Invent a person."
  jaxpaged generate -m google/gemma-3-4b-it --image cat.jpg "What is in the picture?"
  jaxpaged generate --model Qwen/Qwen3-0.6B --max-model-len 4K --raw "Once upon a time"
  jaxpaged generate --lora sql=/adapters/sql "How many users are there?"
  jaxpaged generate --server localhost:50051 "What is 27 + 45?"
"""


def add_parser(commands: Any) -> None:
    parser: Parser = commands.add_parser(
        "generate",
        help="answer prompts, or continue texts",
        usage="%(prog)s [PROMPT ...] [options]",
        epilog=EPILOG,
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="a prompt; standard input if there is none")
    parser.add_argument(
        "--file", metavar="FILE", help="file with one prompt a line, or with JSON lines; - is standard input"
    )
    parser.add_argument(
        "--prompt-file",
        metavar="FILE",
        action="append",
        default=[],
        help="file whose whole text is one prompt; - is standard input; may be repeated",
    )
    parser.add_argument(
        "--image",
        metavar="FILE",
        action="append",
        default=[],
        help="a picture that every prompt is about, for a model that sees; may be repeated",
    )
    add_lora_flag(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line for every answer")
    parser.add_argument("--raw", action="store_true", help="continue the text, without the model's chat template")
    parser.add_argument("--json-schema", metavar="FILE", help="file with a JSON schema that every answer follows")
    parser.add_argument("--system", metavar="TEXT", help="a system message before every prompt")
    parser.add_argument("--stats", action="store_true", help="print rates and counters to standard error at the end")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and debug messages")
    add_recording_flags(parser)
    add_server_flags(parser)
    add_sampling_flags(parser)
    add_engine_flags(parser)
    parser.set_defaults(run=run, command_parser=parser)


def run(args: argparse.Namespace) -> int:
    """Answer all prompts. Returns the exit status."""
    from jaxpaged.engine.observability.step_times import ProgramWaits
    from jaxpaged.entrypoints.cli.prompts import collect_prompts
    from jaxpaged.entrypoints.cli.results import print_stats

    check_combination(args)
    read_schema(args)
    check_recordings(args)
    read_images(args)
    sources = collect_prompts(args.prompts, args.file, args.prompt_file)
    remark_on_models(args)
    if args.server is not None:
        return run_remotely(args, sources)
    from jaxpaged.entrypoints.cli.engine import request_params, start

    engine, progress = start(args)
    started = time.time()
    try:
        batch = answered(args, sources, engine, functools.partial(request_params, engine), progress)
        if args.stats:
            waits = ProgramWaits(engine.step_records()[0])
            print_stats(batch.finished, started, time.time(), engine.executor_stats(), waits)
        write_recordings(args, engine)
    finally:
        progress.close()
        engine.shutdown()
    return 1 if batch.num_failed else 0


def run_remotely(args: argparse.Namespace, sources: Sequence["PromptSource"]) -> int:
    """The same by a server."""
    from jaxpaged.entrypoints.terminal import ProgressLine
    from jaxpaged.sampling_params import SamplingParams

    refuse_engine_options(args, "--server", "lora", "stats", "timeline", "trace", "step_log")
    SamplingParams(**sampling_options(args))  # wrong values are found before anybody is asked
    with asking(args) as (client, model):
        from jaxpaged.entrypoints.cli.remote_engine import RemoteEngine, request_values  # it imports grpcio

        engine = RemoteEngine(client, args.server, model.chats, chosen_model(args))
        try:
            return 1 if answered(args, sources, engine, request_values, ProgressLine()).num_failed else 0
        finally:
            engine.shutdown()


def answered(
    args: argparse.Namespace, sources: Sequence["PromptSource"], engine: Any, params_of: Any, progress: Any
) -> "Batch":
    """All prompts, once they are answered and shown."""
    from jaxpaged.entrypoints.cli.batch import Batch
    from jaxpaged.entrypoints.cli.results import JsonResults, TextResults

    results = JsonResults(sources) if args.json else TextResults(sources)
    batch = Batch(engine, results, progress, params_of)
    batch.submit(sources, args)
    batch.finish()
    return batch


def check_combination(args: argparse.Namespace) -> None:
    """Raise UsageError for flags that contradict each other."""
    from jaxpaged.errors import UsageError

    check_server_flags(args)
    if args.raw and args.system is not None:
        raise UsageError("--system needs the chat template that --raw switches off. Leave one of them out.")
    if args.json_schema is not None and hasattr(args, "structured_outputs"):
        raise UsageError("--json-schema is a part of --structured-outputs. Leave one of them out.")


def remark_on_models(args: argparse.Namespace) -> None:
    """A first prompt such as `Qwen/Qwen3-0.6B` is a prompt; whoever meant a model is told how to say so."""
    from jaxpaged.entrypoints.terminal import complain

    word = args.prompts[0] if args.prompts else ""
    is_folder = bool(word) and not set(word) & set(" \n") and os.path.isfile(os.path.join(word, "config.json"))
    if (is_folder or re.fullmatch(r"[\w.-]+/[\w.-]+", word)) and not hasattr(args, "model") and not args.config:
        complain("jaxpaged generate", f"{word} is taken as a prompt; a model is given with -m {word}")


def read_images(args: argparse.Namespace) -> None:
    """Read the files of --image once for all prompts. Raises UsageError."""
    from jaxpaged.errors import UsageError

    if not args.image:
        return
    from jaxpaged.entrypoints.cli.images import picture_part

    args.image = [picture_part(path) for path in args.image]
    if args.raw and args.server is not None:
        raise UsageError("--image needs the chat template that --raw switches off. Leave one of them out.")


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


def add_recording_flags(parser: Any) -> None:
    group = parser.add_argument_group("recordings")
    group.add_argument("--timeline", metavar="FILE", help="draw what each step used its time for (.png, .svg or .pdf)")
    group.add_argument("--trace", metavar="FILE", help="write the steps as a Chrome trace (JSON, for ui.perfetto.dev)")
    group.add_argument("--step-log", metavar="FILE", help="write the steps as JSON lines, for jaxpaged buckets fit")


def check_recordings(args: argparse.Namespace) -> None:
    """Find what would fail at the end before anything is computed. Raises UsageError."""
    from jaxpaged.tools.pictures.canvas import check_folder, check_picture_path

    if args.timeline:
        check_picture_path(args.timeline)
    for path in filter(None, (args.trace, args.step_log)):
        check_folder(path)


def write_recordings(args: argparse.Namespace, engine: "Engine") -> None:
    """Write the files that were asked for. Raises UsageError when one cannot be written."""
    if not (args.timeline or args.trace or args.step_log):
        return
    from jaxpaged.tools.pictures.timeline import Timeline

    records, num_dropped = engine.step_records()
    timeline = Timeline(records, num_dropped, engine.executor_stats().get("token_buckets", ()))
    if args.timeline:
        timeline.save(args.timeline)
    if args.trace:
        timeline.save_trace(args.trace)
    if args.step_log:
        timeline.save_log(args.step_log)
