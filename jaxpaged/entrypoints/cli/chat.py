"""`jaxpaged chat`: a conversation in the terminal, or one line a turn from a pipe.

This module knows flags, where lines come from, and what lines do; the conversation is in `conversation.py`.
"""

import argparse
import contextlib
import json
import os
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxpaged.entrypoints.argument_parser import Parser
from jaxpaged.entrypoints.cli.adapters import add_lora_flag, chosen_adapter
from jaxpaged.entrypoints.cli.conversation import Conversation
from jaxpaged.entrypoints.cli.flags import add_model_argument, add_sampling_flags, chosen_model, sampling_options
from jaxpaged.entrypoints.cli.images import picture_part
from jaxpaged.entrypoints.cli.remote import (
    add_server_flags,
    asking,
    check_server_flags,
    refuse_engine_options,
)
from jaxpaged.entrypoints.option_flags import add_engine_flags, converter, essential_type
from jaxpaged.entrypoints.terminal import columns_of, complain, fitted
from jaxpaged.errors import UsageError, did_you_mean
from jaxpaged.sampling_params import SAMPLING_HELP, SamplingParams

HISTORY_LINES = 1000
QUOTES = '"""'
COMMANDS = {
    "/help": "show these commands",
    "/regen": "answer the last message again (with temperature 0, or a seed, it is the same answer)",
    "/image": "/image FILE adds a picture to the next message, for a model that sees",
    "/set": "/set temperature 0.7 sets a sampling parameter, /set temperature forgets it, /set shows all",
    "/system": "/system TEXT sets the system message and forgets the conversation",
    "/clear": "forget the conversation, keep the system message",
    "/save": "/save FILE writes the conversation as a line of JSON that generate --file reads",
    "/bye": "leave; so do /exit and Ctrl-D",
}
ALIASES = {"/exit": "/bye", "/quit": "/bye", "/?": "/help"}


