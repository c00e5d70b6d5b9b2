"""Every command, option and file that a document, a help text or a recipe names is one that is there."""

import argparse
import re
from pathlib import Path

import pytest

from jaxpaged.entrypoints.cli import chat, command_line, generate, serve
from jaxpaged.tools import bench
from tests.guides.guide_blocks import commands_of

ROOT = Path(__file__).parents[3]
COMMAND = re.compile(r"^(?:.*\| |#\s+)?\s*(jaxpaged (?:generate|chat|convert|serve|bench)\b[^|\n]*)", re.MULTILINE)
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
METRIC = re.compile(r"`(?:vllm|jaxpaged):(\w+)`")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
FILE = re.compile(r"`(\w[\w./-]*\.(?:py|ipynb|md|proto|yaml))`")
DOCUMENTS = [
    ROOT / "README.md",
    *(path for folder in ("configs", "jaxpaged", "pallas_kernels") for path in sorted((ROOT / folder).rglob("*.md"))),
    *sorted((ROOT / "tests").glob("*.md")),
]
TEXT = {path: path.read_text(encoding="utf-8") for path in DOCUMENTS}


def shown_commands():
    """Words of commands in documents, and of those in recipes and help texts, which have one a line."""
    for text in TEXT.values():
        for block in BLOCK.findall(text):
            yield from commands_of(block)
    recipes = [path.read_text(encoding="utf-8") for path in (ROOT / "configs").glob("*.yaml")]
    lines = COMMAND.findall("\n".join([*recipes, *(each.EPILOG for each in (generate, serve, *bench.KINDS))]))
    for line in lines:
        yield from commands_of(line)


def test_the_documents_show_commands():
    assert len(list(shown_commands())) > 80


@pytest.mark.parametrize("command", list(shown_commands()), ids=" ".join)
def test_a_shown_command_is_understood(command):
    assert command_line().parse_args(command[1:]).command == command[1]


def test_the_help_of_chat_names_its_commands(capsys):
    with pytest.raises(SystemExit):
        command_line().parse_args(["chat", "--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in chat.COMMANDS)


def options_of(parser):
    """Of a command and of those below it."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from options_of(command)


def test_every_option_that_a_document_names_exists():
    scripts = [path for path in (ROOT / "scripts").rglob("*") if path.suffix in ("", ".py") and path.is_file()]
    scripts += (ROOT / "tests/kv_store/lmcache").glob("*.py")  # which start LMCache's own server
    theirs = {option for path in scripts for option in OPTION.findall(path.read_text(encoding="utf-8"))}
    known = {*options_of(command_line()), *theirs}
    assert [
        (path.name, option) for path, text in TEXT.items() for option in OPTION.findall(text) if option not in known
    ] == []


def test_every_file_that_a_document_names_exists():
    """By its whole path, or by the end of one, as in `core/scheduler.py`."""
    folders = [ROOT / name for name in ("configs", "jaxpaged", "pallas_kernels", "scripts", "tests")]
    files = [path for folder in folders for path in folder.rglob("*.*")]
    ends = {"/".join(path.parts[-count:]) for path in files for count in range(1, 6)}
    named = [(path.name, name) for path, text in TEXT.items() for name in FILE.findall(text)]
    assert len(named) > 50
    assert [pair for pair in named if pair[1] not in ends] == []


def test_every_metric_that_a_document_names_exists():
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "jaxpaged").rglob("*.py"))
    known = {re.sub(r"_total$", "", name) for name in re.findall(r"\w+", code)}
    named = [(path.name, name.removesuffix("_total")) for path, text in TEXT.items() for name in METRIC.findall(text)]
    assert len(named) > 10
    assert [each for each in named if each[1] not in known] == []
