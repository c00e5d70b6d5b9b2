"""What must be touched to add something of each kind, and whether the table in ARCHITECTURE.md says so.

An example of each kind stands for the next one: the product files that name it are those that the next one touches,
but for copies that are generated. This module imports nothing of the product.
"""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parent.parent / "jaxpaged"
SUFFIXES = {".py", ".js", ".html", ".proto"}
GENERATED = re.compile(r"_pb2(_grpc)?\.py$")
PATH = re.compile(r"`([\w./-]+(?:/|\.\w+))`")


class Probe(NamedTuple):
    """A row of the table, an example of its kind by the word that names it, and how many files may name it."""

    row: str
    word: str
    most: int


PROBES = [
    Probe("a model", "SEED_OSS", 2),
    Probe("a model", "SeedOssForCausalLM", 3),
    Probe("a format of quantised weights", "modelopt", 4),
    Probe("a kind of cache", "LatentSpec", 5),
    Probe("a kind of cache", "StateSpec", 5),
    Probe("a sampling parameter", "min_p", 6),
    Probe("a sampling parameter", "frequency_penalty", 6),
    Probe("a sampling parameter", "bad_words", 6),
    Probe("a sampling parameter", "thinking_token_budget", 6),
    Probe("an engine option", "num_short_request_rows", 4),
    Probe("an HTTP endpoint", "ClassifyRequest", 5),
    Probe("a way to find LoRA adapters", "HubResolver", 2),
    Probe("a way to find LoRA adapters", "lora_resolver_repos", 2),
    Probe("a KV connector", "MultiConnector", 6),
    Probe("a KV connector", "PeersConnector", 3),
]


def files_naming(word: str) -> list[str]:
    """Product files in which the word stands, relative to the package."""
    pattern = re.compile(rf"\b{word}\b")
    paths = [path for path in sorted(PACKAGE.rglob("*")) if path.suffix in SUFFIXES and not GENERATED.search(path.name)]
    return [path.relative_to(PACKAGE).as_posix() for path in paths if pattern.search(path.read_text(encoding="utf-8"))]


def rows() -> dict[str, list[str]]:
    """What is added -> the files and folders that its row of the table names."""
    lines = (PACKAGE / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()
    cells = [line.strip("| ").split(" | ", 1) for line in lines[lines.index("| to add | touch |") + 2 :] if "|" in line]
    return {kind: PATH.findall(touched) for kind, touched in cells}


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: f"{probe.row}: {probe.word}")
def test_few_files_must_be_touched_and_the_table_names_them(probe):
    touched, named = files_naming(probe.word), rows()[probe.row]
    assert touched, f"nothing is called {probe.word} any more. Choose another example."
    assert len(touched) <= probe.most, f"derive some of these from the declaration of {probe.word}: {touched}"
    left_out = [file for file in touched if not any(file == each or file.startswith(each) for each in named)]
    assert not left_out, f"name these in the row {probe.row!r} of ARCHITECTURE.md, or derive them: {left_out}"


def test_the_table_names_files_that_exist():
    named = [path for paths in rows().values() for path in paths if "/" in path]
    assert len(named) > 20
    assert [path for path in named if not any((base / path).exists() for base in (PACKAGE, PACKAGE.parent))] == []
