"""Every `jaxpaged` command that a document, a help text or a recipe shows is one that the command line takes."""

import re
import shlex
from pathlib import Path

import pytest

from jaxpaged.entrypoints.cli import bench, chat_commands, command_line, generate, serve

ROOT = Path(__file__).parents[3]
COMMAND = re.compile(r"^(?:.*\| |#\s+)?\s*(jaxpaged (?:generate|chat|convert|serve|bench)\b[^|\n]*)", re.MULTILINE)


def shown_commands():
    recipes = [path.read_text(encoding="utf-8") for path in (ROOT / "configs").glob("*.yaml")]
    guides = [ROOT / "README.md", ROOT / "jaxpaged/entrypoints/cli/bench/README.md"]
    blocks = [
        block
        for guide in guides
        for block in re.findall(r"```\n(.*?)```", guide.read_text(encoding="utf-8"), re.DOTALL)
    ]
    lines = COMMAND.findall("\n".join([*recipes, *blocks, *(each.EPILOG for each in (generate, serve, *bench.KINDS))]))
    return [part.strip() for line in lines for part in re.split(r"&&|>", line)]


def test_the_documents_show_commands():
    assert len(shown_commands()) > 10


@pytest.mark.parametrize("command", shown_commands())
def test_a_shown_command_is_understood(command):
    words = shlex.split(command, comments=True)
    if words[0] == "jaxpaged":
        assert command_line().parse_args(words[1:]).command in ("generate", "chat", "convert", "serve", "bench")


def test_the_help_of_chat_names_its_commands(capsys):
    with pytest.raises(SystemExit):
        command_line().parse_args(["chat", "--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in chat_commands.COMMANDS)
