"""`jaxpaged kv`: a folder of pages seen, checked and pruned by hand."""

import json
import os
import time

import pytest

from jaxpaged.entrypoints.cli import main
from jaxpaged.kv_store import page_folder
from jaxpaged.kv_store.page import namespace
from tests.kv_store.pages import SPACE, key_of, page_of

OTHER = namespace(weights="v2")
SIZE = len(page_of(1)[2])
HOUR = 3600


def filled(root, secret=None):
    """Pages 0 to 4 of one namespace, used 0 to 4 hours ago, and page 9 of another, used 9 hours ago."""
    page_folder.write_config(root, SPACE, {"weights": "v1", "rope": {"theta": 1e4}})
    for number, space in [*((n, SPACE) for n in range(5)), (9, OTHER)]:
        name = page_folder.file_of(space, key_of(number))
        page_folder.write_page(root, name, page_of(number, secret, space)[1])
        used = time.time() - number * HOUR - 1
        os.utime(root / name, (used, used))
    return root


def left(root):
    return sorted(page_folder.key_of_file(page.name).block_hash[-1] for page in page_folder.all_pages(root))


def damaged(root, number):
    path = root / page_folder.file_of(SPACE, key_of(number))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return path


def test_namespaces_are_listed_with_sizes_and_ages(tmp_path, capsys):
    assert main(["kv", "ls", str(filled(tmp_path))]) == 0
    first, second, total = capsys.readouterr().out.splitlines()
    assert first.startswith(SPACE[:12]) and "5 pages" in first and "used 1 s to 4 h ago" in first
    assert "weights v1" in first and "rope" not in first
    assert second.startswith(OTHER[:12]) and "1 pages" in second and "9 h" in second
    assert total.startswith("2 namespaces, 6 pages, ")
    assert main(["kv", "list", str(tmp_path), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (lines[0]["namespace"], lines[0]["num_bytes"]) == (SPACE, 5 * SIZE)


def test_damaged_pages_are_named_and_removed(tmp_path, capsys):
    filled(tmp_path)
    assert main(["kv", "verify", str(tmp_path)]) == 0
    assert "6 pages are whole, 0 are not" in capsys.readouterr().out
    path = damaged(tmp_path, 3)
    other = tmp_path / page_folder.file_of(SPACE, key_of(7))
    other.write_bytes(page_of(7, space=OTHER)[2])  # a page of another model in this one's folder
    assert main(["kv", "verify", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert f"{path.name}: Layer 1 of the page is damaged" in said and f"{other.name}: The page is another's" in said
    assert "5 pages are whole, 2 are not" in said and path.exists()
    assert main(["kv", "verify", str(tmp_path), "--delete"]) == 1
    assert "2 removed" in capsys.readouterr().out and left(tmp_path) == [0, 1, 2, 4, 9]
    assert main(["kv", "verify", str(tmp_path)]) == 0


def test_signed_pages_are_verified_with_their_secret(tmp_path, capsys):
    store, file = filled(tmp_path / "store", b"ours"), tmp_path / "secret"
    file.write_bytes(b"ours\n")
    assert main(["kv", "verify", str(store)]) == 1
    assert main(["kv", "verify", str(store), "--secret-file", str(file)]) == 0
    file.write_bytes(b"\n")
    assert main(["kv", "verify", str(store), "--secret-file", str(file)]) == 2
    assert "is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "remaining"),
    [
        (["--older-than", "150m"], [0, 1, 2]),
        (["--max-size", str(2 * SIZE)], [0, 1]),
        (["--max-size", "0"], []),
        (["--max-size", "1G"], [0, 1, 2, 3, 4, 9]),
        (["--older-than", "5h", "--max-size", str(4 * SIZE)], [0, 1, 2, 3]),
        (["--namespace", SPACE[:12], "--older-than", "90m"], [0, 1, 9]),
        (["--namespace", OTHER], [0, 1, 2, 3, 4]),
        (["--max-size", "0", "--dry-run"], [0, 1, 2, 3, 4, 9]),
    ],
)
def test_what_was_used_longest_ago_goes(tmp_path, flags, remaining, capsys):
    filled(tmp_path)
    assert main(["kv", "prune", str(tmp_path), *flags]) == 0
    assert left(tmp_path) == remaining
    removed = 6 if "--dry-run" in flags else 6 - len(remaining)
    assert capsys.readouterr().out.startswith(f"{removed} of ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ls", "missing"], "missing cannot be read as a folder of pages: No such file or directory."),
        (["verify", "missing"], "cannot be read"),
        (["prune", "."], "Give --max-size, --older-than"),
        (["prune", ".", "--max-size", "-1"], "at least 0"),
        (["verify", ".", "--namespace", "123"], "'123' names 0 namespaces"),
        (["verify", ".", "--namespace", ""], "'' names 2 namespaces"),
        (["verify", ".", "--secret-file", "missing"], "The secret cannot be read"),
    ],
)
def test_what_cannot_be_done_is_said(tmp_path, monkeypatch, arguments, said, capsys):
    monkeypatch.chdir(filled(tmp_path))
    assert main(["kv", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--older-than", "7"], ["--older-than", "week"], ["--max-size", "much"]])
def test_ages_and_sizes_that_are_none(flags, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["kv", "prune", ".", *flags])
    assert "is not a" in capsys.readouterr().err
