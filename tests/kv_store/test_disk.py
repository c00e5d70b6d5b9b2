"""The tier on a disk: what outlives a process, what several share, and every way in which a disk lets us down."""

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import closing

import pytest

from jaxpaged.errors import ConfigError
from jaxpaged.kv_store import direct_io, page_folder
from jaxpaged.kv_store.disk import DiskTier
from jaxpaged.kv_store.page import namespace
from jaxpaged.kv_store.tier import Lookup
from tests.kv_store.pages import SPACE, key_of, page_of

SIZE = len(page_of(1)[2])


def opened(root, capacity=100 * SIZE, space=SPACE, **options):
    tier = DiskTier(root, capacity, space, **options)
    assert tier.wait_ready(10)
    return closing(tier)


def put(tier, *numbers):
    return [tier.put(*page_of(number)[:2]) for number in numbers]


def there(tier, *numbers):
    return [n for n in numbers if tier.lookup([key_of(n)]) == [Lookup.HIT]]


def counted(tier):
    return tier.usage()[0].counters


def files(root):
    return sorted(path for path in root.rglob("*.safetensors*"))


def eventually(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_pages_outlive_the_tier(tmp_path):
    with opened(tmp_path, facts={"weights": "v1"}) as tier:
        assert put(tier, 1, 2, 1) == [True] * 3
        assert counted(tier).stored == 2
    with opened(tmp_path) as tier:
        found = tier.get(key_of(1))
        assert bytes(found) == page_of(1)[2] and found.ctypes.data % 64 == 0 and not found.flags.writeable
        assert tier.get(key_of(3)) is None
        (usage,) = tier.usage()
        assert (usage.num_pages, usage.num_bytes) == (2, 2 * SIZE)
    (path, _) = files(tmp_path)
    digits = key_of(1).block_hash.hex()
    assert path == tmp_path / SPACE[:12] / digits[:3] / f"{digits}_g0.safetensors"
    assert json.loads((tmp_path / SPACE[:12] / "config.json").read_bytes())["namespace"] == SPACE


@pytest.mark.parametrize("around_cache", [False, True])
def test_large_pages_go_around_the_page_cache_where_that_is_wanted(tmp_path, monkeypatch, around_cache):
    asked, set_direct = [], direct_io.set_direct
    monkeypatch.setattr(direct_io, "SMALLEST", SIZE)
    monkeypatch.setattr(direct_io, "set_direct", lambda *args: asked.append(args) or set_direct(*args))
    with opened(tmp_path, around_cache=around_cache) as tier:
        assert put(tier, 1) == [True] and bytes(tier.get(key_of(1))) == page_of(1)[2]
    assert (len(asked) >= 2) == around_cache
    assert (tmp_path / SPACE[:12] / "config.json").stat().st_size


def test_other_namespaces_are_never_found_but_count(tmp_path):
    other = namespace(weights="v2")
    with opened(tmp_path, space=other) as tier:
        assert tier.put(*page_of(1, space=other)[:2])
    with opened(tmp_path, 2 * SIZE) as tier:
        assert there(tier, 1) == [] and tier.get(key_of(1)) is None
        assert tier.usage()[0].num_bytes == SIZE
        put(tier, 2, 3)
        assert there(tier, 2, 3) == [2, 3]
        assert len(files(tmp_path)) == 2
    misplaced = tmp_path / page_folder.file_of(SPACE, key_of(5))  # a page of another model, under our name
    misplaced.write_bytes(page_of(5, space=other)[2])
    with opened(tmp_path) as tier:
        assert there(tier, 5) == [5]
        assert tier.get(key_of(5)) is None and counted(tier).corrupt == 1 and not misplaced.exists()


def test_namespaces_that_begin_alike_are_told_apart(tmp_path):
    with opened(tmp_path):
        pass
    with pytest.raises(ConfigError, match="belongs to the namespace"):
        DiskTier(tmp_path, SIZE, SPACE[:12] + "0" * 52)


def test_the_least_recently_used_go_also_after_a_restart(tmp_path):
    with opened(tmp_path, 3 * SIZE) as tier:
        put(tier, 1, 2, 3)
        tier.get(key_of(1))
    with opened(tmp_path, 3 * SIZE) as tier:
        put(tier, 4)
        assert there(tier, 1, 2, 3, 4) == [1, 3, 4]
        tier.touch([key_of(3)])
        put(tier, 5)
        assert there(tier, 1, 3, 4, 5) == [3, 4, 5]
        assert counted(tier).evictions == 2 and len(files(tmp_path)) == 3
        assert not tier.put(*page_of(6, layers=30)[:2]) and counted(tier).dropped == 1


def test_a_smaller_quota_is_kept_from_the_beginning(tmp_path):
    with opened(tmp_path) as tier:
        put(tier, *range(8))
    with opened(tmp_path, 3 * SIZE) as tier:
        eventually(lambda: tier.usage()[0].num_bytes <= 3 * SIZE)
        eventually(lambda: len(files(tmp_path)) == 3)
        assert there(tier, *range(8)) == [5, 6, 7]


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "long", "other key"])
def test_a_damaged_file_is_a_miss_and_goes(tmp_path, damage, caplog):
    with opened(tmp_path) as tier:
        put(tier, 1, 2)
        path = tmp_path / page_folder.file_of(SPACE, key_of(1))
        whole = bytearray(path.read_bytes())
        whole[-3] ^= 4 if damage == "flip" else 0
        damaged = {"cut": whole[:-1], "empty": b"", "long": whole + b"x", "other key": page_of(2)[2]}
        path.write_bytes(damaged.get(damage, whole))
        assert tier.get(key_of(1)) is None
        assert not path.exists() and there(tier, 1, 2) == [2]
        assert counted(tier).corrupt == 1 and tier.usage()[0].num_bytes == SIZE
        assert put(tier, 1) == [True] and bytes(tier.get(key_of(1))) == page_of(1)[2]
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def test_a_file_that_has_gone_is_a_miss(tmp_path):
    with opened(tmp_path) as tier:
        put(tier, 1)
        files(tmp_path)[0].unlink()
        assert there(tier, 1) == [1] and tier.get(key_of(1)) is None and there(tier, 1) == []
        assert counted(tier).errors == counted(tier).corrupt == 0 and tier.usage()[0].num_bytes == 0
        assert put(tier, 1) == [True]


