"""Folders of GGUF files that nobody needs are removed, and none that a process uses."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxpaged.params.gguf_folder import keeping
from jaxpaged.params.gguf_folder.folder import make_folder
from jaxpaged.params.gguf_folder.keeping import LOCK, MAKING, held, remove_old, size_of
from tests.params.gguf_folder.gguf_checkpoints import write_gguf_checkpoint

MAKE = """
import sys
from pathlib import Path
from jaxpaged.params.gguf_folder.folder import make_folder
for name in sys.argv[2:]:
    print(make_folder(Path(name), Path(sys.argv[1])), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def used(tmp_path, cache):
    """Has a process of its own use the folders of files: (process, folders)."""
    processes = []

    def use(*names):
        paths = [tmp_path / f"{name}.gguf" for name in names]
        for path in paths:
            if not path.exists():
                write_gguf_checkpoint("llama", path)
        command = [sys.executable, "-c", MAKE, cache, *paths]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        return process, [Path(process.stdout.readline().strip()) for _ in names]

    yield use
    for process in processes:
        ended(process)


def ended(process):
    process.communicate()


def test_what_is_used_stays_and_what_was_used_last(used, cache, tmp_path):
    """Beyond the bytes that there may be, oldest first; and a folder is there again when it is asked for."""
    process, (a, b) = used("a", "b")
    remove_old(cache, max_bytes=0)
    assert a.exists() and b.exists()
    ended(process)
    now = time.time()
    os.utime(a / LOCK, (now + 10, now + 10))
    remove_old(cache, max_bytes=size_of(a) + size_of(b))
    assert a.exists() and b.exists()
    remove_old(cache, max_bytes=size_of(a))
    assert a.exists() and not b.exists() and len(list(cache.iterdir())) == 1
    assert make_folder(tmp_path / "b.gguf", cache) == b and b.exists()


def test_those_of_files_that_are_gone_or_were_replaced_are_removed(used, cache, tmp_path):
    process, (_, _, c) = used("a", "b", "c")
    ended(process)
    (tmp_path / "a.gguf").unlink()
    os.utime(tmp_path / "b.gguf", ns=(1, 1))
    made = make_folder(write_gguf_checkpoint("llama", tmp_path / "d.gguf"), cache)
    assert {*cache.iterdir()} == {c, made}


def test_other_things_in_the_cache_stay(cache):
    cache.mkdir()
    for name in ("notes-0123456789abcdef", f"{MAKING}new", f"{MAKING}old"):
        (cache / name).mkdir()
    (cache / "file-0123456789abcdef").write_text("")
    os.utime(cache / f"{MAKING}old", (1, 1))
    remove_old(cache, max_bytes=0)
    assert {path.name for path in cache.iterdir()} == {
        "notes-0123456789abcdef",
        "file-0123456789abcdef",
        f"{MAKING}new",
    }


def test_a_folder_that_is_removed_while_it_is_taken_is_not_held(used, cache, monkeypatch):
    process, (folder,) = used("a")
    ended(process)
    opened = os.open

    def open_late(path, *options):
        lock = opened(path, *options)
        if folder.exists():
            monkeypatch.setattr(keeping.os, "open", opened)
            remove_old(cache, max_bytes=0)
        return lock

    monkeypatch.setattr(keeping.os, "open", open_late)
    assert not held(folder) and not folder.exists()
