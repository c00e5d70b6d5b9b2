"""`jaxpaged chat`: a conversation in the terminal, or one line a turn from a pipe.

Every turn sends the whole conversation; the engine's prefix cache still holds all but the newest message.
"""

import argparse
import sys
from typing import Any

from jaxpaged.entrypoints.cli.flags import Parser, add_engine_flags, add_sampling_flags

COMMANDS = {
    "/help": "show these commands",
    "/clear": "forget the conversation, keep the system message",
    "/system": "/system TEXT sets the system message and forgets the conversation",
    "/exit": "leave; so does Ctrl-D",
}


def add_parser(commands: Any) -> None:
    parser: Parser = commands.add_parser(
        "chat",
        help="hold a conversation",
        usage="%(prog)s [options]",
        epilog="commands:\n"
        + "\n".join(f"  {name:<9} {text}" for name, text in COMMANDS.items())
        + "\n\nCtrl-C stops an answer. Piped in, every line is one turn, and only the answers are printed.",
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message for the conversation")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and debug messages")
    add_sampling_flags(parser)
    add_engine_flags(parser)
    parser.set_defaults(run=run, command_parser=parser)


def run(args: argparse.Namespace) -> int:
    """Hold the conversation. Returns the exit status: 1 if a turn of a pipe failed."""
    from jaxpaged.entrypoints.cli.conversation import Conversation
    from jaxpaged.entrypoints.cli.engine import has_chat_template, start
    from jaxpaged.entrypoints.cli.flags import sampling_options
    from jaxpaged.errors import UsageError

    given = sampling_options(args)
    if given.get("n", 1) != 1:
        raise UsageError(f"-n is {given['n']}, but a conversation goes on from one answer. Leave it out.")
    engine, progress = start(args)
    try:
        progress.close()
        if not has_chat_template(engine):
            raise UsageError("the model has no chat template. Give one with --chat-template, or use generate.")
        conversation = Conversation(engine, given, args.system)
        if sys.stdin.isatty():
            talk(conversation)
            return 0
        failures = sum(not turn(conversation, line.rstrip("\n")) for line in sys.stdin)
        return 1 if failures else 0
    except Leave:
        return 0
    finally:
        engine.shutdown()


class Leave(Exception):
    """The user said /exit."""


def talk(conversation: Any) -> None:
    """Read turns with line editing until the end of input."""
    import readline  # noqa: F401  input() edits lines and remembers them once this is imported

    print("Type a message, /help for commands, Ctrl-D to leave.", file=sys.stderr)
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        turn(conversation, line)


def turn(conversation: Any, line: str) -> bool:
    """A command, or a message and its answer. False when it failed; the failure has been reported."""
    if not line.strip():
        return True
    word, _, rest = line.strip().partition(" ")
    if word.startswith("/"):
        return command(conversation, word, rest.strip())
    return conversation.say(line)


def command(conversation: Any, word: str, rest: str) -> bool:
    from jaxpaged.entrypoints.cli.terminal import complain
    from jaxpaged.errors import did_you_mean

    if word == "/exit":
        raise Leave
    if word == "/help":
        print("\n".join(f"{name:<9} {text}" for name, text in COMMANDS.items()), file=sys.stderr)
    elif word in ("/clear", "/system"):
        conversation.clear(rest if word == "/system" else conversation.system)
    else:
        near = did_you_mean(word, COMMANDS) or " Type /help for the commands."
        complain("jaxpaged chat", f"unknown command {word!r}.{near}")
        return False
    return True
