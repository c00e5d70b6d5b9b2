"""Guides begin with a command, say why a command is not run, and keep their promises about size and links."""

import re
from collections import Counter

import pytest

from jaxpaged.models import registry
from tests.guides.guide_blocks import FOLDER, GUIDES, ROOT, blocks_of, commands_of

BLOCKS = {guide: blocks_of(guide) for guide in GUIDES}
README = (ROOT / "README.md").read_text(encoding="utf-8")
LEFT_OUT = 24
"""Blocks that need a device, a store or a network. Let as few join them as can be."""


def test_commands_are_found_behind_pipes_variables_and_comments():
    script = """
X=1 jaxpaged serve --a '{"b": 1,
  "c": 2}'  # why
echo "jaxpaged chat" | jaxpaged generate && jaxpaged kv \\
  ls /tmp > out
"""
    assert list(commands_of(script)) == [
        ["jaxpaged", "serve", "--a", '{"b": 1,\n  "c": 2}'], ["jaxpaged", "generate"], ["jaxpaged", "kv", "ls", "/tmp"]
    ]  # fmt: skip


@pytest.mark.parametrize("guide", [guide for guide in GUIDES if guide.parent == FOLDER], ids=lambda guide: guide.stem)
def test_a_guide_begins_with_a_command_that_runs(guide):
    text = guide.read_text(encoding="utf-8")
    assert re.match(r"# [^\n]+\n\n```sh\n", text)
    assert BLOCKS[guide][0].reason is None and "jaxpaged" in BLOCKS[guide][0].text


def test_every_block_is_run_or_says_why_not():
    blocks = [block for found in BLOCKS.values() for block in found]
    assert {block.language for block in blocks} <= {"sh", "python", "yaml", "text"}
    reasons = Counter(block.reason for block in blocks if block.reason is not None)
    assert all(reason.startswith("needs ") for reason in reasons)
    assert reasons.total() <= LEFT_OUT, reasons
    assert len(blocks) - reasons.total() > 40


def test_the_index_has_every_guide():
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [guide.name for guide in GUIDES if guide.parent == FOLDER and f"({guide.name})" not in index] == []


def test_the_readme_is_a_front_door():
    assert len(README.encode()) <= 8192
    first_screen = README[: README.index("## Install")]
    assert "scripts/demo" in first_screen and "scripts/test" in first_screen
    assert first_screen.count("\n") < 40


def test_the_guide_to_models_has_every_architecture():
    guide = (FOLDER / "models.md").read_text(encoding="utf-8")
    assert [name for name in registry.MODELS if f"`{name}`" not in guide] == []
