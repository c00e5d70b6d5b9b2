"""Keeps folders of GGUF files while they are used, and removes old ones.

A process that uses a folder has a lock on a file in it until it ends; whoever removes a folder has that lock to itself.
Those of files that are gone, or were replaced, are removed; of the others those that were used last stay, up to a
number of bytes.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from jaxpaged.params.gguf_folder.places_file import is_gguf_folder

VERSION = 3
"""Of what is written: a folder of another one is made anew."""
MAX_BYTES = 1 << 30
"""Of all folders of a cache; each has a few megabytes."""
LOCK = ".in-use"
MAKING = ".making-"
"""What names of folders begin with that are not whole yet."""
MAKING_SECONDS = 86_400
"""After which what is not whole has been left behind."""
NAME = re.compile(r".+-([0-9a-f]{16})")


def identity(parts: Sequence[Path]) -> str:
    """A name of the files as they are now."""
    facts = [(str(part.resolve()), part.stat()) for part in parts]
    lines = [f"{name} {stat.st_size} {stat.st_mtime_ns} {stat.st_ino}" for name, stat in facts]
    return hashlib.sha256("\n".join([str(VERSION), *lines]).encode()).hexdigest()[:16]


def held(folder: Path) -> bool:
    """Whether there is such a folder, which nobody removes then until this process ends."""
    while is_gguf_folder(folder):
        try:
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:  # it was removed just now
            continue
        except OSError:  # a folder that cannot be written is removed by nobody
            return True
        fcntl.flock(lock, fcntl.LOCK_SH)
        if is_at(lock, folder):
            os.utime(lock)
            return True  # the lock ends with the process, which closes the file
        os.close(lock)
    return False


def remove_old(cache: Path, max_bytes: int = MAX_BYTES) -> None:
    """Remove folders that nobody needs. What cannot be removed stays."""
    for folder in cache.glob(f"{MAKING}*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_mtime < time.time() - MAKING_SECONDS:
                shutil.rmtree(folder)
    total = 0
    for folder in sorted(cache.iterdir(), key=last_use, reverse=True):
        if NAME.fullmatch(folder.name) and is_gguf_folder(folder):
            total += size_of(folder)
            if total > max_bytes or not is_of_its_files(folder):
                remove(folder)


def remove(folder: Path) -> None:
    """Unless a process uses it."""
    with contextlib.suppress(OSError):
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at(lock, folder):
                gone = folder.with_name(f"{MAKING}{folder.name}-{os.getpid()}")
                folder.rename(gone)
                shutil.rmtree(gone)
        finally:
            os.close(lock)


def is_at(lock: int, folder: Path) -> bool:
    """Whether an open file is the lock of what has a folder's name now."""
    try:
        return os.path.samestat(os.fstat(lock), os.stat(folder / LOCK))
    except FileNotFoundError:
        return False


def is_of_its_files(folder: Path) -> bool:
    """Whether the files that it was made of are as they were."""
    found = NAME.fullmatch(folder.name)
    try:
        return found is not None and identity(sorted(folder.glob("*.gguf"))) == found[1]
    except OSError:
        return False


def last_use(folder: Path) -> float:
    for path in (folder / LOCK, folder):
        with contextlib.suppress(OSError):
            return path.stat().st_mtime
    return 0.0


def size_of(folder: Path) -> int:
    """Bytes of what is in a folder itself: links count as links."""
    return sum(path.lstat().st_size for path in folder.iterdir())
