"""`jaxpaged compile`: every program of an engine as a bundle, with which the next start compiles nothing.

This module knows options and a folder; what a bundle holds is known below the engine.
"""

import argparse
from pathlib import Path
from typing import Any

from jaxpaged.entrypoints.argument_parser import Parser
from jaxpaged.entrypoints.cli.flags import add_model_argument, engine_options
from jaxpaged.entrypoints.option_flags import add_engine_flags

EPILOG = """\
To use the folder, start with the same options and --bundle FOLDER.
A bundle fits one model, one kind of machine, and one version of jaxpaged and jax; anything else refuses it.
A bundle is machine code: use only those that you trust like a program.

examples:
  jaxpaged compile demo -o bundle
  jaxpaged generate --model demo --bundle bundle "Hello"
"""


def add_parser(commands: Any) -> None:
    parser: Parser = commands.add_parser(
        "compile",
        help="compile all programs of an engine into a folder",
        usage="%(prog)s [MODEL] -o FOLDER [options]",
        epilog=EPILOG,
    )
    add_model_argument(parser)
    parser.add_argument("-o", "--output", required=True, metavar="FOLDER", help="a new or empty folder to write to")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and debug messages")
    add_engine_flags(parser)
    parser.set_defaults(run=run, command_parser=parser)


def run(args: argparse.Namespace) -> int:
    """Compile and write. Returns the exit status."""
    from jaxpaged.config import EngineConfig
    from jaxpaged.engine.build import compile_bundle
    from jaxpaged.entrypoints.terminal import ProgressLine

    options = options_of(args)
    output = Path(args.output)
    progress = ProgressLine()
    try:
        compile_bundle(EngineConfig.from_options(**options), output, progress.update)
    finally:
        progress.close()
    return 0


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's options. Raises UsageError for a bundle to make a bundle from."""
    from jaxpaged.errors import UsageError

    options = engine_options(args)
    if options.get("bundle") is not None:
        raise UsageError(f"--bundle {options['bundle']} has its programs already. Leave it out to compile them again.")
    return options
