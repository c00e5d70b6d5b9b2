"""Files written and read around the operating system's page cache, where a file system lets that be.

What goes through the page cache stays in memory until others need the room: beside an engine these are gigabytes of
pages that its own host memory holds as well. Around it there is one copy less, too. Of files of 4 to 10 MiB on a
virtual disk 1.9 to 2.3 GB/s were written, and 2.0 to 2.7 read, where it was 1.0 to 1.5 and 1.1 to 1.2 through a cache
that did not have them, and 6 where it had (`scripts/bench_kv_tiers.py`); of 1 MiB as many as through it.
"""

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence

import numpy as np

from jaxpaged.kv_store.buffers import Buffer, aligned_empty, bytes_of, total_bytes

SMALLEST = 1 << 20
"""Bytes of a file that is worth it: the disk is waited for."""
PART_BYTES = 8 << 20
"""That are written at a time, from memory that is aligned as disks want it."""
BLOCK = mmap.PAGESIZE
REFUSED = {errno.EINVAL, errno.EOPNOTSUPP}


def read_all(file: int, size: int, *, around_cache: bool) -> np.ndarray:
    """The first `size` bytes of a file, or as many as it has. Raises OSError."""
    room = aligned_empty(-(-size // BLOCK) * BLOCK, BLOCK)
    is_direct, done = around_cache and size >= SMALLEST and set_direct(file, True), 0
    while done < size:
        try:
            count = os.readv(file, [room[done:]])
        except OSError as error:
            if not is_direct or error.errno not in REFUSED:
                raise
            set_direct(file, is_direct := False)
            continue
        if not count:
            break
        done += count
    return room[: min(done, size)]


def write_around_cache(file: int, buffers: Sequence[Buffer]) -> None:
    """Write a new file, which is open for writing. Raises OSError."""
    size = total_bytes(buffers)
    if size < SMALLEST or not set_direct(file, True):
        write_through_cache(file, buffers)
        return
    try:
        for part in aligned_parts(buffers, size):
            while part:
                part = part[os.write(file, part) :]
        os.ftruncate(file, size)
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        set_direct(file, False)  # such as on a file system that has larger blocks
        os.lseek(file, 0, os.SEEK_SET)
        write_through_cache(file, buffers)


def set_direct(file: int, is_direct: bool) -> bool:
    """Whether the file goes around the page cache from now on, as is wanted."""
    direct = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    with contextlib.suppress(OSError):
        fcntl.fcntl(file, fcntl.F_SETFL, flags | direct if is_direct else flags & ~direct)
        return bool(direct)
    return False


def aligned_parts(buffers: Sequence[Buffer], size: int) -> Iterator[memoryview]:
    """All bytes in parts that begin and end at blocks, with zeros behind the last. Each is gone with the next."""
    room = aligned_empty(min(-(-size // BLOCK) * BLOCK, PART_BYTES), BLOCK)
    part, filled = memoryview(room), 0
    for buffer in buffers:
        view = bytes_of(buffer)
        while view:
            count = min(len(view), len(part) - filled)
            part[filled : filled + count] = view[:count]
            view, filled = view[count:], filled + count
            if filled == len(part):
                yield part
                filled = 0
    if filled:
        end = -(-filled // BLOCK) * BLOCK
        room[filled:end] = 0
        yield part[:end]


def write_through_cache(file: int, buffers: Sequence[Buffer]) -> None:
    for buffer in buffers:
        view = bytes_of(buffer)
        while view:
            view = view[os.write(file, view) :]