def test_deleted_pages_go_at_once_and_their_files_soon(tmp_path):
    with opened(tmp_path) as tier:
        put(tier, 1, 2)
        tier.delete([key_of(1), key_of(9)])
        assert there(tier, 1, 2) == [2]
        eventually(lambda: len(files(tmp_path)) == 1 and tier.usage()[0].num_bytes == SIZE)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_takes_nothing_still_serves(tmp_path, monkeypatch, caplog, number):
    with opened(tmp_path, retry_after_s=0.2) as tier:
        put(tier, 1)

        def fails(*arguments):
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as broken:
            broken.setattr(os, "write", fails)
            assert put(tier, 2, 3, 4) == [False] * 3
            assert bytes(tier.get(key_of(1))) == page_of(1)[2]
        (usage,) = tier.usage()
        assert (usage.counters.errors, usage.counters.dropped, usage.num_bytes) == (1, 3, SIZE)
        assert len(list(tmp_path.rglob("*.safetensors*"))) == 1  # nothing half written is left
        eventually(lambda: put(tier, 2) == [True])
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "left alone" in caplog.records[0].message and "works again" in caplog.records[1].message


def test_a_folder_where_nothing_can_be_removed_is_not_written_over_its_quota(tmp_path, monkeypatch):
    with opened(tmp_path, 2 * SIZE) as tier:
        put(tier, 1, 2)

        def fails(*arguments, **more):
            raise PermissionError(errno.EACCES, "no")

        monkeypatch.setattr(os, "unlink", fails)
        assert put(tier, 3) == [False]
        assert there(tier, 1, 2, 3) == [1, 2] and tier.usage()[0].num_bytes == 2 * SIZE


def test_reading_that_fails_is_a_miss(tmp_path, caplog):
    with opened(tmp_path) as tier:
        put(tier, 1)
        path = files(tmp_path)[0]
        path.unlink()
        path.mkdir()  # opening it fails, and not because it is missing
        assert tier.get(key_of(1)) is tier.get(key_of(1)) is None
        assert counted(tier).errors == 2
    assert sum("Reading pages" in record.message for record in caplog.records) == 1


def test_a_folder_that_can_be_none(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for root, capacity, space, said in (
        (tmp_path / "file", 1, SPACE, "cannot hold pages"),
        (tmp_path, 0, SPACE, "capacity of 0"),
        (tmp_path, 1, "../../x", "hexadecimal"),
    ):
        with pytest.raises(ConfigError, match=said):
            DiskTier(root, capacity, space)


def test_a_store_of_others_needs_the_secret(tmp_path):
    with opened(tmp_path) as tier:
        put(tier, 1)
    with opened(tmp_path, secret=b"ours") as tier:
        assert tier.get(key_of(1)) is None and counted(tier).corrupt == 1
        assert tier.put(*page_of(1, b"ours")[:2]) and tier.get(key_of(1)) is not None


def test_files_that_are_no_pages_are_left_alone(tmp_path):
    with opened(tmp_path, SIZE) as tier:
        put(tier, 1)
    strange = [
        tmp_path / "notes.txt",
        files(tmp_path)[0].parent / "x.safetensors",
        tmp_path / "abc" / "y_g0.safetensors",
    ]
    for path in strange:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 5 * SIZE)
    with opened(tmp_path, SIZE) as tier:
        assert there(tier, 1) == [1]
        put(tier, 2)
    assert all(path.exists() for path in strange)


