"""A folder of pages on a disk: how files are named, written, found, and removed.

    <root>/<12 digits of the namespace>/config.json             the whole namespace, and the facts behind it
    <root>/<12 digits of the namespace>/<3 digits of the hash>/<hash>_g<group>.safetensors
    <root>/<12 digits of the namespace>/.writing/...            files that are not complete yet
    <root>/.lock                                                held by whoever makes room

A file appears under its name when it is complete, by renaming. Names follow from content, so several engines may write
into one folder: the last one wins, with equal bytes. A file's modification time is the time of its last use. Whoever
writes holds a lock on the unfinished file, so that one without a lock was left behind by a writer that was killed.
Nothing here knows capacities, or what is in a page.
"""

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpaged.errors import ConfigError
from jaxpaged.kv_store.buffers import Buffer
from jaxpaged.kv_store.direct_io import write_around_cache, write_through_cache
from jaxpaged.kv_store.page import PageKey
from jaxpaged.kv_store.tier_events import STORAGE, TierEventLog

SPACE_DIGITS = 12
SUFFIX = ".safetensors"
WRITING, CONFIG, LOCK = ".writing", "config.json", ".lock"
SPACE_NAME = re.compile(rf"[0-9a-f]{{{SPACE_DIGITS}}}")
FANOUT_NAME = re.compile("[0-9a-f]{1,3}")
PAGE_NAME = re.compile(rf"([0-9a-f]{{2,128}})_g(\d{{1,4}}){re.escape(SUFFIX)}")


@dataclass(frozen=True)
class PageFile:
    """One file. `name` is its path below the root; `used_ns` the time of its last use."""

    name: str
    num_bytes: int
    used_ns: int


def file_of(space: str, key: PageKey) -> str:
    """The path below the root of a page in the namespace `space`."""
    digits = key.block_hash.hex()
    return f"{space[:SPACE_DIGITS]}/{digits[:3]}/{digits}_g{key.group}{SUFFIX}"


def key_of_file(name: str) -> PageKey | None:
    """The key that a file's name says, if it is a page's."""
    match = PAGE_NAME.fullmatch(name.rpartition("/")[2])
    return PageKey(bytes.fromhex(match[1]), int(match[2])) if match and len(match[1]) % 2 == 0 else None


def teller(namespace: str, log: TierEventLog) -> Callable[[str, bool], None]:
    """What tells a log of the files of one namespace that come and go."""

    def tell(name: str, is_there: bool) -> None:
        key = key_of_file(name)
        if key is not None and name.startswith(namespace[:SPACE_DIGITS]):
            log.note(STORAGE, key, is_there)

    return tell


def spaces(root: Path) -> list[str]:
    """The namespaces of a folder, by their first digits. Raises OSError where it cannot be read."""
    with os.scandir(root) as entries:
        return sorted(entry.name for entry in entries if SPACE_NAME.fullmatch(entry.name) and entry.is_dir())


def fanouts(root: Path, space: str) -> list[tuple[str, int]]:
    """The folders of pages of a namespace, as paths below the root, each with the time when it changed last."""
    found = []
    with contextlib.suppress(FileNotFoundError), os.scandir(root / space) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if FANOUT_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                    found.append((f"{space}/{entry.name}", entry.stat().st_mtime_ns))
    return found


def pages_in(root: Path, fanout: str) -> Iterator[PageFile]:
    """The pages of one folder. Files that vanish meanwhile are left out."""
    with contextlib.suppress(FileNotFoundError), os.scandir(root / fanout) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if key_of_file(entry.name) and entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    yield PageFile(f"{fanout}/{entry.name}", status.st_size, status.st_mtime_ns)


def all_pages(root: Path) -> list[PageFile]:
    """Every page of a folder, those used longest ago first."""
    found = [page for space in spaces(root) for fanout, _ in fanouts(root, space) for page in pages_in(root, fanout)]
    return sorted(found, key=lambda page: page.used_ns)


def write_page(root: Path, name: str, buffers: Sequence[Buffer], *, around_cache: bool = False) -> None:
    """Write a file and let it appear under its name. Raises OSError, and leaves nothing behind then."""
    try:
        write_once(root, name, buffers, around_cache)
    except (FileNotFoundError, BlockingIOError):  # another engine, which starts, took it for a leftover before its lock
        write_once(root, name, buffers, around_cache)


def write_once(root: Path, name: str, buffers: Sequence[Buffer], around_cache: bool) -> None:
    path = root / name
    unfinished = root / name.partition("/")[0] / WRITING / f"{path.name}.{os.getpid()}.{time.monotonic_ns()}"
    try:
        file = open_new(unfinished)
    except FileNotFoundError:
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        file = open_new(unfinished)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (write_around_cache if around_cache else write_through_cache)(file, buffers)
        os.utime(file, ns=(now := time.time_ns(), now))  # what the file system itself notes is coarser
        try:
            unfinished.rename(path)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    finally:
        os.close(file)


def open_new(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def remove_leftovers(root: Path) -> int:
    """Remove what killed writers left unfinished. How many files that were. Raises OSError."""
    removed = 0
    for space in spaces(root):
        with contextlib.suppress(FileNotFoundError), os.scandir(root / space / WRITING) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError, BlockingIOError):
                    file = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its writer lives
                        os.unlink(entry.path)
                        removed += 1
                    finally:
                        os.close(file)
    return removed


@contextlib.contextmanager
def making_room(root: Path, patience_s: float = 1.0) -> Iterator[None]:
    """Hold the lock of whoever evicts. After `patience_s` it goes on without: two of them at worst evict too much."""
    try:
        file = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:  # a read-only folder: nothing can be removed either, which its caller is about to find
        yield
        return
    try:
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(0.01)
        yield
    finally:
        os.close(file)


def write_config(root: Path, space: str, facts: Mapping[str, Any]) -> None:
    """Say beside the pages which namespace they are of. Raises OSError, or ConfigError where it is another's."""
    said = read_config(root, space[:SPACE_DIGITS])
    if said.get("namespace", space) != space:
        raise ConfigError(
            f"{root / space[:SPACE_DIGITS]} belongs to the namespace {said['namespace']!r:.80}, not {space!r}; "
            "both begin alike. Choose another folder."
        )
    if said != (wanted := {"namespace": space, "facts": dict(facts)}):
        text = json.dumps(wanted, indent=2, default=str) + "\n"
        write_page(root, f"{space[:SPACE_DIGITS]}/{CONFIG}", [text.encode()])


def read_config(root: Path, space: str) -> dict[str, Any]:
    """What is said about a namespace; nothing where that is missing or damaged."""
    try:
        said = json.loads((root / space / CONFIG).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}
