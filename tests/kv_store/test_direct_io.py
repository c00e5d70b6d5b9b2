"""Files written and read around the page cache: the same bytes, whatever a file system says to it."""

import errno
import fcntl
import os

import numpy as np
import pytest

from jaxpaged.kv_store import direct_io
from jaxpaged.kv_store.direct_io import BLOCK, aligned_parts, read_all, write_around_cache

BUFFERS = [np.random.default_rng(n).integers(0, 255, size, np.uint8) for n, size in enumerate((100, 3 * BLOCK + 5, 7))]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(direct_io, "SMALLEST", 2 * BLOCK)
    monkeypatch.setattr(direct_io, "PART_BYTES", 2 * BLOCK)


def is_direct(file):
    return bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)


@pytest.fixture
def file(tmp_path):
    """One for which direct writes can be asked."""
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield file
    os.close(file)


def is_cached(path):
    """Whether the beginning of a file is in the page cache."""
    with open(path, "rb", buffering=0) as file:
        try:
            return os.preadv(file.fileno(), [bytearray(BLOCK)], 0, os.RWF_NOWAIT) == BLOCK
        except BlockingIOError:
            return False
        except OSError:
            pytest.skip("the file system of temporary folders is one in memory")


def read(path, size, around_cache):
    with open(path, "rb", buffering=0) as file:
        return read_all(file.fileno(), size, around_cache=around_cache)


@pytest.mark.parametrize("extra", [0, 1, BLOCK - 112, BLOCK - 111, 2 * BLOCK])
def test_all_bytes_are_written_and_nothing_behind_them(file, tmp_path, extra):
    buffers = [*BUFFERS, bytes(range(256)) * (extra // 256) + bytes(extra % 256)]
    whole = b"".join(map(bytes, buffers))
    write_around_cache(file, buffers)
    assert (tmp_path / "file").read_bytes() == whole
    for around_cache in (True, False):
        assert bytes(read(tmp_path / "file", len(whole), around_cache)) == whole
        assert bytes(read(tmp_path / "file", len(whole) + BLOCK, around_cache)) == whole, "it is no longer"
        assert bytes(read(tmp_path / "file", 2 * BLOCK + 1, around_cache)) == whole[: 2 * BLOCK + 1]


def test_what_is_large_leaves_nothing_in_the_page_cache_and_what_is_small_is_not_waited_for(file, tmp_path):
    write_around_cache(file, BUFFERS)
    if not is_direct(file):
        pytest.skip("the file system of temporary folders has no direct writes")
    assert read(tmp_path / "file", 3 * BLOCK, True).ctypes.data % BLOCK == 0 and not is_cached(tmp_path / "file")
    read(tmp_path / "file", 3 * BLOCK, False)
    assert is_cached(tmp_path / "file")
    with open(tmp_path / "small", "w+b", buffering=0) as other:
        write_around_cache(other.fileno(), [bytes(BLOCK)])
        assert not is_direct(other.fileno()) and is_cached(tmp_path / "small")


def test_where_a_file_system_does_not_let_that_be_files_are_written_as_ever(file, tmp_path, monkeypatch):
    control = fcntl.fcntl

    def refuses(number, command, *flags):
        if command == fcntl.F_SETFL:
            raise OSError(errno.EINVAL, "no")
        return control(number, command, *flags)

    monkeypatch.setattr(fcntl, "fcntl", refuses)
    write_around_cache(file, BUFFERS)
    assert (tmp_path / "file").read_bytes() == b"".join(map(bytes, BUFFERS)) and not is_direct(file)


def test_what_a_file_system_refuses_half_way_is_written_anew(file, tmp_path, monkeypatch):
    write, seen = os.write, []

    def refuses_the_second(number, part):
        seen.append(len(part))
        if len(seen) == 2:
            raise OSError(errno.EINVAL, "no")
        return write(number, part)

    monkeypatch.setattr(direct_io, "set_direct", lambda number, is_direct: True)
    monkeypatch.setattr(direct_io.os, "write", refuses_the_second)
    write_around_cache(file, BUFFERS)
    assert len(seen) == 2 + len(BUFFERS) and (tmp_path / "file").read_bytes() == b"".join(map(bytes, BUFFERS))


def test_what_a_file_system_refuses_to_read_so_is_read_as_ever(file, tmp_path, monkeypatch):
    whole, readv, seen = b"".join(map(bytes, BUFFERS)), os.readv, []
    (tmp_path / "file").write_bytes(whole)

    def refuses_the_first(number, buffers):
        seen.append(is_direct(number))
        if len(seen) == 1:
            raise OSError(errno.EINVAL, "no")
        return readv(number, buffers)

    monkeypatch.setattr(direct_io.os, "readv", refuses_the_first)
    assert bytes(read(tmp_path / "file", len(whole), True)) == whole and not any(seen[1:])
    seen.clear()
    with pytest.raises(OSError, match="no"):
        read(tmp_path / "file", len(whole), False)


def test_a_full_disk_is_told(file, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(direct_io.os, "write", full)
    with pytest.raises(OSError, match="full"):
        write_around_cache(file, BUFFERS)


def test_parts_begin_and_end_at_blocks():
    parts = [
        (part.nbytes, np.frombuffer(part, np.uint8).ctypes.data % BLOCK) for part in aligned_parts(BUFFERS, 1 << 20)
    ]
    assert parts == [(2 * BLOCK, 0), (2 * BLOCK, 0)]
