"""What a user of a chat can type besides messages: commands that begin with /, and messages of several lines."""

import argparse
import json
import sys
import typing
from collections.abc import Callable

from jaxpaged.entrypoints.cli.conversation import Conversation
from jaxpaged.entrypoints.option_flags import converter, essential_type
from jaxpaged.entrypoints.terminal import columns_of, complain, fitted
from jaxpaged.errors import UsageError, did_you_mean
from jaxpaged.sampling_params import SAMPLING_HELP, SamplingParams

QUOTES = '"""'
COMMANDS = {
    "/help": "show these commands",
    "/regen": "answer the last message again (with temperature 0, or a seed, it is the same answer)",
    "/set": "/set temperature 0.7 sets a sampling parameter, /set temperature forgets it, /set shows all",
    "/system": "/system TEXT sets the system message and forgets the conversation",
    "/clear": "forget the conversation, keep the system message",
    "/save": "/save FILE writes the conversation as a line of JSON that generate --file reads",
    "/bye": "leave; so do /exit and Ctrl-D",
}
ALIASES = {"/exit": "/bye", "/quit": "/bye", "/?": "/help"}


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
