"""The fenced blocks of the README and the guides, and the commands in them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "jaxpaged/guides"
GUIDES = [ROOT / "README.md", *sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")]
FENCE = re.compile(r"(?:^<!-- skip: (?P<reason>.*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")


@dataclass(frozen=True)
class Block:
    """`reason` says why the tests cannot run it."""

    language: str
    text: str
    reason: str | None


def blocks_of(path: Path) -> list[Block]:
    found = FENCE.finditer(path.read_text(encoding="utf-8"))
    return [Block(each["language"], each["text"], each["reason"]) for each in found]


def commands_of(text: str) -> Iterator[list[str]]:
    """Words of each call of `jaxpaged` in a shell script, without variables before it and comments behind it."""
    script = re.sub(r"(^|\s)# .*$", "", text.replace("\\\n", " "), flags=re.M)
    lexer = shlex.shlex(script, posix=True, punctuation_chars="();<>|&\n")
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t\r", "", True
    command: list[str] = []
    for word in [*lexer, "\n"]:
        if set(word) <= set("();<>|&\n"):
            if command[:1] == ["jaxpaged"]:
                yield command
            command = []
        elif command or not ASSIGNMENT.fullmatch(word):
            command.append(word)