def add_parser(commands: Any) -> None:
    parser: Parser = commands.add_parser(
        "chat",
        help="hold a conversation",
        usage="%(prog)s [MODEL] [options]",
        epilog="commands:\n"
        + "\n".join(f"  {name:<9} {text}" for name, text in COMMANDS.items())
        + f"\n  {QUOTES:<9} begins and ends a message of several lines"
        + "\n\nCtrl-C stops an answer. An answer has at most 2048 tokens unless --max-tokens says otherwise.\n"
        "Each line of a pipe is one turn, and only the answers are printed.\n"
        "What is typed in a terminal is kept in ~/.local/state/jaxpaged.\n\n"
        "examples:\n  jaxpaged chat\n  jaxpaged chat Qwen/Qwen3-0.6B --temperature 0.7\n"
        "  jaxpaged chat --url http://127.0.0.1:8000\n  jaxpaged chat --server localhost:50051",
    )
    add_model_argument(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message for the conversation")
    add_lora_flag(parser)
    parser.add_argument(
        "--url",
        metavar="URL",
        help="address of a server with OpenAI's API; MODEL is then a name that it knows (default: its first)",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="API key for --url or --server (default for --url: OPENAI_API_KEY of the environment)",
    )
    parser.add_argument("--no-history", action="store_true", help="do not keep what is typed for the next time")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and debug messages")
    add_server_flags(parser)
    add_sampling_flags(parser)
    add_engine_flags(parser)
    parser.set_defaults(run=run, command_parser=parser)


def run(args: argparse.Namespace) -> int:
    """Hold the conversation. Returns the exit status: 1 if a turn of a pipe failed."""
    given = sampling_options(args)
    SamplingParams(**given)
    if given.get("n", 1) != 1:
        raise UsageError(f"-n is {given['n']}, but a conversation goes on from one answer. Leave it out.")
    check_server_flags(args)
    if args.url is not None and args.server is not None:
        raise UsageError("--url and --server are given. Leave one of them out.")
    place = server_answers if args.url is not None else remote_answers if args.server is not None else local_answers
    with place(args) as answers:
        conversation = Conversation(answers, given, args.system)
        try:
            if sys.stdin.isatty():
                with contextlib.nullcontext() if args.no_history else history():
                    talk(conversation)
                return 0
            lines = (line.rstrip("\n") for line in sys.stdin)
            failures = sum(not turn(conversation, line, lambda: next(lines, None)) for line in lines)
            return 1 if failures else 0
        except Leave:
            return 0


@contextlib.contextmanager
def local_answers(args: argparse.Namespace) -> Iterator[Any]:
    """An engine in this process."""
    from jaxpaged.entrypoints.cli.engine import has_chat_template, start
    from jaxpaged.entrypoints.cli.local_answers import LocalAnswers

    if args.api_key is not None:
        raise UsageError("--api-key is for --url or --server, and none is given. Leave it out.")
    engine, progress = start(args)
    try:
        progress.close()
        if not has_chat_template(engine):
            raise UsageError("the model has no chat template. Give one with --chat-template, or use generate.")
        yield LocalAnswers(engine, chosen_adapter(args))
    finally:
        engine.shutdown()


@contextlib.contextmanager
def server_answers(args: argparse.Namespace) -> Iterator[Any]:
    """A server. Raises UsageError for options of an engine, of which there is none."""
    from jaxpaged.entrypoints.cli.server_answers import ServerAnswers

    refuse_engine_options(args, "--url", "lora")
    yield ServerAnswers(args.url, chosen_model(args), args.api_key or os.environ.get("OPENAI_API_KEY"))


@contextlib.contextmanager
def remote_answers(args: argparse.Namespace) -> Iterator[Any]:
    """A server over gRPC. Raises UsageError as `server_answers` does, and for a model that cannot chat."""
    refuse_engine_options(args, "--server", "lora")
    with asking(args) as (client, model):
        from jaxpaged.entrypoints.cli.remote_engine import RemoteAnswers  # it imports grpcio

        if not model.chats:
            raise UsageError("the server's model has no chat template. Use generate.")
        yield RemoteAnswers(client, args.server, chosen_model(args))


@contextlib.contextmanager
def history() -> Iterator[None]:
    """Lines typed before, with the arrow keys and Ctrl-R; kept in a file that only its owner can read."""
    import readline

    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    file = Path(base) / "jaxpaged" / "chat_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # a home that cannot be written keeps no history
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch(mode=0o600)
            readline.write_history_file(file)


def talk(conversation: Conversation) -> None:
    """Read turns with line editing until the end of input."""
    import readline  # noqa: F401  input() edits lines once this is imported

    say(f"Type a message, {QUOTES} for one of several lines, /help for commands, Ctrl-D to leave.")
    while True:
        try:
            line = input("> ")
            turn(conversation, line, lambda: typed("... "))
        except EOFError:
            print()
            return
        except KeyboardInterrupt:  # while typing
            print()


def typed(prompt: str) -> str | None:
    """A further line, None at the end of input."""
    try:
        return input(prompt)
    except EOFError:
        return None


# ---- what a user can type: messages, of several lines too, and commands that begin with / ----------


class Leave(Exception):
    """The user said /bye."""


def whole_message(line: str, read_more: Callable[[], str | None]) -> str:
    """A message: the line, or, when it begins with three quotes, all lines up to the next three quotes.

    `read_more` gives the next line, None at the end of input, which ends a message too.
    """
    if not line.lstrip().startswith(QUOTES):
        return line
    rest: str | None = line.lstrip().removeprefix(QUOTES)
    lines = []
    while rest is not None and QUOTES not in rest:
        lines.append(rest)
        rest = read_more()
    lines.append("" if rest is None else rest.partition(QUOTES)[0])
    return "\n".join(lines).strip("\n")


def turn(conversation: Conversation, line: str, read_more: Callable[[], str | None] = lambda: None) -> bool:
    """A command, or a message and its answer. False when it failed; the failure has been reported."""
    if not line.strip():
        return True
    word, _, rest = line.strip().partition(" ")
    if not word.startswith("/"):
        message = whole_message(line, read_more)
        return conversation.say(message) if message.strip() else True
    try:
        return command(conversation, ALIASES.get(word, word), rest.strip())
    except UsageError as error:
        complain("jaxpaged chat", str(error))
        return False


def command(conversation: Conversation, word: str, rest: str) -> bool:
    """Do what a command says. Raises UsageError, and Leave."""
    match word:
        case "/bye":
            raise Leave
        case "/help":
            say(
                *(f"{name:<9} {text}" for name, text in COMMANDS.items()),
                f"{QUOTES:<9} begins and ends a message of several lines",
            )
        case "/clear":
            conversation.clear(conversation.system)
        case "/system":
            conversation.clear(rest)
        case "/regen":
            return conversation.regenerate()
        case "/image":
            if not rest:
                raise UsageError("/image needs the name of a file.")
            conversation.pictures.append(picture_part(rest))
            others = len(conversation.pictures) - 1
            say(f"the next message is about {rest}{f' and {others} more' if others else ''}")
        case "/save":
            if not rest:
                raise UsageError("/save needs the name of a file.")
            conversation.save(rest)
            say(f"saved in {conversation.file}")
        case "/set":
            set_parameter(conversation, rest)
        case _:
            near = did_you_mean(word, [*COMMANDS, *ALIASES]) or " Type /help for the commands."
            raise UsageError(f"unknown command {word!r}.{near}")
    return True


def set_parameter(conversation: Conversation, words: str) -> None:
    """`NAME VALUE`, `NAME=VALUE`, `NAME` alone to forget it, or nothing to show all. Raises UsageError."""
    given = conversation.given
    if not words:
        shown = [f"{name} {json.dumps(value, default=str)}" for name, value in given.items()]
        say(*(shown or ["nothing is set: the defaults of the model hold"]))
        return
    name, _, value = words.replace("=", " ", 1).partition(" ")
    name, value = name.removeprefix("--").replace("-", "_"), value.strip()
    known = SAMPLING_HELP.keys() - {"n"}  # a conversation goes on from one answer
    if name not in known:
        near = did_you_mean(name, known) or " See the sampling flags in jaxpaged chat --help."
        raise UsageError(f"there is no parameter {name!r} to set.{near}")
    if not value:
        given.pop(name, None)
        return
    annotation = typing.get_type_hints(SamplingParams)[name]
    try:
        read = [value] if essential_type(annotation) == list[str] else converter(annotation)(value)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{name}: {error}") from None
    SamplingParams(**{**given, name: read})  # refuses what is out of range
    given[name] = read


def say(*lines: str) -> None:
    """Lines for people, on standard error, no wider than the terminal."""
    print(fitted("\n".join(lines), columns_of(sys.stderr)), file=sys.stderr, flush=True)
