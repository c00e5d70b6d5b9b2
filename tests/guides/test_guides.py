"""Guides begin with a command, say why a command is not run, and keep their promises about size and links."""

import re
from collections import Counter

import pytest

from jaxpaged.entrypoints.http import app
from jaxpaged.models.known import KNOWN
from tests.engine.fake_adapters import FakeBook
from tests.entrypoints.http.live_server import make_service
from tests.guides import model_tables, option_tables
from tests.guides.guide_blocks import FOLDER, GUIDES, ROOT, blocks_of, commands_of

BLOCKS = {guide: blocks_of(guide) for guide in GUIDES}
README = (ROOT / "README.md").read_text(encoding="utf-8")
LEFT_OUT = 23
"""Blocks that need a device, a store or a network. Let as few join them as can be."""


def test_commands_are_found_behind_pipes_variables_and_comments():
    script = """
X=1 jaxpaged serve --a '{"b": 1,
  "c": 2}'  # why
echo "jaxpaged chat" | jaxpaged generate && jaxpaged kv \\
  ls /tmp > out
"""
    assert list(commands_of(script)) == [
        ["jaxpaged", "serve", "--a", '{"b": 1,\n  "c": 2}'],
        ["jaxpaged", "generate"],
        ["jaxpaged", "kv", "ls", "/tmp"],
    ]


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


def test_the_guide_to_models_and_the_readme_have_every_architecture():
    assert model_tables.written() in model_tables.GUIDE.read_text(encoding="utf-8"), (
        "run python -m tests.guides.model_tables"
    )
    assert f"**{len(KNOWN)} architectures**" in README


def test_the_guide_to_migrating_has_vllms_options_as_the_code_takes_them():
    text = option_tables.GUIDE.read_text(encoding="utf-8")
    assert option_tables.written() in text, "run python -m tests.guides.option_tables"
    names = {name.replace("_", "-") for name in option_tables.FOREIGN}
    assert [name for name in names if f"`--{name}`" not in text] == []


def rows_of(text, heading):
    """Pairs of a table's first two cells below a heading."""
    part = re.split(r"^## ", text.partition(f"\n## {heading}\n")[2], maxsplit=1, flags=re.M)[0]
    return [tuple(cell.strip() for cell in row.split("|")[1:3]) for row in part.splitlines() if row.startswith("| `")]


@pytest.mark.parametrize(
    ("here", "made", "there"),
    [
        ("same", app.public_endpoints, True),
        ("on the admin port", app.admin_endpoints, True),
        ("not there", app.public_endpoints, False),
    ],
)
def test_the_guide_to_migrating_is_right_about_endpoints(here, made, there):
    service = make_service({"allowed_lora_dirs": ("/adapters",), "allowed_weight_dirs": ("/weights",)}, book=FakeBook())
    known = {endpoint.path for endpoint in made(service)}
    rows = rows_of(option_tables.GUIDE.read_text(encoding="utf-8"), "Endpoints")
    named = {path for names, what in rows if here in what for path in re.findall(r"`(/\S+)`", names)}
    assert named and (named <= known if there else not named & known), (named, known)
