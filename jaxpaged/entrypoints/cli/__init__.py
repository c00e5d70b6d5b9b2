"""The `jaxpaged` command: finds the subcommand, runs it, and turns errors into one line and an exit status.

0 done, 1 failure, 2 wrong usage, 130 interrupted. Nothing heavy is imported before a subcommand runs, so that
`jaxpaged --help` answers at once.
"""

import argparse
import gc
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jaxpaged import __version__
from jaxpaged.engine.observability.log_setup import set_up_logging
from jaxpaged.entrypoints.argument_parser import Parser
from jaxpaged.entrypoints.cli import chat, convert, generate, kv, merge, models, plugins, proxy, serve
from jaxpaged.entrypoints.cli import compile as compile_command
from jaxpaged.entrypoints.terminal import complain
from jaxpaged.errors import JaxpagedError, UsageError

OWN_COMMANDS = {
    "generate": generate,
    "chat": chat,
    "serve": serve,
    "proxy": proxy,
    "compile": compile_command,
    "convert": convert,
    "merge": merge,
    "kv": kv,
    "models": models,
    "plugins": plugins,
}
"""Those that need no tools."""
FIRST_COMMANDS = ("generate", "chat", "serve", "models", "bench")
DESCRIPTION = "LLM inference native to JAX: paged KV and prefix cache, continuous batching."
FAILURE, USAGE, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141


def command() -> NoReturn:
    """The command as a process of its own.

    It leaves without the interpreter's clean-up: a program that is still being compiled in a thread, and that nobody
    will use any more, can be neither cancelled nor killed, and would be waited for.
    """
    collect_seldom()
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def collect_seldom() -> None:
    """Modules and weights stay: to look among them for garbage again and again takes a tenth of the start."""
    gc.set_threshold(serve.NEW_OBJECTS, *gc.get_threshold()[1:])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line. Returns the exit status; `--help` and flags that do not parse raise SystemExit."""
    words = sys.argv[1:] if arguments is None else arguments
    args = command_line(words[0] if words else None).parse_args(words)
    set_up_logging("debug" if args.debug else "warning")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a character that the terminal lacks must not end a run
    try:
        return args.run(args)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has left, as with `| head`. What is still buffered must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        if args.debug:
            raise
        complain(args.command_parser.prog, explanation(error))
        return USAGE if isinstance(error, UsageError) else FAILURE


def command_line(word: str | None = None) -> Parser:
    """The parser with all subcommands, or, where the first `word` names one that needs no tools, with that one."""
    parser = Parser(prog="jaxpaged", description=DESCRIPTION, usage="%(prog)s COMMAND [options]", add_help=False)
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=f"jaxpaged {__version__}", help=argparse.SUPPRESS)
    commands = parser.add_commands(dest="command", metavar="COMMAND", help=argparse.SUPPRESS)
    if word in OWN_COMMANDS:
        OWN_COMMANDS[word].add_parser(commands)
        return parser
    for each in all_commands():
        each.add_parser(commands)
    parser.epilog = overview({each.dest: each.help or "" for each in commands._choices_actions})
    return parser


def all_commands() -> Sequence[Any]:
    """Their modules in the order in which they are shown."""
    from jaxpaged.tools import bench, buckets, calibrate, collect_env
    from jaxpaged.tools.planning import command as plan

    tools = (bench, compile_command, plan, convert, merge, calibrate, buckets)
    return (generate, chat, serve, proxy, *tools, kv, models, plugins, collect_env)


def overview(commands: Mapping[str, str]) -> str:
    """What there is, by name: first what one needs first."""
    line = "  {:<12} {}".format
    further = [line(name, help) for name, help in commands.items() if name not in FIRST_COMMANDS]
    return "\n".join(
        [
            "first steps:",
            *(line(name, commands[name]) for name in FIRST_COMMANDS),
            "",
            "further commands:",
            *further,
            "jaxpaged COMMAND --help tells more of one; --version tells the version.",
        ]
    )


def explanation(error: Exception) -> str:
    """One line. Errors of our own say it themselves; any other one is a bug, or a broken installation."""
    message = " ".join(str(error).split())
    if isinstance(error, JaxpagedError):
        return f"error: {message}"
    return f"unexpected {type(error).__name__}: {message}. Run it again with --debug for the traceback."
