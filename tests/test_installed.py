"""How extras are installed is said in one way: no registry has jaxpaged."""

import re
import subprocess
import tomllib
from pathlib import Path

from jaxpaged.errors import how_to_install, is_installed

ROOT = Path(__file__).parents[1]
TEXTS = {".py", ".js", ".html", ".yaml", ".yml", ".toml", ".ipynb", ".service", ".proto", ""}


def files():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [ROOT / name for name in listed if Path(name).suffix in TEXTS and (ROOT / name).is_file()]


def test_a_module_is_found_without_importing_it():
    assert is_installed("json") and not is_installed("no_such_module") and not is_installed("no_such.module")


def test_an_extra_is_installed_from_the_source():
    assert how_to_install("s3") == "run pip install -e '.[s3]' in the folder of jaxpaged's source"


def test_no_file_asks_a_registry_for_jaxpaged():
    asked = re.compile(r"pip install (-\S+ )*['\"]?jaxpaged\b|install jaxpaged\[")
    wrong = [path.name for path in files() if path != Path(__file__) and asked.search(path.read_text(errors="replace"))]
    assert wrong == []


def test_every_extra_that_is_named_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.compile(r"""how_to_install\(['"]([\w-]+)|install (?:-e )?['"]\.\[([\w,-]+)\]""")
    for path in files():
        for found in named.findall(path.read_text(errors="replace")):
            assert set("".join(found).split(",")) <= extras.keys(), f"{path.name}: {found}"