def test_two_tiers_share_a_folder(tmp_path):
    with opened(tmp_path, 4 * SIZE, rescan_s=0.05) as ours, opened(tmp_path, 4 * SIZE, rescan_s=0.05) as theirs:
        put(ours, 1, 2)
        eventually(lambda: there(theirs, 1, 2) == [1, 2])
        assert bytes(theirs.get(key_of(1))) == page_of(1)[2]
        put(theirs, 3, 4, 5)  # 2 was used longest ago
        eventually(lambda: there(ours, 1, 2, 3, 4, 5) == [1, 3, 4, 5])
        eventually(lambda: ours.usage()[0].num_bytes == len(files(tmp_path)) * SIZE == 4 * SIZE)


def test_a_page_that_comes_during_a_scan_stays(tmp_path, monkeypatch):
    with opened(tmp_path, rescan_s=60) as tier:
        put(tier, 1)
        list_pages = page_folder.pages_in

        def and_then_one_comes(root, fanout):
            found = list(list_pages(root, fanout))
            put(tier, 2)
            return found

        monkeypatch.setattr(page_folder, "pages_in", and_then_one_comes)
        files(tmp_path)[0].unlink()  # and one has gone
        tier._scan()
        assert there(tier, 1, 2) == [2] and tier.usage()[0].num_bytes == SIZE


def test_a_page_that_is_spared_and_written_at_once_is_counted_once(tmp_path, monkeypatch):
    with opened(tmp_path, 2 * SIZE, rescan_s=60) as tier:
        put(tier, 1, 2)
        look = os.stat

        def and_then_it_comes_again(path, **more):
            if str(path).endswith(page_folder.file_of(SPACE, key_of(1))):
                monkeypatch.setattr(os, "stat", look)
                os.utime(path)  # somebody else used it
                tier.capacity *= 2
                put(tier, 1)
                tier.capacity //= 2
            return look(path, **more)

        monkeypatch.setattr(os, "stat", and_then_it_comes_again)
        put(tier, 3)
        (usage,) = tier.usage()
        assert usage.num_bytes == usage.num_pages * SIZE == len(files(tmp_path)) * SIZE <= 2 * SIZE


def test_what_another_engine_uses_is_spared(tmp_path):
    with opened(tmp_path, 2 * SIZE, rescan_s=60) as ours:
        put(ours, 1, 2)
        with opened(tmp_path, 2 * SIZE, rescan_s=60) as theirs:
            theirs.get(key_of(1))
        put(ours, 3)
        assert there(ours, 1, 2, 3) == [1, 3]


WRITER = """
import sys
from jaxpaged.kv_store.disk import DiskTier
from tests.kv_store.pages import SPACE, page_of
first, last, capacity = map(int, sys.argv[2:5])
tier = DiskTier(sys.argv[1], capacity, SPACE, rescan_s=0.1)
print("ready", flush=True)
while True:
    for number in range(first, last):
        key, pieces, whole = page_of(number)
        tier.put(key, pieces)
        found = tier.get(key)
        assert found is None or bytes(found) == whole
    print("round", flush=True)
    if sys.argv[5] == "once":
        break
tier.close()
counters = tier.usage()[0].counters
assert counters.errors == counters.corrupt == 0, counters
"""


def writer(root, first, last, capacity, how):
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(root), str(first), str(last), str(capacity), how], stdout=subprocess.PIPE
    )


def test_two_processes_write_into_one_folder(tmp_path):
    capacity = 20 * SIZE
    both = [writer(tmp_path, first, first + 40, capacity, "once") for first in (0, 20)]
    assert [process.wait(60) for process in both] == [0, 0]
    with opened(tmp_path, capacity) as tier:
        eventually(lambda: tier.usage()[0].num_bytes <= capacity)
        present = there(tier, *range(60))
        assert present and all(bytes(tier.get(key_of(n))) == page_of(n)[2] for n in present)
        assert counted(tier).corrupt == 0
    assert list(tmp_path.rglob(f"{page_folder.WRITING}/*")) == []


def test_a_killed_writer_leaves_nothing_wrong_behind(tmp_path):
    process = writer(tmp_path, 0, 8, 4 * SIZE, "forever")
    lines = [process.stdout.readline() for _ in range(5)]
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    assert lines[-1] == b"round\n"
    unfinished = tmp_path / SPACE[:12] / page_folder.WRITING
    (unfinished / "left.1.2").write_bytes(page_of(1)[2][:100])
    held = page_folder.open_new(unfinished / "held.1.2")
    page_folder.fcntl.flock(held, page_folder.fcntl.LOCK_EX)  # a writer that lives
    with opened(tmp_path, 4 * SIZE) as tier:
        present = there(tier, *range(8))
        assert present and all(bytes(tier.get(key_of(n))) == page_of(n)[2] for n in present)
        assert counted(tier).corrupt == 0
        assert [path.name for path in unfinished.iterdir()] == ["held.1.2"]
        assert put(tier, 9) == [True]
    os.close(held)
