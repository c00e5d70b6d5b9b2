"""What routers hear of tiers: what comes, what goes, and of copies in several tiers of a medium once."""

import time
from contextlib import closing

from jaxpaged.kv_store import page_folder
from jaxpaged.kv_store.disk import DiskTier
from jaxpaged.kv_store.host import HostTier
from jaxpaged.kv_store.page import namespace
from jaxpaged.kv_store.tier_events import MEMORY, STORAGE, TierEvent, TierEventLog
from tests.kv_store.pages import SPACE, key_of, page_of
from tests.kv_store.test_remote import Dictionary

SIZE = len(page_of(1)[2])


def came(medium, *numbers):
    return [TierEvent(medium, key_of(number), True) for number in numbers]


def went(medium, *numbers):
    return [TierEvent(medium, key_of(number), False) for number in numbers]


def put(tier, *numbers):
    for number in numbers:
        assert tier.put(*page_of(number)[:2])


def test_memory_tells_of_what_is_there_comes_is_evicted_and_is_deleted():
    tier, log = HostTier(2 * SIZE + 100), TierEventLog()
    put(tier, 1)
    tier.watch(log)
    assert log.take() == came(MEMORY, 1)
    put(tier, 2, 2, 3)
    assert log.take() == [*came(MEMORY, 2), *went(MEMORY, 1), *came(MEMORY, 3)]
    tier.delete([key_of(2), key_of(9)])
    assert log.take() == went(MEMORY, 2)
    tier.close()
    assert log.take() == went(MEMORY, 3) and log.take() == []


def test_a_disk_tells_of_its_own_namespace_only_and_of_what_a_scan_finds(tmp_path):
    page_folder.write_page(tmp_path, page_folder.file_of(SPACE, key_of(1)), page_of(1)[1])
    other = namespace(weights="v2")
    page_folder.write_config(tmp_path, other, {})
    page_folder.write_page(tmp_path, page_folder.file_of(other, key_of(5)), page_of(5, None, other)[1])
    log = TierEventLog()
    with closing(DiskTier(tmp_path, 10 * SIZE, SPACE, rescan_s=0.05)) as tier:
        tier.wait_ready()
        tier.watch(log)
        assert log.take() == came(STORAGE, 1)
        put(tier, 2)
        page_folder.write_page(tmp_path, page_folder.file_of(SPACE, key_of(3)), page_of(3)[1])
        (tmp_path / page_folder.file_of(SPACE, key_of(1))).unlink()
        wanted, heard = {*came(STORAGE, 2, 3), *went(STORAGE, 1)}, set()
        deadline = time.monotonic() + 20
        while heard != wanted:
            heard |= set(log.take())
            assert heard <= wanted and time.monotonic() < deadline
            time.sleep(0.02)
        tier.delete([key_of(2)])
        assert log.take() == went(STORAGE, 2)


def test_a_store_elsewhere_tells_of_what_it_is_known_to_have():
    tier, log = Dictionary(), TierEventLog()
    tier.watch(log)
    put(tier, 1)
    assert log.take() == came(STORAGE, 1)
    tier.pages.clear()
    assert tier.get(key_of(1)) is None and log.take() == went(STORAGE, 1)
    tier.close()


def test_a_page_in_two_tiers_of_a_medium_comes_once_and_goes_once():
    log = TierEventLog()
    for is_there in (True, True, False):
        log.note(STORAGE, key_of(1), is_there)
    log.note(MEMORY, key_of(1), True)
    log.note(STORAGE, key_of(1), False)
    assert log.take() == [*came(STORAGE, 1), *came(MEMORY, 1), *went(STORAGE, 1)]
